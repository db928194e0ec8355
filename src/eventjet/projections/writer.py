"""`Writer`: one batch of events, its rows and the checkpoint in one transaction.

The first statement advances the checkpoint where epoch and position are the ones this worker knows, and so locks its
row; when it finds none, the worker has been deposed and nothing is written. The transaction is the fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced
from eventjet.projections.bound import BoundProjection
from eventjet.projections.checkpoint import Checkpoint, clock, read
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.fold import Fold
from eventjet.projections.recent import ROWS_MAX, RecentRows
from eventjet.projections.statements import statements
from eventjet.projections.tables import RowCodec, storage_table


@dataclass(frozen=True, slots=True)
class Batch:
    """What a piece of the log has for one projection; the position advances over other events as well."""

    after: int
    """The position before it: what the checkpoint must say."""
    last: int
    """Its last position: what the checkpoint will say."""
    event_id: str
    """Id of the event at `last`."""
    events: Sequence[Recorded[Any]]
    """Those of the subscription, in order."""

    def before(self, position: int) -> Batch | None:
        """The part that ends with the last event before `position`; None when there is none."""
        count = sum(event.position < position for event in self.events)
        return self.cut(count)[0] if count else None

    def cut(self, count: int) -> tuple[Batch, Batch | None]:
        """The part that ends with the event number `count`, at least 1, and the rest, if it has events."""
        if count >= len(self.events):
            return self, None
        end = self.events[count - 1]
        first = Batch(self.after, end.position, end.event_id, self.events[:count])
        return first, Batch(end.position, self.last, self.event_id, self.events[count:])


class Writer:
    """Writes the batches of one projection, to its table or to `table` (a shadow).

    Whoever tells `recent` of every commit is spared reading rows that it has just written.
    """

    def __init__(self, bound: BoundProjection, dialect: str, *, lease_s: float, table: Table | None = None) -> None:
        # Rows of values that may be large, or changed in place, are read anew for every batch.
        heavy = any(isinstance(column.type, JSON | LargeBinary) for column in bound.table.columns)
        self.recent = RecentRows(0 if heavy else ROWS_MAX)
        codec = RowCodec(bound.table, bound.row_type, dialect)
        self._bound = bound
        self._fold = Fold(bound, codec)
        self._lease_s = lease_s
        self._statements = statements(storage_table(bound.table, dialect) if table is None else table, codec)
        mark = "%s" if dialect == POSTGRESQL else "?"
        self._advance = (
            f"update eventjet_projection set position = {mark}, event_id = {mark}, "  # noqa: S608 - no value in it
            f"lease_until = {clock(dialect)} + {mark} "
            f"where name = {mark} and revision = {mark} and epoch = {mark} and position = {mark}"
        )

    def write(self, connection: Connection, held: Checkpoint, batch: Batch) -> None:
        """Apply a batch within the caller's transaction.

        Raises `CheckpointFenced`, `HandlerFailed` and what the database raises; roll back then. A batch that lacks its
        beginning, or comes a second time, is fenced too.
        """
        if batch.last <= batch.after or (batch.events and batch.events[0].position <= batch.after):
            raise CheckpointFenced(held.name, f"a batch after position {batch.after} ends at {batch.last}")
        row = (held.name, held.revision, held.epoch, batch.after)
        advanced = connection.exec_driver_sql(self._advance, (batch.last, batch.event_id, self._lease_s, *row))
        if advanced.rowcount != 1:
            raise self._fenced(connection, held, batch)
        if batch.events:
            self._apply(connection, batch.events)

    def _apply(self, connection: Connection, events: Sequence[Recorded[Any]]) -> None:
        if not self._bound.reads:
            made = list(self._fold({}, events).values())
            if made:
                self._statements.insert(connection, made)
            return
        rows, missing = self.recent.find(self._fold.keys(events))
        if missing:
            rows.update(self._statements.read(connection, missing))
        changed = self._fold(rows, events)
        self.recent.write(changed)
        gone = [key for key, row in changed.items() if row is None]
        kept = [row for row in changed.values() if row is not None]
        if gone:
            self._statements.delete(connection, gone)
        if kept:
            self._statements.upsert(connection, kept)

    @staticmethod
    def _fenced(connection: Connection, held: Checkpoint, batch: Batch) -> CheckpointFenced:
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
