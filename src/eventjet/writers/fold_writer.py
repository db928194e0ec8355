"""`FoldWriter`: one batch of events, its rows and the checkpoint, in one transaction.

The fence is the checkpoint's own update: it finds its row only at the epoch and the position that this worker knows,
and whoever changes rows moves one of them. So rows may be read, and events folded, before the transaction begins: if
it commits, nobody has written since. A worker that is stopped or slow while it folds holds no lock.

The same proof lets the writer remember rows. What it knows is true at one position of one epoch, so nobody has to tell
it which batches were committed: the position that the next batch comes after says so, and if that is wrong the fence
refuses the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet import failpoints
from eventjet.domain.parked import AggregateKey
from eventjet.errors import CheckpointFenced
from eventjet.projections.fold import BlockedAggregates, Fold, Offered, ParkingFold, RowKey, Rows, Sorted
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.checkpoint import DECLARED, Checkpoint, read
from eventjet.sql.dialect import Dialect
from eventjet.sql.locations import located
from eventjet.sql.statements import Changes, QuarantineChanges
from eventjet.writers.batch import Batch

RECENT_ROWS_MAX = 20_000
"""Rows kept in memory, at most twice as many for a moment."""

ReadRows: TypeAlias = Callable[[Sequence[RowKey]], Rows]
"""The rows there are of these keys."""


class RecentRows:
    """Rows committed lately, so that hot ones are not read again before every batch.

    True for as long as nobody else writes, which the checkpoint's epoch and position prove in every transaction.
    """

    __slots__ = ("_limit", "_new", "_old")

    def __init__(self, limit: int = RECENT_ROWS_MAX) -> None:
        self._limit = limit
        self._new: Rows = {}
        self._old: Rows = {}

    def find(
        self, keys: Iterable[RowKey], before: Mapping[RowKey, Any] = MappingProxyType({})
    ) -> tuple[Rows, list[RowKey]]:
        """(rows known, None where there is none; keys that must be read), after what `before` changes."""
        new, old = self._new, self._old
        known: Rows = {}
        missing: list[RowKey] = []
        for key in keys:
            if key in before:
                known[key] = before[key]
            elif key in new:
                known[key] = new[key]
            elif key in old:
                known[key] = old[key]
            else:
                missing.append(key)
        return known, missing

    def remember(self, changed: Mapping[RowKey, Any]) -> None:
        if self._limit:
            self._new.update(changed)
            if len(self._new) > self._limit:
                self._old, self._new = self._new, {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch that is folded and not committed yet."""

    batch: Batch
    changes: Changes
    rows: Rows
    """The rows it changes, None where one is gone: what is remembered of it."""
    blocked: Collection[AggregateKey] = ()
    """Aggregates whose events wait from here on."""


class BatchFold:
    """For the batches of one epoch. `blocked` are the aggregates whose events wait at the position of the first one."""

    def __init__(self, resolved: ResolvedProjection, codec: RowCodec, blocked: BlockedAggregates | None = None) -> None:
        # Rows of values that may be large, or changed in place, are read anew for every batch: what is remembered of
        # them is what is not committed yet.
        self._is_heavy = any(isinstance(column.type, JSON | LargeBinary) for column in resolved.table.columns)
        self._resolved = resolved
        self._fold = Fold(resolved, codec)
        self._parking = ParkingFold(resolved, codec) if resolved.quarantines else None
        self._recent = RecentRows(0 if self._is_heavy else RECENT_ROWS_MAX)
        self._blocked = BlockedAggregates() if blocked is None else blocked
        self._uncommitted: deque[Prepared] = deque()
        self._ahead: Rows = {}
        """The rows of all of those, as the last of them left them."""

    @property
    def last(self) -> int | None:
        """Where the last batch ends that is not known to be committed; None when there is none."""
        return self._uncommitted[-1].batch.last if self._uncommitted else None

    @property
    def last_after(self) -> int:
        """Where the last batch begins that is not known to be committed."""
        return self._uncommitted[-1].batch.after

    def committed(self, position: int) -> int | None:
        """Take it that all up to there is committed; returns where that ended, None where nothing was remembered."""
        end: int | None = None
        while self._uncommitted and self._uncommitted[0].batch.last <= position:
            done = self._uncommitted.popleft()
            self._recent.remember(done.rows)
            self._blocked.aggregates.update(done.blocked)
            end = done.batch.last
        if end is not None:
            self._ahead = {key: row for one in self._uncommitted for key, row in one.rows.items()}
        return end

    def drop_uncommitted(self) -> None:
        self._uncommitted.clear()
        self._ahead = {}

    def fold(self, batch: Batch, read: ReadRows | None) -> Prepared | None:
        """What the batch after all those before it does to the rows; raises `HandlerFailed`.

        Rows that are not in memory are `read`: no batch that is not committed yet has changed one of them. None where
        that is needed and cannot be.
        """
        events: Sequence[Any] = batch.events
        if self._parking is None and not self._resolved.reads:
            prepared = Prepared(batch, Changes(made=list(self._fold({}, events).values())), {})
        else:
            each_key = self._fold.each_key(events) if self._parking is None else None
            keys = dict.fromkeys(each_key) if each_key is not None else self._keys(events)
            rows, missing = self._recent.find(keys, self._ahead)
            if missing or self._is_heavy:
                if read is None:
                    return None
                rows.update(read(missing) if missing else {})
            if self._parking is None:
                changed = self._fold(rows, events, each_key)
                prepared = Prepared(batch, changes_of(changed), changed)
            else:
                found = self._parking(rows, events, self._blocked_by_now())
                quarantine = QuarantineChanges(found.parked) if found.parked else None
                prepared = Prepared(batch, changes_of(found.changed, quarantine), found.changed, found.blocked)
        # Its events are not needed any more, whatever becomes of it.
        self._uncommitted.append(replace(prepared, batch=replace(batch, events=()), changes=Changes()))
        self._ahead.update(prepared.rows)
        return prepared

    def _keys(self, events: Sequence[Any]) -> list[RowKey]:
        return self._fold.keys(events) if self._parking is None else self._parking.keys(events)

    def sort(self, offers: Sequence[Offered], read: ReadRows) -> Sorted:
        """Fold events that waited, and park again what cannot be taken. For a projection that quarantines."""
        assert self._parking is not None
        keys = self._parking.keys(offers)
        return self._parking(read(keys) if keys else {}, offers, BlockedAggregates())

    def _blocked_by_now(self) -> BlockedAggregates:
        more = [one.blocked for one in self._uncommitted if one.blocked]
        if not more:
            return self._blocked
        return replace(self._blocked, aggregates=self._blocked.aggregates.union(*more))


