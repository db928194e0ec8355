"""`BatchFold` over batches that are not committed yet, in one process or several: what one fold of all events makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import JSON, BigInteger, Column, Integer, MetaData, String, Table

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord
from eventjet.domain.aggregate import event
from eventjet.domain.quarantined import Quarantined
from eventjet.domain.recorded import Recorded
from eventjet.projections.fold import BlockedAggregates, Offered
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.sqlite import SQLITE
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import BatchFold, Prepared

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
    "rows": resolve(projection("trails", table=table("trails", *(one() for one in COUNTED)))(trails), CATALOG),
    "quarantine": resolve(
        projection("wary", table=table("wary", *(one() for one in COUNTED)), on_error="quarantine")(wary), CATALOG
    ),
    "json": resolve(projection("paths", table=table("paths", walker(), Column("places", JSON)))(paths), CATALOG),
    "entries": resolve(
        entries("steps", table=table("steps", Column("position", BigInteger, primary_key=True), walks()))(steps),
        CATALOG,
    ),
}


def fold_of(resolved: ResolvedProjection) -> BatchFold:
    return BatchFold(resolved, RowCodec(resolved.table, resolved.row_type, SQLITE), BlockedAggregates())


def one_event(resolved: ResolvedProjection, position: int, walker: int, number: int) -> Any:
    subject = f"app.walk.w-{walker}"
    at = datetime(2026, 1, 1, tzinfo=UTC)
    recorded = Recorded(Taken(number=number), f"w-{walker}", position, position, at, f"id-{position}", "walk")
    if not resolved.quarantines:
        return recorded
    record: RawRecord = (position, position, subject.encode(), b"NATS/1.0\r\n\r\n", b"{}")
    return Offered(record, recorded)


@dataclass
class Database:
    """What is committed."""

    rows: dict[Any, Any] = field(default_factory=dict[Any, Any])
    parked: dict[int, tuple[Any, ...]] = field(default_factory=dict[int, tuple[Any, ...]])
    reads: int = 0

    def read(self, keys: Sequence[Any]) -> dict[Any, Any]:
        self.reads += 1
        assert keys
        return {key: self.rows[key] for key in keys if key in self.rows}

    def commit(self, resolved: ResolvedProjection, prepared: Prepared) -> None:
        codec = RowCodec(resolved.table, resolved.row_type, SQLITE)
        changes = prepared.changes
        for row in changes.inserts:
            assert codec.key(row) not in self.rows
        self.rows |= {codec.key(row): row for row in (*changes.inserts, *changes.upserts)}
        for key in changes.deletions:
            self.rows.pop(key, None)
        found: Sequence[Quarantined] = changes.quarantine.parked if changes.quarantine else ()
        for one in found:
            assert one.position not in self.parked
            self.parked[one.position] = (one.aggregate_id, one.resolution, one.reason)


def alone(resolved: ResolvedProjection, events: Sequence[Any]) -> Database:
    """One fold, event by event, each committed before the next."""
    found, fold = Database(), fold_of(resolved)
    for one in events:
        prepared = fold.fold(Batch(one.position - 1, one.position, "", [one]), found.read)
        assert prepared is not None
        found.commit(resolved, prepared)
        fold.committed(one.position)
    return found


histories = st.lists(st.tuples(st.integers(0, IDS - 1), st.integers(0, 9)), min_size=1, max_size=60)


@pytest.mark.parametrize("kind", list(PROJECTIONS))
@given(
    histories,
    st.integers(1, 4),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
@example([(0, 5), (0, BAD), (0, 6), (0, 7)], 1, [1], [3], [0])
@example([(0, 5), (0, GONE), (0, 6), (1, GONE)], 2, [1], [3], [0])
def test_any_split_over_batches_and_processes_and_any_lag_of_commits_gives_the_rows_of_one_fold(
    kind: str, steps: list[tuple[int, int]], count: int, sizes: list[int], ahead: list[int], told: list[int]
) -> None:
    resolved = PROJECTIONS[kind]
    events = [one_event(resolved, position, *step) for position, step in enumerate(steps, 1)]
    found, folds = Database(), [fold_of(resolved) for _ in range(count)]
    waiting: deque[list[Prepared]] = deque()
    marks = [0]
    """Where commits ended: a process is told of one of the last of these."""
    first = number = 0
    while first < len(events):
        size = sizes[number % len(sizes)]
        part = events[first : first + size]
        shares: list[Prepared] = []
        for share, fold in enumerate(folds):
            fold.committed(marks[max(0, len(marks) - 1 - told[(number + share) % len(told)])])
            own = [one for one in part if owner(one, count) == share]
            prepared = fold.fold(Batch(first, first + len(part), "", own), found.read)
            assert prepared is not None
            shares.append(prepared)
        waiting.append(shares)
        first += len(part)
        while len(waiting) > ahead[number % len(ahead)]:
            commit(resolved, found, waiting, marks)
        number += 1
    while waiting:
        commit(resolved, found, waiting, marks)
    by_one = alone(resolved, events)
    assert found.rows == by_one.rows
    assert found.parked == by_one.parked


def owner(one: Any, count: int) -> int:
    aggregate_id = one.event.aggregate_id if isinstance(one, Offered) else one.aggregate_id
    return int(aggregate_id.removeprefix("w-")) % count


def commit(resolved: ResolvedProjection, found: Database, waiting: deque[list[Prepared]], marks: list[int]) -> None:
    shares = waiting.popleft()
    for one in shares:
        found.commit(resolved, one)
    marks.append(shares[0].batch.last)


def test_rows_of_what_is_not_committed_are_never_read() -> None:
    resolved = PROJECTIONS["json"]
    found, fold = Database(), fold_of(resolved)
    for position in range(1, 4):
        prepared = fold.fold(Batch(position - 1, position, "", [one_event(resolved, position, 0, 5)]), found.read)
        assert prepared is not None
    assert (found.reads, fold.last, fold.last_after) == (1, 3, 2)
    assert fold.committed(2) == 2
    assert (fold.last, fold.committed(2), fold.committed(3), fold.last) == (3, None, 3, None)
    # Committed rows that may be large are not kept.
    fold.fold(Batch(3, 4, "", [one_event(resolved, 4, 0, 5)]), found.read)
    assert found.reads == 2


def test_what_was_dropped_is_as_if_it_had_not_been_folded() -> None:
    resolved = PROJECTIONS["quarantine"]
    found, fold = Database(), fold_of(resolved)
    fold.fold(Batch(0, 1, "", [one_event(resolved, 1, 0, BAD)]), found.read)
    fold.drop_uncommitted()
    prepared = fold.fold(Batch(0, 1, "", [one_event(resolved, 1, 0, 5)]), found.read)
    assert prepared is not None
    assert prepared.changes.quarantine is None
    assert [replace(row, digest=0) for row in prepared.changes.upserts] == [Trail("w-0", 1)]
