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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet import failpoints
from eventjet.errors import CheckpointFenced
from eventjet.projections.fold import Fold, RowKey, Rows
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.quarantine.fold import AggregateKey, BlockedAggregates, Offered, ParkingFold, Sorted
from eventjet.sql.checkpoint import DECLARED, Checkpoint, read
from eventjet.sql.dialect import Dialect
from eventjet.sql.locations import located
from eventjet.sql.statements import Changes, QuarantineChanges
from eventjet.writers.batch import Batch
from eventjet.writers.recent import NONE, ROWS_MAX, RecentRows

_Read: TypeAlias = Callable[[Sequence[RowKey]], Rows]


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
        self._recent = RecentRows(0 if heavy else ROWS_MAX)
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
            rows, missing = self._recent.find(keys, NONE if before is None else before.rows)
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
    """What the checkpoint says where it should let the batch in."""
    found = read(connection, held.name, held.revision)
    if found is None:
        return CheckpointFenced(held.name, "its checkpoint is gone")
    if found.epoch != held.epoch:
        return CheckpointFenced(
            held.name, f"{found.owner or 'nobody'} holds it in epoch {found.epoch}, this was {held.epoch}"
        )
    return CheckpointFenced(
        held.name, f"its checkpoint is at position {found.position} and the batch starts after {batch.after}"
    )


def changes_of(changed: Rows, quarantine: QuarantineChanges | None = None) -> Changes:
    """What a fold did to rows that are read."""
    if None in changed.values():
        kept = [row for row in changed.values() if row is not None]
        return Changes(kept, gone=[key for key, row in changed.items() if row is None], quarantine=quarantine)
    return Changes(list(changed.values()), quarantine=quarantine)
