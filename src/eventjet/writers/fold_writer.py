"""`FoldWriter`: one batch of events, its rows and the checkpoint, in one transaction.

The fence is the checkpoint's own update: it finds its row only at the epoch and the position that this worker knows,
and whoever changes rows moves one of them. So rows may be read, and events folded, before the transaction begins: if
it commits, nobody has written since. A worker that is stopped or slow while it folds holds no lock.

The same proof lets the writer remember rows. What it knows is true at one position of one epoch, so nobody has to tell
it which batches were committed: the position that the next batch comes after says so, and if that is wrong the fence
refuses the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Table

from eventjet import failpoints
from eventjet.errors import CheckpointFenced
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.quarantine.fold import BlockedAggregates, Offered, Sorted
from eventjet.sql.checkpoint import DECLARED, Checkpoint, read
from eventjet.sql.dialect import Dialect
from eventjet.sql.locations import located
from eventjet.writers.batch import Batch
from eventjet.writers.batch_fold import BatchFold, Prepared


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
