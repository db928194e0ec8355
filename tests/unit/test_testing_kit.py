"""Tests written with `eventjet.testing` get the same as production: events as they are read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Column, Date, Integer, MetaData, Table

from eventjet import (
    App,
    Deadline,
    Outcome,
    Reaction,
    Recorded,
    Step,
    after,
    aggregate,
    do,
    event,
    listens,
    process,
    projection,
    reactor,
)
from eventjet.errors import UnencodableEvent, UsageError
from eventjet.testing import on, projected, reacted, scenario, story

LATE = datetime(2030, 7, 1, 0, 30, tzinfo=ZoneInfo("Europe/Berlin"))
JUNE = date(2030, 6, 30)
"""The day of `LATE` in UTC."""


@event("visit.booked")
class Booked:
    slot: datetime
    opens: time = time(9)


@event("visit.confirmed")
class Confirmed:
    day: date


@aggregate("visit")
class Visit:
    slot: datetime | None = None

    def book(self, slot: datetime, opens: time = time(9)) -> Booked:
        return Booked(slot=slot, opens=opens)

    def confirm(self) -> Confirmed:
        assert self.slot
        return Confirmed(day=self.slot.date())

    def evolve(self, event: Booked | Confirmed) -> Visit:
        return replace(self, slot=event.slot) if isinstance(event, Booked) else self


@dataclass(frozen=True)
class Day:
    day: date
    n: int = 0


table = Table("days", MetaData(), Column("day", Date, primary_key=True), Column("n", Integer, nullable=False))


def day_of(event: Recorded[Booked]) -> date:
    return event.data.slot.date()


@projection("days", table=table, key=day_of)
def days(row: Day | None, event: Recorded[Booked]) -> Day:
    row = row or Day(day_of(event))
    return replace(row, n=row.n + 1)


@reactor("confirming")
async def confirming(event: Recorded[Booked], reaction: Reaction) -> None:
    await reaction.repository(Visit).execute(event.data.slot.date().isoformat(), Visit.book, event.data.slot)


def by_hand(event: Any) -> Recorded[Any]:
    return Recorded(event, "v", 1, 1, datetime(2030, 1, 1, tzinfo=UTC), "e")


async def test_events_have_the_same_zone_in_tests_and_in_production() -> None:
    assert on("v", Booked(slot=LATE))[0].data.slot.tzinfo is UTC
    projected(days, on("v", Booked(slot=LATE))).rows(Day(JUNE, 1))
    projected(days, [by_hand(Booked(slot=LATE))]).rows(Day(JUNE, 1))
    scenario(Visit).when(Visit.book, LATE).then(Booked(slot=LATE)).when(Visit.confirm).then(Confirmed(day=JUNE))
    (await reacted(confirming, Booked(slot=LATE))).executed(Visit, JUNE.isoformat(), Visit.book, LATE.astimezone(UTC))
    async with App("visits", aggregates=[Visit]).in_memory() as jet:
        visits = jet.repository(Visit)
        execution = await visits.execute("v", Visit.book, LATE)
        assert execution.state.slot is not None
        assert [event.slot.tzinfo for event in execution.events if isinstance(event, Booked)] == [UTC]
        assert (execution.state.slot.tzinfo, execution.state) == (UTC, await visits.load("v"))
        assert (await visits.execute("v", Visit.confirm)).events == (Confirmed(day=JUNE),)


@event("trip.planned")
class Planned:
    pass


@event("trip.fixed")
class Fixed:
    day: date
    heard: date


@process("trip")
class Trip:
    planned: bool = False
    day: date | None = None

    def step(self) -> Step[Visit, Any] | None:
        return do(Visit, "v", Visit.book, LATE).then_with(Trip.fix) if self.planned and self.day is None else None

    def fix(self, outcome: Outcome[Visit, Any]) -> Fixed:
        (booked,) = outcome.events
        return Fixed(day=booked.slot.date(), heard=JUNE)

    @listens()
    def hear(self, event: Recorded[Booked]) -> Fixed:
        return Fixed(day=event.data.slot.date(), heard=event.recorded_at.date())

    def evolve(self, event: Planned | Fixed) -> Trip:
        return replace(self, planned=True) if isinstance(event, Planned) else replace(self, day=event.day)


def test_a_story_passes_outcomes_and_times_as_a_process_gets_them() -> None:
    planned = story(Trip).given(Planned()).does(Visit, "v", Visit.book, LATE)
    planned.done(Outcome(Visit(slot=LATE.astimezone(UTC)), (Booked(slot=LATE),))).then(Fixed(day=JUNE, heard=JUNE))
    recorded = Recorded(Booked(slot=LATE), "v", 1, 1, LATE, "e")
    story(Trip).hears(Trip.hear, recorded).then(Fixed(day=JUNE, heard=JUNE))


def test_a_step_or_a_deadline_that_records_nothing_fails_its_test() -> None:
    @process("idle")
    class Idle:
        def nothing(self, error: Exception | None = None) -> Planned | None:
            return None

        def step(self) -> Step[Visit, Any]:
            return do(Visit, "v", Visit.book, LATE).then(Idle.nothing).refused(ValueError, Idle.nothing)

        def deadline(self) -> Deadline[Idle, Planned]:
            return after(timedelta(1), Idle.nothing)

        def evolve(self, event: Planned) -> Idle:
            return self

    asked = story(Idle).does(Visit, "v", Visit.book, LATE)
    for decide in (asked.done, lambda: asked.refused(ValueError()), lambda: story(Idle).due_after(timedelta(2))):
        with pytest.raises(AssertionError, match="nothing recorded nothing, so it would be repeated for ever"):
            decide()
    story(Idle).when(Idle.nothing).then_nothing()


async def test_an_event_that_a_handler_does_not_take_fails_its_test() -> None:
    with pytest.raises(UsageError, match=r"confirming takes Booked, so no worker calls it with a Confirmed. Give"):
        await reacted(confirming, Confirmed(day=JUNE))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Trip.hear takes Booked, so no worker calls it with a Confirmed. Give"):
        story(Trip).hears(Trip.hear, on("v", Confirmed(day=JUNE))[0])  # type: ignore[arg-type]


@aggregate("room")
class Room:
    seats: Mapping[int, str] = field(default_factory=dict[int, str])

    def book(self, seat: int, by: str) -> Planned:
        self.seats[seat] = by  # type: ignore[index]  # pyright: ignore[reportIndexIssue]  the mistake
        raise PermissionError(by)

    def evolve(self, event: Planned) -> Room:
        return self


def test_a_decision_that_changes_its_state_and_raises_fails_its_test() -> None:
    with pytest.raises(AssertionError, match=r"Room\.book changed what it was given"):
        scenario(Room).when(Room.book, 2, "banned").then_raises(PermissionError)


async def test_an_event_that_cannot_be_stored_fails_every_test() -> None:
    lost = Booked(slot=LATE, opens=time(9, tzinfo=LATE.tzinfo))
    for call in (lambda: on("v", lost), lambda: projected(days, [by_hand(lost)]), lambda: scenario(Visit).given(lost)):
        with pytest.raises(UnencodableEvent, match="opens"):
            call()
    with pytest.raises(UnencodableEvent, match="opens"):
        await reacted(confirming, lost)
    scenario(Visit).when(Visit.book, LATE, lost.opens).then_raises(UnencodableEvent, match="opens")
    with pytest.raises(AssertionError, match="opens"):
        scenario(Visit).when(Visit.book, LATE, lost.opens).then(lost)


def test_a_time_without_a_zone_is_refused_with_the_way_to_give_it_one() -> None:
    naive = LATE.replace(tzinfo=None)
    with pytest.raises(AssertionError, match=r"slot: a datetime needs a time zone, as datetime\.now\(UTC\) has one"):
        scenario(Visit).when(Visit.book, naive).then(Booked(slot=LATE))


def test_a_time_that_its_zone_has_twice_equals_itself_in_utc() -> None:
    """Python never calls such times of two zones equal (PEP 495)."""
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=LATE.tzinfo, fold=1)
    scenario(Visit).when(Visit.book, twice).then(Booked(slot=twice.astimezone(UTC)))
    scenario(Visit).when(Visit.book, twice.astimezone(UTC)).then(Booked(slot=twice))
    assert twice.astimezone(UTC) - timedelta(hours=1) != twice
