"""`Writer`: one batch of events, its rows and the checkpoint, in one transaction.

The fence is the checkpoint's own update: it finds its row only at the epoch and the position that this worker knows,
and whoever changes rows moves one of them. So rows may be read, and events folded, before the transaction begins: if
it commits, nobody has written since. A worker that is stopped or slow while it folds holds no lock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet import failpoints
from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced
from eventjet.projections.bound import BoundProjection
from eventjet.projections.checkpoint import Checkpoint, read
from eventjet.projections.fold import Fold, Rows
from eventjet.projections.quarantine import Held, Offered, ParkingFold, Place, Sorted, Sorting
from eventjet.projections.recent import ROWS_MAX, RecentRows
from eventjet.projections.statements import Changes, statements
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
    """Those of the subscription, in order; `Offered` ones where the projection quarantines."""

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
        codec = RowCodec(bound.table, bound.row_type, dialect)
        # Rows of values that may be large, or changed in place, are read anew for every batch.
        heavy = any(isinstance(column.type, JSON | LargeBinary) for column in bound.table.columns)
        self.recent = RecentRows(0 if heavy else ROWS_MAX)
        self.held = Held()
        """What is held back at the checkpoint, as long as nobody else writes."""
        self._bound = bound
        self._fold = Fold(bound, codec)
        self._parking = ParkingFold(bound, codec) if bound.quarantines else None
        self._newly_held: Collection[Place] = ()
        self._lease_s = lease_s
        self._statements = statements(storage_table(bound.table, dialect) if table is None else table, codec)

    def write(self, connection: Connection, held: Checkpoint, batch: Batch) -> None:
        """Prepare and commit within the caller's transaction."""
        self.commit(connection, held, batch, self.prepare(connection, held, batch))

    def prepare(self, connection: Connection, held: Checkpoint, batch: Batch) -> Changes:
        """Read and fold: what the batch does to the rows. Raises `HandlerFailed`."""
        events = batch.events
        if batch.last <= batch.after or (events and events[0].position <= batch.after):
            raise CheckpointFenced(held.name, f"a batch after position {batch.after} ends at {batch.last}")
        if not events:
            return Changes()
        if self._parking is not None:
            return self._parked_apart(connection, cast("Sequence[Any]", events))
        if not self._bound.reads:
            return Changes(made=list(self._fold({}, events).values()))
        rows, missing = self.recent.find(self._fold.keys(events))
        if missing:
            rows.update(self._statements.read(connection, missing))
        changed = self._fold(rows, events)
        self.recent.write(changed)
        return changes_of(changed)

    def sort(self, connection: Connection, offers: Sequence[Offered], held: Held) -> Sorted:
        """Read and fold, and park what cannot be taken. Only for a projection that quarantines."""
        assert self._parking is not None
        rows, missing = self.recent.find(self._parking.keys(offers))
        if missing:
            rows.update(self._statements.read(connection, missing))
        found = self._parking(rows, offers, held)
        self.recent.write(found.changed)
        return found

    def committed(self) -> None:
        """What was prepared last is in the database."""
        self.recent.committed()
        if self._newly_held:
            self.held.places.update(self._newly_held)
            self._newly_held = ()

    def undone(self) -> None:
        """What was prepared last is not in the database."""
        self.recent.forget()

    def forget(self) -> None:
        """Begin anew: somebody else may have written since."""
        self.recent.forget()
        self._newly_held = ()
        self.held = Held()

    def _parked_apart(self, connection: Connection, offers: Sequence[Offered]) -> Changes:
        found = self.sort(connection, offers, self.held)
        self._newly_held = found.held
        return changes_of(found.changed, Sorting(found.parked) if found.parked else None)

    def commit(self, connection: Connection, held: Checkpoint, batch: Batch, changes: Changes) -> None:
        """Rows and checkpoint together, or `CheckpointFenced` and neither."""
        failpoints.reach("worker.before_commit")
        mark = (held.name, held.revision, held.epoch, batch.after)
        advance = (batch.last, batch.event_id, self._lease_s, *mark)
        if not self._statements.write(connection, advance, changes):
            raise fenced(connection, held, batch)
        failpoints.reach("worker.rows_written")


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


def changes_of(changed: Rows, sorting: Sorting | None = None) -> Changes:
    """What a fold did to rows that are read."""
    if None in changed.values():
        kept = [row for row in changed.values() if row is not None]
        return Changes(kept, gone=[key for key, row in changed.items() if row is None], sorting=sorting)
    return Changes(list(changed.values()), sorting=sorting)
