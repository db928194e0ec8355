"""A state at any version equals a fold from the start; a look has a limit, and nothing is folded twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from eventjet import App, aggregate, event
from eventjet.codec.headers import RawRecord
from eventjet.commands.repository import Repositories
from eventjet.log.memory import MemoryStore
from eventjet.operations import aggregates
from eventjet.operations.aggregates import FOLDED_MAX, Reached, TimeTravel


@event("counter.counted")
class Counted:
    by: int


@aggregate("counter")
class Counter:
    total: int = 0
    seen: int = 0

    def count(self, *by: int) -> Sequence[Counted]:
        return [Counted(by=amount) for amount in by]

    def evolve(self, event: Counted) -> Counter:
        if event.by == 13:
            raise ValueError("thirteen")
        return replace(self, total=self.total + event.by, seen=self.seen + 1)


shop = App("shop", aggregates=[Counter])


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "FOLD_S", 600.0)


class Counting(MemoryStore):
    given = 0

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        records = await super().history(aggregate, aggregate_id, after=after, limit=limit)
        self.given += len(records)
        return records


async def log_of(values: Sequence[int]) -> tuple[Counting, TimeTravel]:
    store = Counting("shop")
    repositories = Repositories(shop, store)
    counters = repositories.of(Counter)
    for start in range(0, len(values), 1_000):
        await counters.execute("a", Counter.count, *values[start : start + 1_000])
    store.given = 0
    return store, TimeTravel(repositories, None)


def total(reached: Reached) -> int:
    assert not reached.fault
    assert reached.folded.state.seen == reached.folded.version
    return reached.folded.state.total


async def test_states_at_any_versions_in_any_order_equal_the_fold() -> None:
    values = [number % 11 for number in range(3_000)]
    _, travel = await log_of(values)
    for version in [0, 3_000, 1, 2_999, *(Random(3).randrange(3_001) for _ in range(60))]:
        assert total(await travel.at("counter", "a", version)) == sum(values[:version])


async def test_folded_events_are_not_folded_again() -> None:
    store, travel = await log_of([1] * 3_000)
    assert total(await travel.at("counter", "a", 3_000)) == 3_000
    store.given = 0
    for version in range(1_700, 1_730):
        assert total(await travel.at("counter", "a", version)) == version
    assert store.given <= 500 + 30


async def test_a_look_has_a_limit_and_the_next_look_continues() -> None:
    _, travel = await log_of([1] * 5_000)
    first = await travel.at("counter", "a", 5_000, 2_000)
    assert (first.folded.version, first.goes_on) == (2_000, True)
    assert "5,000 events from the nearest known state, at version 0" in first.fault
    second = await travel.at("counter", "a", 5_000, 2_000)
    assert second.folded.version == 4_000
    assert total(await travel.at("counter", "a", 5_000, 2_000)) == 5_000


async def test_a_look_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, travel = await log_of([1] * 1_500)
    monkeypatch.setattr(aggregates, "FOLD_S", -1.0)
    reached = await travel.at("counter", "a", 1_500)
    assert (reached.folded.version < 1_500, reached.goes_on) == (True, True)


async def test_an_error_of_evolve_is_reported_with_its_version() -> None:
    store = Counting("shop")
    repositories = Repositories(shop, store)
    counters = repositories.of(Counter)
    await counters.execute("a", Counter.count, 1, 2)
    # The events of another release, whose fold did not raise.
    original = Counter.evolve
    try:
        Counter.evolve = lambda self, event: replace(self, seen=self.seen + 1)  # type: ignore[method-assign]
        await counters.execute("a", Counter.count, 13, 4)
    finally:
        Counter.evolve = original  # type: ignore[method-assign]
    travel = TimeTravel(repositories, None)
    for version in (3, 4):
        reached = await travel.at("counter", "a", version)
        assert (reached.folded.version, reached.folded.state.total, reached.goes_on) == (2, 3, False)
        assert reached.fault.startswith("Version 3, at position 3: Counter.evolve raised ValueError")
    assert total(await travel.at("counter", "a", 2)) == 3


async def test_a_replaced_log_is_recognised() -> None:
    store, travel = await log_of([1] * 600)
    assert total(await travel.at("counter", "a", 600)) == 600
    store.__init__("shop")  # type: ignore[misc]  made again, with another identity
    await Repositories(shop, store).of(Counter).execute("a", Counter.count, 5)
    assert total(await travel.at("counter", "a", 1)) == 5


async def test_few_states_of_a_long_history_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "_CACHED_MAX", 20)
    _, travel = await log_of([1] * 4_000)
    for version in range(1, 4_000, 37):
        await travel.at("counter", "a", version)
    assert len(travel._states) == 20
    assert max(version for _, _, version in travel._states) > 3_900
    assert FOLDED_MAX == 20_000
