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
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet import failpoints
from eventjet.domain.parked import AggregateKey
from eventjet.errors import CheckpointFenced
from eventjet.projections.fold import Fold, RowKey, Rows
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.quarantine.fold import BlockedAggregates, Offered, ParkingFold, Sorted
from eventjet.sql.checkpoint import DECLARED, Checkpoint, read
from eventjet.sql.dialect import Dialect
from eventjet.sql.locations import located
from eventjet.sql.statements import Changes, QuarantineChanges
from eventjet.writers.batch import Batch

RECENT_ROWS_MAX = 20_000
"""Rows kept in memory, at most twice as many for a moment."""

_Read: TypeAlias = Callable[[Sequence[RowKey]], Rows]


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
        if not self._limit:
            return {}, list(keys)
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
        # Rows of values that may be large, or changed in place, are read anew for every batch.
        heavy = any(isinstance(column.type, JSON | LargeBinary) for column in resolved.table.columns)
        self._resolved = resolved
        self._fold = Fold(resolved, codec)
        self._parking = ParkingFold(resolved, codec) if resolved.quarantines else None
        self._lease_s = lease_s
        self._statements = dialect.statements(
            located(resolved.table, DECLARED, dialect) if table is None else table, codec
        )
        self._position: int | None = None
        """Where what is remembered is true."""
        self._recent = RecentRows(0 if heavy else RECENT_ROWS_MAX)
        self._blocked = BlockedAggregates() if blocked is None else blocked
        self._prepared: deque[Prepared] = deque()
        """What was folded after that position: at most a batch whose commit is under way and the one after it."""

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
        while self._prepared and self._position != batch.after:
            self._remember(self._prepared.popleft())
        self._prepared.clear()
        if self._position != batch.after:
            raise CheckpointFenced(
                self._resolved.name,
                f"a batch starts after {batch.after} and the one before it ended at {self._position}",
            )
        prepared = self._folded(batch, lambda keys: self._statements.read(connection, keys))
        assert prepared is not None
        return prepared

    def prepare_next(self, batch: Batch) -> Prepared | None:
        """`prepare` for the batch after the one whose commit is under way, as if that had succeeded.

        None when that takes rows that are not in memory. Whatever it raises, `prepare` raises in its turn.
        """
        if not batch.is_consistent or not self._prepared or self._prepared[-1].batch.last != batch.after:
            return None
        while len(self._prepared) > 1:
            # A commit is not begun before those that precede it have succeeded.
            self._remember(self._prepared.popleft())
        return self._folded(batch, None)

    def sort(self, connection: Connection, offers: Sequence[Offered]) -> Sorted:
        """Read and fold events that waited, and park again what cannot be taken. For a projection that quarantines."""
        assert self._parking is not None
        keys = self._parking.keys(offers)
        return self._parking(self._statements.read(connection, keys) if keys else {}, offers, BlockedAggregates())

    def commit(self, connection: Connection, held: Checkpoint, prepared: Prepared) -> None:
        """Rows and checkpoint together, or `CheckpointFenced` and neither."""
        failpoints.reach("worker.before_commit")
        batch = prepared.batch
        mark = (held.name, held.revision, held.epoch, batch.after)
        advance = (batch.last, batch.event_id, self._lease_s, *mark)
        if not self._statements.write(connection, advance, prepared.changes):
            raise fenced(connection, held, batch)
        failpoints.reach("worker.rows_written")

    def _remember(self, committed: Prepared) -> None:
        self._recent.remember(committed.rows)
        self._blocked.aggregates.update(committed.blocked)
        self._position = committed.batch.last

    def _folded(self, batch: Batch, read: _Read | None) -> Prepared | None:
        """What it does to the rows; None when some would have to be read, and cannot."""
        before = self._prepared[-1] if self._prepared else None
        if self._parking is not None and before is not None and before.blocked:
            # What the batch before blocks is not known to be blocked before it is committed.
            return None
        events: Sequence[Any] = batch.events
        if self._parking is None and not self._resolved.reads:
            prepared = Prepared(batch, Changes(made=list(self._fold({}, events).values())), {})
        else:
            keys = self._fold.keys(events) if self._parking is None else self._parking.keys(events)
            rows, missing = self._recent.find(keys, {} if before is None else before.rows)
            if missing:
                if read is None:
                    return None
                rows.update(read(missing))
            if self._parking is None:
                changed = self._fold(rows, events)
                prepared = Prepared(batch, changes_of(changed), changed)
            else:
                found = self._parking(rows, events, self._blocked)
                quarantine = QuarantineChanges(found.parked) if found.parked else None
                prepared = Prepared(batch, changes_of(found.changed, quarantine), found.changed, found.blocked)
        self._prepared.append(prepared)
        return prepared


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


def changes_of(changed: Rows, quarantine: QuarantineChanges | None = None) -> Changes:
    """What a fold did to rows that are read."""
    kept = [row for row in changed.values() if row is not None]
    gone = [key for key, row in changed.items() if row is None] if len(kept) < len(changed) else []
    return Changes(kept, gone=gone, quarantine=quarantine)
