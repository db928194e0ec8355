"""`FoldWriter` with batches that are folded while the batch before them is written, and its remembered rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import JSON, BigInteger, Column, Integer, MetaData, String, Table

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord
from eventjet.domain.aggregate import aggregate, event
from eventjet.domain.quarantined import Quarantined
from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced
from eventjet.projections.by_state import by_state
from eventjet.projections.fold import Offered
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.state_fold import StateFold
from eventjet.sql.sqlite import Sqlite
from eventjet.sql.statements import Changes
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import FoldWriter, RecentRows

IDS = 6
BAD, GONE = 0, 1


@event("step.taken")
class Taken:
    number: int


@dataclass(frozen=True, slots=True)
class Trail:
    walker: str
    steps: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Path:
    walker: str
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    position: int
    walker: str


def trails(row: Trail | None, event: Recorded[Taken]) -> Trail | None:
    row = row or Trail(event.aggregate_id)
    number = event.data.number
    return None if number == GONE else Trail(row.walker, row.steps + 1, (row.digest * 31 + number) % 1_000_003)


def wary(row: Trail | None, event: Recorded[Taken]) -> Trail | None:
    if event.data.number == BAD:
        raise ValueError("bad")
    return trails(row, event)


def paths(row: Path | None, event: Recorded[Taken]) -> Path | None:
    if event.data.number == GONE:
        return None
    return Path(event.aggregate_id, (*(row.places if row else ()), event.data.number))


@aggregate("walk")
class Walk:
    last: int = 0

    def evolve(self, event: Taken) -> Walk:
        return replace(self, last=event.number)


def mood_of(walk: Walk) -> str:
    return f"mood-{walk.last % 3}"


def moods(row: Trail | None, event: Recorded[Taken], mood: str, walk: Walk) -> Trail | None:
    row = row or Trail(mood)
    number = 100 * walk.last + event.data.number
    return None if number == GONE else Trail(mood, row.steps + 1, (row.digest * 31 + number) % 1_000_003)


def steps(event: Recorded[Taken]) -> Step:
    return Step(event.position, event.aggregate_id)


CATALOG = Catalog([Taken])


def table(name: str, *columns: Column[Any]) -> Table:
    return Table(name, MetaData(), *columns)


def walker() -> Column[Any]:
    return Column("walker", String(20), primary_key=True)


def walks() -> Column[Any]:
    return Column("walker", String(20))


COUNTED = walker, lambda: Column("steps", Integer), lambda: Column("digest", Integer)
PROJECTIONS = {
    "rows": resolve(projection("trails", table=table("trails", *(column() for column in COUNTED)))(trails), CATALOG),
    "quarantine": resolve(
        projection("wary", table=table("wary", *(column() for column in COUNTED)), on_error="quarantine")(wary), CATALOG
    ),
    "json": resolve(projection("paths", table=table("paths", walker(), Column("places", JSON)))(paths), CATALOG),
    "entries": resolve(
        entries("steps", table=table("steps", Column("position", BigInteger, primary_key=True), walks()))(steps),
        CATALOG,
    ),
    "states": resolve(
        projection(
            "moods",
            table=table("moods", *(column() for column in COUNTED)),
            key=by_state(Walk, mood_of, on_change="both"),
        )(moods),
        CATALOG,
    ),
}


def numbered_event(resolved: ResolvedProjection, position: int, walker: int, number: int) -> Any:
    subject = f"app.walk.w-{walker}"
    at = datetime(2026, 1, 1, tzinfo=UTC)
    recorded = Recorded(Taken(number=number), f"w-{walker}", position, position, at, f"id-{position}", "walk")
    if not resolved.quarantines:
        return recorded
    record: RawRecord = (position, position, subject.encode(), b"NATS/1.0\r\n\r\n", b"{}")
    return Offered(record, recorded)


@dataclass
class Stored(Sqlite):
    """A dialect whose statements read and change the rows and the quarantine in memory."""

    resolved: ResolvedProjection
    rows: dict[Any, Any] = field(default_factory=dict[Any, Any])
    quarantined: dict[int, tuple[Any, ...]] = field(default_factory=dict[int, tuple[Any, ...]])
    states: dict[Any, Any] = field(default_factory=dict[Any, Any])
    reads: int = 0

    def statements(self, table: Table, codec: RowCodec, states: Any = None) -> Any:
        return self

    def read(self, _connection: Any, keys: Sequence[Any]) -> dict[Any, Any]:
        self.reads += 1
        assert keys
        stored = self.rows | self.states
        return {key: stored[key] for key in keys if key in stored}

    def write(self, _connection: Any, _advance: Any, changes: Changes) -> bool:
        codec = RowCodec(self.resolved.table, self.resolved.row_type, self)
        assert not {codec.key(row) for row in changes.inserts} & self.rows.keys()
        self.rows |= {codec.key(row): row for row in (*changes.inserts, *changes.upserts)}
        for key in changes.deletions:
            self.rows.pop(key, None)
        self.states |= {(row.aggregate, row.aggregate_id): row for row in changes.states}
        quarantined: Sequence[Quarantined] = changes.quarantine.upserts if changes.quarantine else ()
        assert not {event.position for event in quarantined} & self.quarantined.keys()
        self.quarantined |= {
            event.position: (event.aggregate_id, event.resolution, event.reason) for event in quarantined
        }
        return True

    def writer(self) -> FoldWriter:
        return FoldWriter(self.resolved, self, lease_s=30)


NOBODY: Any = None
CHECKPOINT: Any = SimpleNamespace(name="trails", revision=1, epoch=1)


@pytest.mark.parametrize("kind", list(PROJECTIONS))
@given(
    st.lists(st.tuples(st.integers(0, IDS - 1), st.integers(0, 9)), min_size=1, max_size=60),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=1, max_size=12),
)
@example([(0, 5), (0, BAD), (0, 6), (0, 7)], [1], [True])
@example([(0, 5), (0, GONE), (0, 6), (1, GONE)], [1], [True])
def test_any_batches_give_the_rows_of_one_event_at_a_time_even_if_folded_ahead(
    kind: str, steps: list[tuple[int, int]], sizes: list[int], ahead: list[bool]
) -> None:
    resolved = PROJECTIONS[kind]
    events = [numbered_event(resolved, position, *step) for position, step in enumerate(steps, 1)]
    events = events if resolved.joins is None else StateFold(resolved).numbered(events)
    batches: list[Batch] = []
    while (first := batches[-1].last if batches else 0) < len(events):
        part = events[first : first + sizes[len(batches) % len(sizes)]]
        batches.append(Batch(first, first + len(part), "", part))
    stored = Stored(resolved)
    writer, folded_ahead = stored.writer(), None
    for number, batch in enumerate(batches):
        prepared = folded_ahead or writer.prepare(NOBODY, batch)
        following = batches[number + 1 : number + 2] if ahead[number % len(ahead)] else []
        folded_ahead = writer.prepare_next(following[0]) if following else None
        writer.commit(NOBODY, CHECKPOINT, prepared)
    one_at_a_time = Stored(resolved)
    writer = one_at_a_time.writer()
    for step in events:
        writer.write(NOBODY, CHECKPOINT, Batch(step.position - 1, step.position, "", [step]))
    assert (stored.rows, stored.quarantined, stored.states) == (
        one_at_a_time.rows,
        one_at_a_time.quarantined,
        one_at_a_time.states,
    )


def test_rows_with_json_are_read_for_each_batch_and_not_folded_ahead() -> None:
    stored = Stored(PROJECTIONS["json"])
    writer, batches = (
        stored.writer(),
        [Batch(n, n + 1, "", [numbered_event(stored.resolved, n + 1, 0, 5)]) for n in (0, 1)],
    )
    prepared = writer.prepare(NOBODY, batches[0])
    assert writer.prepare_next(batches[1]) is None
    writer.commit(NOBODY, CHECKPOINT, prepared)
    writer.write(NOBODY, CHECKPOINT, batches[1])
    assert (stored.reads, stored.rows) == (2, {("w-0",): Path("w-0", (5, 5))})


def test_a_batch_that_was_not_committed_leaves_no_trace() -> None:
    stored = Stored(PROJECTIONS["quarantine"])
    writer = stored.writer()
    writer.prepare(NOBODY, Batch(0, 1, "", [numbered_event(stored.resolved, 1, 0, BAD)]))
    writer.write(NOBODY, CHECKPOINT, Batch(0, 1, "", [numbered_event(stored.resolved, 1, 0, 5)]))
    assert ([row.steps for row in stored.rows.values()], stored.quarantined) == ([1], {})


def test_a_batch_that_does_not_follow_the_last_batch_is_refused() -> None:
    writer = Stored(PROJECTIONS["rows"]).writer()
    writer.write(NOBODY, CHECKPOINT, Batch(0, 1, "", []))
    assert writer.prepare_next(Batch(2, 3, "", [])) is None
    with pytest.raises(CheckpointFenced, match="starts after 2 and the one before it ended at 1"):
        writer.prepare(NOBODY, Batch(2, 3, "", []))
    for batch in (Batch(1, 1, "", []), Batch(5, 6, "", [numbered_event(PROJECTIONS["rows"], 5, 0, 5)])):
        with pytest.raises(CheckpointFenced, match="a batch after position"):
            writer.prepare(NOBODY, batch)


def test_uncommitted_rows_hide_remembered_rows_and_memory_has_a_limit() -> None:
    recent = RecentRows(limit=3)
    for number in range(100):
        recent.remember({("a",): number, (number,): number})
    rows, missing = recent.find([("a",), *((number,) for number in range(100))], before={(0,): None})
    assert (rows[("a",)], rows[(0,)]) == (99, None)
    assert len(rows) <= 9
    assert len(missing) >= 92
    forgetful = RecentRows(limit=0)
    forgetful.remember({("a",): 1})
    assert forgetful.find([("a",)]) == ({}, [("a",)])
