"""Tests written with `eventjet.testing` are given what production is given: events as they are read back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Column, Date, Integer, MetaData, Table

from eventjet import App, Reaction, Recorded, aggregate, event, projection, reactor
from eventjet.errors import UnencodableEvent
from eventjet.testing import on, projected, reacted, scenario

LATE = datetime(2030, 7, 1, 0, 30, tzinfo=ZoneInfo("Europe/Berlin"))
JUNE = date(2030, 6, 30)
"""Its day in UTC."""


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


async def test_events_have_the_zone_in_tests_that_they_have_in_production() -> None:
    assert on("v", Booked(slot=LATE))[0].data.slot.tzinfo is UTC
    projected(days, on("v", Booked(slot=LATE))).rows(Day(JUNE, 1))
    projected(days, [by_hand(Booked(slot=LATE))]).rows(Day(JUNE, 1))
    scenario(Visit).when(Visit.book, LATE).then(Booked(slot=LATE)).when(Visit.confirm).then(Confirmed(day=JUNE))
    (await reacted(confirming, Booked(slot=LATE))).executed(Visit, JUNE.isoformat(), Visit.book, LATE.astimezone(UTC))
    async with App("visits", aggregates=[Visit]).in_memory() as jet:
        visits = jet.repository(Visit)
        await visits.execute("v", Visit.book, LATE)
        assert (await visits.execute("v", Visit.confirm)).events == (Confirmed(day=JUNE),)


async def test_an_event_that_could_not_be_stored_passes_no_test() -> None:
    lost = Booked(slot=LATE, opens=time(9, tzinfo=LATE.tzinfo))
    for given in (lambda: on("v", lost), lambda: projected(days, [by_hand(lost)]), lambda: scenario(Visit).given(lost)):
        with pytest.raises(UnencodableEvent, match="opens"):
            given()
    with pytest.raises(UnencodableEvent, match="opens"):
        await reacted(confirming, lost)
    scenario(Visit).when(Visit.book, LATE, lost.opens).then_raises(UnencodableEvent, match="opens")
    with pytest.raises(AssertionError, match="opens"):
        scenario(Visit).when(Visit.book, LATE, lost.opens).then(lost)


def test_a_time_that_a_zone_has_twice_is_what_was_expected() -> None:
    """Python calls two of them unequal (PEP 495)."""
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=LATE.tzinfo, fold=1)
    scenario(Visit).when(Visit.book, twice).then(Booked(slot=twice.astimezone(UTC)))
    scenario(Visit).when(Visit.book, twice.astimezone(UTC)).then(Booked(slot=twice))
    assert twice.astimezone(UTC) - timedelta(hours=1) != twice