def changes_of(changed: Rows, quarantine: QuarantineChanges | None = None) -> Changes:
    """What a fold did to rows that are read."""
    kept = [row for row in changed.values() if row is not None]
    gone = [key for key, row in changed.items() if row is None] if len(kept) < len(changed) else []
    return Changes(kept, gone=gone, quarantine=quarantine)


class FoldWriter:
    """Writes batches of one epoch, each after the one before, to the projection's table or to `table` (a shadow).

    `blocked` are the aggregates whose events wait at the position of the first batch.
    """

    def __init__(
        self,
        resolved: ResolvedProjection,
        dialect: Dialect,
        *,
        lease_s: float,
        table: Table | None = None,
        blocked: BlockedAggregates | None = None,
    ) -> None:
        codec = RowCodec(resolved.table, resolved.row_type, dialect)
        self._resolved = resolved
        self._fold = BatchFold(resolved, codec, blocked)
        self._lease_s = lease_s
        self._statements = dialect.statements(
            located(resolved.table, DECLARED, dialect) if table is None else table, codec
        )
        self._position: int | None = None
        """Where what is remembered is true."""

    def write(self, connection: Connection, held: Checkpoint, batch: Batch) -> None:
        """Prepare and commit within the caller's transaction."""
        self.commit(connection, held, self.prepare(connection, batch))

    def prepare(self, connection: Connection, batch: Batch) -> Prepared:
        """Read and fold: what the batch does to the rows.

        Everything before it is committed, and nothing after. Raises `HandlerFailed`, and `CheckpointFenced` for a batch
        that does not follow.
        """
        if not batch.is_consistent:
            raise CheckpointFenced(self._resolved.name, f"a batch after position {batch.after} ends at {batch.last}")
        if self._position is None:
            self._position = batch.after
        self._committed(batch.after)
        self._fold.drop_uncommitted()
        if self._position != batch.after:
            raise CheckpointFenced(
                self._resolved.name,
                f"a batch starts after {batch.after} and the one before it ended at {self._position}",
            )
        prepared = self._fold.fold(batch, lambda keys: self._statements.read(connection, keys))
        assert prepared is not None
        return prepared

    def prepare_next(self, batch: Batch) -> Prepared | None:
        """`prepare` for the batch after the one whose commit is under way, as if that had succeeded.

        None when that takes rows that are not in memory. Whatever it raises, `prepare` raises in its turn.
        """
        if not batch.is_consistent or self._fold.last != batch.after:
            return None
        # A commit is not begun before those that precede it have succeeded.
        self._committed(self._fold.last_after)
        return self._fold.fold(batch, None)

    def sort(self, connection: Connection, offers: Sequence[Offered]) -> Sorted:
        """Read and fold events that waited, and park again what cannot be taken. For a projection that quarantines."""
        return self._fold.sort(offers, lambda keys: self._statements.read(connection, keys))

    def commit(self, connection: Connection, held: Checkpoint, prepared: Prepared) -> None:
        """Rows and checkpoint together, or `CheckpointFenced` and neither."""
        failpoints.reach("worker.before_commit")
        batch = prepared.batch
        mark = (held.name, held.revision, held.epoch, batch.after)
        advance = (batch.last, batch.event_id, self._lease_s, *mark)
        if not self._statements.write(connection, advance, prepared.changes):
            raise fenced(connection, held, batch)
        failpoints.reach("worker.rows_written")

    def _committed(self, position: int) -> None:
        end = self._fold.committed(position)
        self._position = self._position if end is None else end


def fenced(connection: Connection, held: Checkpoint, batch: Batch) -> CheckpointFenced:
    """The error of a batch that the checkpoint did not let in, with what the checkpoint says instead."""
    current = read(connection, held.name, held.revision)
    if current is None:
        reason = "its checkpoint is gone"
    elif current.epoch != held.epoch:
        reason = f"{current.owner or 'nobody'} holds it in epoch {current.epoch}, this was {held.epoch}"
    else:
        reason = f"its checkpoint is at position {current.position} and the batch starts after {batch.after}"
    return CheckpointFenced(held.name, reason)
