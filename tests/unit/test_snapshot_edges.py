"""Snapshots that must not be used, states that must not be stored, and a queue that no error stops."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet import App, aggregate, event
from eventjet.codec.catalog import Catalog
from eventjet.commands import Repository
from eventjet.commands.loading import Snapshots
from eventjet.domain.history import Commands, FoldedState
from eventjet.errors import StoreUnavailable
from eventjet.jetstream.client import Client
from eventjet.log.memory import MemoryStore
from eventjet.log.snapshots import KeyValueSnapshots, SnapshotCodec


@event("tally.added")
class Added:
    n: int
    note: str = ""


LONDON = ZoneInfo("Europe/London")


class Stamp(datetime):
    pass


class Tone(StrEnum):
    HIGH = "high"


@dataclass(frozen=True)
class Span:
    since: datetime


@aggregate("tally", snapshot_every=2)
class Tally:
    total: int = 0
    note: str = ""
    ratio: float = 0.0
    seen: Mapping[str, int] = field(default_factory=dict[str, int])
    at: datetime | None = None
    opens: time | None = None
    days: frozenset[datetime] = frozenset()
    by_time: Mapping[datetime, int] = field(default_factory=dict[datetime, int])
    nested: tuple[Span, ...] = ()
    tone: Any = ""
    anything: Any = None

    def add(self, n: int) -> Added:
        return Added(n=n)

    def evolve(self, happened: Added) -> Tally:
        return replace(self, total=self.total + happened.n)


class MemorySnapshots(KeyValueSnapshots):
    def __init__(self) -> None:
        super().__init__("kept", None)  # type: ignore[arg-type]
        self.values: dict[tuple[str, str], bytes] = {}

    async def get(self, aggregate: str, aggregate_id: str) -> bytes | None:
        return self.values.get((aggregate, aggregate_id))

    async def put(self, aggregate: str, aggregate_id: str, value: bytes) -> None:
        self.values[(aggregate, aggregate_id)] = value


def repository(store: Any, saved: MemorySnapshots) -> Repository[Tally, Added]:
    snapshots = Snapshots(saved, SnapshotCodec[Tally](Tally), 2)
    return Repository("x", store, Catalog([Added]), Tally, snapshots=snapshots)  # type: ignore[return-value]


async def filled(store: MemoryStore, saved: MemorySnapshots, *numbers: int) -> None:
    tallies = repository(store, saved)
    for number in numbers:
        await tallies.execute("a", Tally.add, number)
    await saved.close()


def test_the_parameter_of_evolve_may_have_any_name() -> None:
    App("x", aggregates=[Tally])


@pytest.mark.parametrize("regrown", [(10, 20), (10, 20, 30), (10, 20, 30, 40, 50), (10,), ()])
async def test_a_snapshot_of_a_lost_log_is_not_used(regrown: tuple[int, ...]) -> None:
    lost, saved = MemoryStore("x"), MemorySnapshots()
    await filled(lost, saved, 1, 2)
    restored = MemoryStore("x")
    await filled(restored, MemorySnapshots(), *regrown)
    tallies = repository(restored, saved)
    assert (await tallies.load("a")).total == sum(regrown)
    assert (await tallies.execute("a", Tally.add, 100)).state.total == sum(regrown) + 100


@pytest.mark.parametrize("regrown", [(10, 20), (10, 20, 30), (10, 20, 30, 40, 50), (10,), ()])
async def test_a_remembered_state_of_a_lost_log_is_not_used(regrown: tuple[int, ...]) -> None:
    class Restored(MemoryStore):
        def restore(self, other: MemoryStore) -> None:
            self.__dict__.update(vars(other))

    store = Restored("x")
    tallies = repository(store, MemorySnapshots())
    for number in (1, 2):
        await tallies.execute("a", Tally.add, number)
    other = MemoryStore("x")
    await filled(other, MemorySnapshots(), *regrown)
    store.restore(other)
    assert (await tallies.load("a")).total == sum(regrown)
    assert (await tallies.execute("a", Tally.add, 100)).state.total == sum(regrown) + 100


async def test_a_lagging_replica_does_not_make_a_remembered_state_older() -> None:
    store = MemoryStore("x")
    tallies = repository(store, MemorySnapshots())
    for number in (1, 2, 3):
        await tallies.execute("a", Tally.add, number)
    pages = store.pages

    async def lagging(aggregate: str, aggregate_id: str, *, after: int = 0) -> Any:
        async for page in pages(aggregate, aggregate_id, after=after):
            yield [record for record in page if record[0] <= 1]

    store.pages = lagging  # type: ignore[method-assign]
    assert (await tallies.load("a")).total == 6


states = st.builds(
    Tally,
    total=st.integers(),
    note=st.text(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    seen=st.dictionaries(st.text(), st.integers(), max_size=3),
)


@given(states)
def test_every_stored_snapshot_decodes_to_its_state(state: Tally) -> None:
    codec = SnapshotCodec[Tally](Tally)
    folded = FoldedState(state, 3, 9, "id", Commands({"c ü": (1, 3)}))
    value = codec.encode(folded)
    assert value is not None
    assert codec.decode(value) == folded


@pytest.mark.parametrize(
    "bad",
    [
        {"seen": defaultdict(int, {"a": 1})},
        {"seen": Counter("a")},
        {"total": Decimal(1)},
        {"total": True},
        {"ratio": 1},
        {"at": datetime(2026, 5, 1, tzinfo=timezone(timedelta(hours=2)))},
        {"at": datetime(2026, 1, 1, tzinfo=LONDON)},
        {"at": datetime(2026, 1, 1, tzinfo=ZoneInfo("Africa/Abidjan"))},
        {"at": datetime(2026, 1, 1, tzinfo=timezone(timedelta(0), "GMT"))},
        {"at": datetime(2026, 1, 1, tzinfo=UTC, fold=1)},
        {"at": Stamp(2026, 1, 1, tzinfo=UTC)},
        {"opens": time(9, tzinfo=LONDON)},
        {"opens": time(9, fold=1)},
        {"days": frozenset([datetime(2026, 1, 1, tzinfo=LONDON)])},
        {"by_time": {datetime(2026, 1, 1, tzinfo=LONDON): 1}},
        {"by_time": {datetime(2026, 1, 1, tzinfo=UTC): True}},
        {"nested": (Span(datetime(2026, 1, 1, tzinfo=LONDON)),)},
        {"tone": Tone.HIGH},
        {"anything": (1,)},
        {"anything": Decimal(1)},
    ],
)
def test_a_state_that_would_come_back_with_other_types_is_not_stored(bad: dict[str, Any]) -> None:
    codec = SnapshotCodec[Tally](Tally)
    assert codec.encode(FoldedState(Tally(**bad), 1, 1)) is None
    assert codec.encode(FoldedState(Tally(at=datetime(2026, 5, 1, tzinfo=UTC)), 1, 1)) is not None


@pytest.mark.parametrize(
    "attributes",
    [
        {"anything": [2**70, -0.0, 1, 1.0, True, {"a": -(2**64)}]},
        {"opens": time(9, tzinfo=timezone(timedelta(hours=1))), "at": datetime(2026, 1, 1, tzinfo=UTC)},
        {"days": frozenset([datetime(2026, 1, 1, tzinfo=UTC)]), "nested": (Span(datetime(2026, 1, 1, tzinfo=UTC)),)},
        {"by_time": {datetime(2026, 1, 1, tzinfo=UTC): 2**70}, "tone": "high"},
    ],
)
def test_a_snapshot_restores_the_types_and_zones_of_its_state(attributes: dict[str, Any]) -> None:
    codec = SnapshotCodec[Tally](Tally)
    value = codec.encode(FoldedState(Tally(**attributes), 1, 1))
    assert value is not None
    decoded = codec.decode(value)
    assert decoded is not None
    assert repr(decoded.state) == repr(Tally(**attributes))


def test_a_snapshot_has_no_command_of_a_later_version() -> None:
    shared = Commands()
    folded = FoldedState(Tally(), 2, 2, "id", shared)
    for version in range(1, 5):
        shared.add(f"c{version}", version)
    codec = SnapshotCodec[Tally](Tally)
    value = codec.encode(folded)
    assert value is not None
    decoded = codec.decode(value)
    assert decoded is not None
    assert list(decoded.commands.as_mapping(9)) == ["c1", "c2"]


@dataclass(frozen=True)
class Prickly:
    n: int = 0

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compare me not")

    def __hash__(self) -> int:
        return 0


@aggregate("prickly", snapshot_every=1)
class Thorn:
    prick: Prickly = field(default_factory=Prickly)

    def evolve(self, event: Added) -> Thorn:
        return self


async def test_failing_snapshots_do_not_stop_the_queue() -> None:
    snapshots = MemorySnapshots()
    codec = SnapshotCodec[Thorn](Thorn)

    def broken() -> bytes | None:
        raise RuntimeError("encode fails")

    def unavailable() -> bytes | None:
        raise StoreUnavailable("The snapshot", "x")

    encoders: list[Callable[[], bytes | None]] = [broken, lambda: codec.encode(FoldedState(Thorn(), 1, 1)), unavailable]
    for encode in encoders:
        snapshots.keep("a", "b", encode)
    snapshots.keep("a", "good", lambda: b"{}")
    async with asyncio.timeout(30):
        await snapshots.close()
    assert snapshots.values[("a", "good")] == b"{}"
    assert snapshots.dropped >= 2


async def test_closing_the_queue_can_be_cancelled_while_its_task_ends() -> None:
    snapshots = MemorySnapshots()
    snapshots.keep("a", "good", lambda: b"{}")
    task = snapshots._task
    assert task is not None
    closing = asyncio.create_task(snapshots.close())
    async with asyncio.timeout(60):
        while not task.cancelling():
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing


def test_a_snapshot_is_not_used_after_members_of_an_enum_swapped_their_values() -> None:
    def codec(*names: str) -> tuple[SnapshotCodec[Any], Any]:
        def evolve(self: Any, happened: Added) -> Any:
            return self

        status: Any = IntEnum("Status", list(names))
        fields = {"__annotations__": {"was": tuple[status, ...]}, "__module__": __name__, "was": (), "evolve": evolve}
        account: Any = aggregate("account", snapshot_every=2)(type("Account", (), fields))
        return SnapshotCodec[Any](account), account(was=(status.FROZEN,))

    before, frozen = codec("OPEN", "FROZEN", "CLOSED")
    value = before.encode(FoldedState(frozen, 3, 7, "e"))
    assert value is not None
    same, _ = codec("OPEN", "FROZEN", "CLOSED")
    assert same.decode(value) is not None
    after, _ = codec("CLOSED", "OPEN", "FROZEN")
    assert after.decode(value) is None


class SilentClient:
    """A client whose server never answers."""

    async def ask(self, _: object) -> None:
        await asyncio.Event().wait()


async def test_no_task_writes_snapshots_after_a_cancelled_close() -> None:
    snapshots = KeyValueSnapshots("bucket", cast("Client", SilentClient()))
    snapshots.keep("tally", "t-1", lambda: b"a snapshot")
    closing = asyncio.create_task(snapshots.close())
    await asyncio.sleep(0)  # now it waits for the queue
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
