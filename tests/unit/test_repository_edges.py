"""Edge cases of a repository: foreign events, zones, failing folds, lagging replicas, shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from typing import Any, cast
from uuid import uuid4

import pytest

from eventjet import App, Imported, aggregate, event
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord
from eventjet.commands import Repository
from eventjet.commands.repository import Repositories
from eventjet.domain.history import COMMANDS_MAX, Commands
from eventjet.errors import ConcurrencyConflict, DefinitionError, StoreUnavailable, UsageError
from eventjet.jet import Jet
from eventjet.log.memory import MemoryStore
from eventjet.log.store import EventStore
from eventjet.settings import Settings


@event("clock.told")
class Told:
    at: datetime


@event("clock.wound")
class Wound:
    by: list[int]


@event("clock.broken")
class Broken:
    pass


@event("bell.rung")
class Rung:
    pass


@aggregate("clock")
class Clock:
    shown: str = ""
    turns: tuple[int, ...] = ()

    def tell(self, at: datetime) -> Told:
        return Told(at=at)

    def wind(self, by: list[int]) -> Wound:
        return Wound(by=by)

    def smash(self) -> Broken:
        return Broken()

    def evolve(self, event: Told | Wound | Broken) -> Clock:
        match event:
            case Told(at=at):
                return replace(self, shown=at.isoformat())
            case Wound(by=by):
                return replace(self, turns=(*self.turns, *by))
            case Broken():
                raise RuntimeError("evolve forgot this one")


@aggregate("bell")
class Bell:
    rings: int = 0

    def ring(self) -> Rung:
        return Rung()

    def evolve(self, happened: Rung) -> Bell:
        return replace(self, rings=self.rings + 1)


@aggregate("forgetful", snapshot_every=None)
class Forgetful:
    n: int = 0

    def slip(self) -> Broken:
        return Broken()

    def evolve(self, event: Broken) -> Forgetful | None:
        return None


def connection(*aggregates: Any, store: EventStore | None = None, retired: tuple[str, ...] = ()) -> Jet:
    app = App(f"app_{uuid4().hex[:8]}", aggregates=aggregates, retired_events=retired)
    return Jet(Repositories(app, store or MemoryStore(app.name)), Settings())


class Lagging:
    """A replica that has the log only up to `known`, beside a leader that has all of it."""

    def __init__(self, inner: MemoryStore, known: int, catches_up_after: int = 1_000_000) -> None:
        self._inner = inner
        self.known = known
        self.reads = 0
        self._catches_up_after = catches_up_after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        return [record async for page in self.pages(aggregate, aggregate_id, after=after) for record in page][:limit]

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        self.reads += 1
        known = self.known if self.reads <= self._catches_up_after else 1_000_000
        async for page in self._inner.pages(aggregate, aggregate_id, after=after):
            yield [record for record in page if record[0] <= known]


async def test_an_event_of_another_aggregate_of_the_app_is_refused() -> None:
    jet = connection(Clock, Bell)
    rogue: Callable[..., Any] = lambda clock: Rung()  # noqa: E731
    with pytest.raises(UsageError, match="not one of its events"):
        await jet.repository(Clock).execute("a", rogue)
    with pytest.raises(UsageError, match="not one of its events"):
        await jet.append_many([Imported(Clock, "a", Rung())], source="x")
    assert (await jet.log()).last == 0


async def test_a_committed_state_is_the_fold_of_what_was_stored() -> None:
    jet = connection(Clock)
    clocks = jet.repository(Clock)
    at = datetime(2026, 5, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    execution = await clocks.execute("a", Clock.tell, at)
    assert execution.state.shown == "2026-04-30T23:30:00+00:00"
    elsewhere = Repository(jet.name, jet.store, Catalog([Told, Wound, Broken]), Clock)
    assert await elsewhere.load("a") == execution.state
    assert execution.events == (Told(at=at),)


async def test_changing_an_argument_after_a_command_changes_no_event() -> None:
    clocks = connection(Clock).repository(Clock)
    turns = [1, 2]
    execution = await clocks.execute("a", Clock.wind, turns)
    turns.append(3)
    assert execution.events == (Wound(by=[1, 2]),)


async def test_an_event_that_evolve_refuses_is_not_stored() -> None:
    jet = connection(Clock)
    with pytest.raises(DefinitionError, match=r"Clock\.evolve raised RuntimeError for Broken: evolve forgot"):
        await jet.repository(Clock).execute("a", Clock.smash)
    assert (await jet.log()).last == 0
    forgetful = connection(Forgetful)
    with pytest.raises(DefinitionError, match="returned None for Broken"):
        await forgetful.repository(Forgetful).execute("a", Forgetful.slip)
    with pytest.raises(DefinitionError, match="returned None for Broken"):
        await forgetful.transact(forgetful.repository(Forgetful).decide("a", Forgetful.slip))
    assert (await forgetful.log()).last == 0


async def test_an_old_command_with_a_retired_event_is_recognised() -> None:
    old = connection(Clock, Bell)
    await old.repository(Bell).command("once").execute("b", Bell.ring)
    await old.append_many([Imported(Bell, "b", Rung()) for _ in range(COMMANDS_MAX + 1)], source="x")

    @aggregate("bell")
    class Silent:
        rings: int = 0

        def evolve(self, event: Told) -> Silent:
            return self

    Silent.evolve.__annotations__["event"] = Told
    catalog = Catalog([Told], retired=["bell.rung"])
    bells: Any = Repository(old.name, old.store, catalog, Silent)

    def ring(bell: Any) -> Told:
        return Told(at=datetime.now(UTC))

    repeated = await bells.command("once").execute("b", ring)
    assert (repeated.version, repeated.events) == (1, ())


def test_two_readers_of_a_tail_do_not_forget_commands_of_a_third() -> None:
    shared = Commands()
    for version in range(1, 2 * COMMANDS_MAX):
        shared.add(f"c{version}", version)
    newest = f"c{2 * COMMANDS_MAX - 1}"
    for version in range(1, COMMANDS_MAX):  # another task folds the same events, and is interrupted here
        shared.add(f"c{version}", version)
    assert shared.find(newest) == (2 * COMMANDS_MAX - 1, 2 * COMMANDS_MAX - 1)
    assert shared.find(f"c{COMMANDS_MAX}") is not None


async def test_time_travel_waits_for_a_lagging_replica() -> None:
    store = MemoryStore("lag")
    ahead = connection(Bell, store=store).repository(Bell)
    for _ in range(5):
        await ahead.execute("b", Bell.ring)
    for resolved in ({"version": 5}, {"position": 5}, {"at": datetime.now(UTC)}):
        slow: Any = Lagging(store, 3, catches_up_after=1)
        assert (await connection(Bell, store=slow).repository(Bell).load("b", **resolved)).rings == 5  # type: ignore[arg-type]
        stuck: Any = Lagging(store, 3)
        with pytest.raises(StoreUnavailable):
            await connection(Bell, store=stuck).repository(Bell).load("b", **resolved)  # type: ignore[arg-type]
        stuck = Lagging(store, 3)
        assert (await connection(Bell, store=stuck).repository(Bell).load("b", version=2)).rings == 2
    with pytest.raises(UsageError, match="5 events, so there is no version 6"):
        await ahead.load("b", version=6)


async def test_a_conflict_reads_only_new_events() -> None:
    store = MemoryStore("tail")
    first, second = (connection(Bell, store=store).repository(Bell) for _ in range(2))
    for _ in range(5):
        await first.execute("b", Bell.ring)
    await second.execute("b", Bell.ring)
    positions: list[int] = []
    pages = store.pages

    def counted(aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        positions.append(after)
        return pages(aggregate, aggregate_id, after=after)

    store.pages = counted  # type: ignore[method-assign]
    assert (await first.execute("b", Bell.ring)).state.rings == 7
    assert positions
    assert min(positions) >= 4


async def test_a_delivered_first_event_saves_a_read_of_its_state_and_can_be_stale() -> None:
    store = Lagging(MemoryStore("bells"), known=1_000_000)
    writer = connection(Bell, store=cast("EventStore", store)).repository(Bell)
    await writer.command("first").execute("b", Bell.ring)
    (first,) = await writer.history("b")
    reader = connection(Bell, store=cast("EventStore", store)).repository(Bell)
    reader.executor.cache_first(first)
    before = store.reads
    cached = await reader.executor.reaching("b", position=first.position)
    assert store.reads == before
    assert cached == await writer.executor.newest("b")
    assert cached.commands.find("first") == (1, 1)

    await writer.execute("b", Bell.ring)
    assert (await reader.execute("b", Bell.ring)).state == Bell(rings=3)  # the append found the cached state stale
    second = (await writer.history("b"))[1]
    late = connection(Bell, store=cast("EventStore", store)).repository(Bell)
    late.executor.cache_first(second)
    assert late.executor.cache.get("b") is None  # a later event says too little about the state


async def test_lost_races_have_a_limit_and_name_the_lost_position(monkeypatch: pytest.MonkeyPatch) -> None:
    class Contested(MemoryStore):
        tries = 0

        async def append(self, writes: Any) -> int:
            self.tries += 1
            raise ConcurrencyConflict("taken", 41)

    monkeypatch.setattr("eventjet.commands.execute.CONFLICTS_MAX", 5)
    store = Contested("x")
    with pytest.raises(ConcurrencyConflict, match=r"position 41.*the last of 5 tries"):
        await Repository("x", store, Catalog([Rung]), Bell).execute("b", Bell.ring)
    assert store.tries == 5


async def test_a_transaction_takes_only_decisions_of_its_own_connection() -> None:
    first, second = connection(Bell), connection(Bell)
    with pytest.raises(UsageError, match="another connection"):
        await first.transact(second.repository(Bell).decide("b", Bell.ring))
    assert (await first.log()).last == (await second.log()).last == 0


async def test_transactions_that_name_aggregates_crosswise_all_end() -> None:
    jet = connection(Bell, Clock)
    bells, clocks = jet.repository(Bell), jet.repository(Clock)
    now = datetime.now(UTC)
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(jet.transact(bells.decide("x", Bell.ring), clocks.decide("x", Clock.tell, now)) for _ in range(20)),
            *(jet.transact(clocks.decide("x", Clock.tell, now), bells.decide("x", Bell.ring)) for _ in range(20)),
            *(bells.execute("x", Bell.ring) for _ in range(20)),
        )
    assert (await bells.load("x")).rings == 60


async def test_a_cancelled_caller_leaves_no_lock_behind() -> None:
    gate, started = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def append(self, writes: Any) -> int:
            started.set()
            await gate.wait()
            return await super().append(writes)

    bells = Repository("x", Slow("x"), Catalog([Rung]), Bell)
    first = asyncio.create_task(bells.execute("b", Bell.ring))
    await started.wait()
    waiting = [asyncio.create_task(bells.execute("b", Bell.ring)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in (first, waiting[0]):
        task.cancel()
    await asyncio.gather(first, waiting[0], return_exceptions=True)
    gate.set()
    await asyncio.gather(*waiting[1:])
    assert (await bells.load("b")).rings == 2
    del first, waiting, task  # A cancelled task keeps its frames.
    assert not bells.executor.cache._locks  # pyright: ignore[reportPrivateUsage]


async def test_an_id_of_a_text_enum_is_its_text() -> None:
    text = f"id-{uuid4().hex}"
    kind: Any = Enum("Kind", {"A": text}, type=str)
    jet = connection(Bell)
    bells = jet.repository(Bell)
    await bells.execute(kind.A, Bell.ring)
    assert (await bells.load(text)).rings == 1
    (record,) = await jet.store.history("bell", text)
    assert record[2].decode() == f"{jet.name}.bell.{text}"


async def test_a_start_without_a_zone_is_refused() -> None:
    jet = connection(Bell)
    with pytest.raises(UsageError, match="zone"):
        _ = [recorded async for recorded in jet.tail(since=datetime(2026, 1, 1))]  # noqa: DTZ001  naive is the point


@pytest.mark.parametrize("name", ["", "clock told", "clock.told ", "clock\r\nEj-Command: x", "uhr.geläutet", "a" * 101])
def test_a_wire_name_that_cannot_be_a_header_is_refused(name: str) -> None:
    kind = event(name)(type("Kind", (), {"__annotations__": {}, "__module__": __name__}))
    faults = Catalog([kind]).faults()
    assert faults
    assert repr(name) in faults[0]
