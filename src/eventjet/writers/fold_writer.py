"""`FoldWriter` folds a batch of events and writes its rows and the checkpoint in one transaction.

The checkpoint's own update is the fence: it matches the row only at the epoch and position that this worker knows, and
every writer of rows changes one of the two. Therefore rows may be read and events folded before the transaction begins:
if it commits, nobody else has written since. A worker that is stopped or slow while it folds holds no lock.

The fence also makes it safe to keep rows in memory. They are valid at one position of one epoch, and the position after
which the next batch begins says which batches were committed. If that position is wrong, the fence refuses the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet import failpoints
from eventjet.domain.quarantined import AggregateKey
from eventjet.errors import CheckpointFenced
from eventjet.projections.by_state import StateRow
from eventjet.projections.fold import BlockedAggregates, Fold, Offered, QuarantiningFold, RowKey, Rows, Sorted
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.state_fold import Cell, Joining, StateId
from eventjet.sql.checkpoint import DECLARED, Checkpoint, read
from eventjet.sql.dialect import Dialect
from eventjet.sql.locations import located_tables
from eventjet.sql.statements import Changes, QuarantineChanges, Statements
from eventjet.writers.batch import Batch

RECENT_ROWS_MAX, RECENT_STATES_MAX = 20_000, 5_000
"""Rows, and states of aggregates, kept in memory: two generations of about this many, so up to twice as many."""

ReadRows: TypeAlias = Callable[[Statements, Sequence[RowKey]], Rows]
"""Reads the existing rows of the given keys with the statements of their table."""


class RecentRows:
    """A cache of rows committed lately, so that frequently changed rows are not read before every batch.

    The cache is valid for as long as nobody else writes; the checkpoint's epoch and position prove that in every
    transaction.
    """

    __slots__ = ("_limit", "_new", "_old")

    def __init__(self, limit: int = RECENT_ROWS_MAX) -> None:
        self._limit = limit
        self._new: Rows = {}
        self._old: Rows = {}

    def find(
        self, keys: Iterable[RowKey], before: Mapping[RowKey, Any] = MappingProxyType({})
    ) -> tuple[Rows, list[RowKey]]:
        """Return (known rows, None for no row; keys to be read); uncommitted changes in `before` come first."""
        new, old = self._new, self._old
        rows: Rows = {}
        missing: list[RowKey] = []
        for key in keys:
            if key in before:
                rows[key] = before[key]
            elif key in new:
                rows[key] = new[key]
            elif key in old:
                rows[key] = old[key]
            else:
                missing.append(key)
        return rows, missing

    def remember(self, changed: Mapping[RowKey, Any]) -> None:
        """Keep the rows of a committed batch; drop the older generation when the newer one is full."""
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
    """The rows that the batch changes, None for a deleted row; the cache keeps them once they are committed."""
    blocked: Collection[AggregateKey] = ()
    """Aggregates that this batch blocks: their later events wait."""
    cells: Mapping[StateId, Cell] = field(default_factory=dict[StateId, Cell])
    """The states of aggregates that the batch changes, where the projection has `by_state`."""


def changes_of(changed: Rows, quarantine: QuarantineChanges | None = None, states: Sequence[StateRow] = ()) -> Changes:
    """Return the rows to store and the keys to delete, from the rows that a fold changed."""
    upserts = [row for row in changed.values() if row is not None]
    deletions = [key for key, row in changed.items() if row is None] if len(upserts) < len(changed) else []
    return Changes(upserts, deletions=deletions, quarantine=quarantine, states=states)


class FoldWriter:
    """Writes the batches of one epoch, in order, to the projection's tables or to `tables` (those of a shadow).

    `blocked` are the aggregates that are blocked at the position of the first batch.
    """

    def __init__(
        self,
        resolved: ResolvedProjection,
        dialect: Dialect,
        *,
        lease_s: float,
        tables: Sequence[Table] | None = None,
        blocked: BlockedAggregates | None = None,
    ) -> None:
        codec = RowCodec(resolved.table, resolved.row_type, dialect)
        # Rows whose values may be large, or be changed in place, are not cached: every batch reads them again, and only
        # their uncommitted changes are kept.
        self._is_heavy = any(isinstance(column.type, JSON | LargeBinary) for column in resolved.table.columns)
        self._resolved = resolved
        self._lease_s = lease_s
        self._fold = Fold(resolved, codec)
        self._quarantining = QuarantiningFold(resolved, codec) if resolved.quarantines else None
        table, *state_tables = located_tables(resolved, DECLARED, dialect) if tables is None else tables
        self._state_statements: Statements | None = None
        if resolved.joins is not None:
            (state_table,) = state_tables
            self._state_statements = dialect.statements(state_table, RowCodec(resolved.joins.table, StateRow, dialect))
        self._statements = dialect.statements(table, codec, self._state_statements)
        self._recent = RecentRows(0 if self._is_heavy else RECENT_ROWS_MAX)
        self._recent_cells = RecentRows(RECENT_STATES_MAX)
        self._blocked = BlockedAggregates() if blocked is None else blocked
        self._position: int | None = None
        """The position at which the rows in memory are valid; None before the first batch."""
        self._pending: list[Prepared] = []
        """Batches that are folded and not known to be committed: the one under way, and the one that follows it."""

    def write(self, connection: Connection, checkpoint: Checkpoint, batch: Batch) -> None:
        """Fold a batch and write it within the caller's transaction: `prepare`, then `commit`."""
        self.commit(connection, checkpoint, self.prepare(connection, batch))

    def prepare(self, connection: Connection, batch: Batch) -> Prepared:
        """Read the rows of a batch and fold its events, without writing.

        Every batch before it must be committed, and none after it. Raises `HandlerFailed`, and `CheckpointFenced` for a
        batch that does not follow the one before.
        """
        if not batch.is_consistent:
            raise CheckpointFenced(self._resolved.name, f"a batch after position {batch.after} ends at {batch.last}")
        if self._position is None:
            self._position = batch.after
        self._committed(batch.after)
        self._pending = []
        if self._position != batch.after:
            raise CheckpointFenced(
                self._resolved.name,
                f"a batch starts after {batch.after} and the one before it ended at {self._position}",
            )
        prepared = self._prepared(batch, lambda statements, keys: statements.read(connection, keys))
        assert prepared is not None
        return prepared

    def prepare_next(self, batch: Batch) -> Prepared | None:
        """Fold the next batch while the commit of the one before it is under way, as if that had succeeded.

        Returns None when the batch does not follow or needs rows that are not in memory. An error raised here is raised
        again by `prepare` for the same batch.
        """
        if not batch.is_consistent or not self._pending or self._pending[-1].batch.last != batch.after:
            return None
        # No commit begins before the one that precedes it has succeeded.
        self._committed(self._pending[-1].batch.after)
        return self._prepared(batch, None)

    def _committed(self, position: int) -> None:
        """Treat the batches up to `position` as committed."""
        while self._pending and self._pending[0].batch.last <= position:
            prepared = self._pending.pop(0)
            self._recent.remember(prepared.rows)
            self._recent_cells.remember(prepared.cells)
            self._blocked.aggregates.update(prepared.blocked)
            self._position = prepared.batch.last

    def _prepared(self, batch: Batch, read: ReadRows | None) -> Prepared | None:
        """Fold the batch that follows the pending one, if any; raises `HandlerFailed`.

        Rows and states that are not in memory are read with `read`: the pending batch has not changed one of them.
        Returns None when they must be read and `read` is None.
        """
        events: Sequence[Any] = batch.events
        if self._quarantining is None and not self._resolved.reads:
            prepared = Prepared(batch, Changes(inserts=list(self._fold({}, events).values())), {})
        else:
            assert len(self._pending) < 2, "its rows are those of one batch"
            pending = self._pending[0] if self._pending else None
            joining: Joining | None = None
            if self._state_statements is not None:
                joining = self._joined(events, {} if pending is None else pending.cells, read)
                if joining is None:
                    return None
                events, keys = joining.events, joining.keys
            elif self._quarantining is None:
                events, keys = self._fold.keyed(events)
            else:
                keys = self._quarantining.keys(events)
            rows, missing = self._recent.find(dict.fromkeys(keys), {} if pending is None else pending.rows)
            if missing or self._is_heavy:
                if read is None:
                    return None
                rows.update(read(self._statements, missing) if missing else {})
            if self._quarantining is None:
                changed = self._fold(rows, events, keys)
                if joining is None:
                    prepared = Prepared(batch, changes_of(changed), changed)
                else:
                    changes = changes_of(changed, states=self._fold.state_rows(joining.cells))
                    prepared = Prepared(batch, changes, changed, cells=joining.cells)
            else:
                blocked = self._blocked
                if pending is not None and pending.blocked:
                    blocked = replace(blocked, aggregates=blocked.aggregates.union(pending.blocked))
                result = self._quarantining(rows, events, blocked)
                quarantine = QuarantineChanges(result.quarantined) if result.quarantined else None
                prepared = Prepared(batch, changes_of(result.changed, quarantine), result.changed, result.blocked)
        # Keeps no events: they are not needed again, whether the batch is committed or not.
        self._pending.append(replace(prepared, batch=replace(batch, events=()), changes=Changes()))
        return prepared

    def _joined(self, events: Sequence[Any], pending: Mapping[StateId, Cell], read: ReadRows | None) -> Joining | None:
        """Fold the states of the events' aggregates; None when states must be read and `read` is None."""
        states = self._fold.states
        assert states is not None
        assert self._state_statements is not None
        cells, missing = self._recent_cells.find(states.ids(events), pending)
        if missing:
            if read is None:
                return None
            stored = states.cells(read(self._state_statements, missing).values())
            self._recent_cells.remember(stored)
            cells.update(stored)
        return self._fold.join(events, cells)

    def sort(self, connection: Connection, offers: Sequence[Offered]) -> Sorted:
        """Fold events of the quarantine, and quarantine those that still fail. For a projection that quarantines."""
        assert self._quarantining is not None
        keys = self._quarantining.keys(offers)
        return self._quarantining(self._statements.read(connection, keys) if keys else {}, offers, BlockedAggregates())

    def commit(self, connection: Connection, checkpoint: Checkpoint, prepared: Prepared) -> None:
        """Write the rows and advance the checkpoint together, or raise `CheckpointFenced` and do neither."""
        failpoints.reach("worker.before_commit")
        batch = prepared.batch
        mark = (checkpoint.name, checkpoint.revision, checkpoint.epoch, batch.after)
        advance = (batch.last, batch.event_id, self._lease_s, *mark)
        if not self._statements.write(connection, advance, prepared.changes):
            raise fenced(connection, checkpoint, batch)
        failpoints.reach("worker.rows_written")


def fenced(connection: Connection, checkpoint: Checkpoint, batch: Batch) -> CheckpointFenced:
    """Return the error for a batch that the checkpoint refused, with the checkpoint's owner, epoch or position."""
    current = read(connection, checkpoint.name, checkpoint.revision)
    if current is None:
        reason = "its checkpoint is gone"
    elif current.epoch != checkpoint.epoch:
        reason = f"{current.owner or 'nobody'} holds it in epoch {current.epoch}, this was {checkpoint.epoch}"
    else:
        reason = f"its checkpoint is at position {current.position} and the batch starts after {batch.after}"
    return CheckpointFenced(checkpoint.name, reason)
