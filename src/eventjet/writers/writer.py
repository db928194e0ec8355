"""`Writer`: one batch of events, its rows and the checkpoint, in one transaction.

The fence is the checkpoint's own update: it finds its row only at the epoch and the position that this worker knows,
and whoever changes rows moves one of them. So rows may be read, and events folded, before the transaction begins: if
it commits, nobody has written since. A worker that is stopped or slow while it folds holds no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import JSON, Connection, LargeBinary, Table

from eventjet import failpoints
from eventjet.domain.recorded import Recorded
from eventjet.errors import CheckpointFenced
from eventjet.projections.fold import Fold, RowKey, Rows
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec, storage_table
from eventjet.quarantine.fold import AggregateKey, Held, Offered, ParkingFold, Sorted, Sorting
from eventjet.sql.checkpoint import Checkpoint, read
from eventjet.sql.statements import Changes, statements
from eventjet.writers.recent import NONE, ROWS_MAX, RecentRows


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

    Whoever tells it of every commit is spared reading rows that it has just written.
    """

    def __init__(
        self, resolved: ResolvedProjection, dialect: str, *, lease_s: float, table: Table | None = None
    ) -> None:
        codec = RowCodec(resolved.table, resolved.row_type, dialect)
        # Rows of values that may be large, or changed in place, are read anew for every batch.
        heavy = any(isinstance(column.type, JSON | LargeBinary) for column in resolved.table.columns)
        self._recent = RecentRows(0 if heavy else ROWS_MAX)
        self.held = Held()
        """What is held back at the checkpoint, as long as nobody else writes."""
        self._resolved = resolved
        self._fold = Fold(resolved, codec)
        self._parking = ParkingFold(resolved, codec) if resolved.quarantines else None
        self._prepared: deque[_Prepared] = deque(maxlen=2)
        self._lease_s = lease_s
        self._statements = statements(storage_table(resolved.table, dialect) if table is None else table, codec)

    def write(self, connection: Connection, held: Checkpoint, batch: Batch) -> None:
        """Prepare and commit within the caller's transaction."""
        self.commit(connection, held, batch, self.prepare(connection, batch))

    def prepare(self, connection: Connection, batch: Batch) -> Changes:
        """Read and fold: what the batch does to the rows. Raises `HandlerFailed`."""
        self._prepared.clear()
        changes = self._folded(batch, lambda keys: self._statements.read(connection, keys))
        assert changes is not None
        return changes

    def prepare_next(self, batch: Batch) -> Changes | None:
        """`prepare` for the batch after the one that is about to be committed.

        None when that takes rows that are not in memory. Whatever it raises, `prepare` raises in its turn.
        """
        return None if len(self._prepared) > 1 else self._folded(batch, None)

    def sort(self, connection: Connection, offers: Sequence[Offered], held: Held) -> Sorted:
        """Read and fold, and park what cannot be taken. Only for a projection that quarantines."""
        self._prepared.clear()
        found = self._sorted(offers, held, lambda keys: self._statements.read(connection, keys))
        assert found is not None
        return found

    def committed(self) -> None:
        """What was prepared first, of what was not committed yet, is in the database."""
        done = self._prepared.popleft()
        self._recent.committed(done.changed)
        if done.held:
            self.held.aggregates.update(done.held)

    def undone(self) -> None:
        """What was prepared is not in the database."""
        self._prepared.clear()
        self._recent.forget()

    def forget(self) -> None:
        """Begin anew: somebody else may have written since."""
        self.undone()
        self.held = Held()

    def _folded(self, batch: Batch, read: Read | None) -> Changes | None:
        """What it does to the rows; None when some would have to be read, and cannot."""
        events: Sequence[Any] = batch.events
        if batch.last <= batch.after or (events and events[0].position <= batch.after):
            raise CheckpointFenced(self._resolved.name, f"a batch after position {batch.after} ends at {batch.last}")
        if self._parking is not None:
            found = self._sorted(events, self.held, read)
            if found is None:
                return None
            self._prepared[-1].held = found.held
            return changes_of(found.changed, Sorting(found.parked) if found.parked else None)
        if not self._resolved.reads:
            made = self._fold({}, events)
            self._prepared.append(_Prepared({}))
            return Changes(made=list(made.values()))
        rows = self._rows(self._fold.keys(events), read)
        if rows is None:
            return None
        changed = self._fold(rows, events)
        self._prepared.append(_Prepared(changed))
        return changes_of(changed)

    def _sorted(self, offers: Sequence[Offered], held: Held, read: Read | None) -> Sorted | None:
        assert self._parking is not None
        if self._prepared and self._prepared[-1].held:
            # What the batch before holds back is not known to be held before it is committed.
            return None
        rows = self._rows(self._parking.keys(offers), read)
        if rows is None:
            return None
        found = self._parking(rows, offers, held)
        self._prepared.append(_Prepared(found.changed))
        return found

    def _rows(self, keys: Sequence[RowKey], read: Read | None) -> Rows | None:
        """As they are once what was prepared before is committed."""
        rows, missing = self._recent.find(keys, self._prepared[-1].changed if self._prepared else NONE)
        if missing:
            if read is None:
                return None
            rows.update(read(missing))
        return rows

    def commit(self, connection: Connection, held: Checkpoint, batch: Batch, changes: Changes) -> None:
        """Rows and checkpoint together, or `CheckpointFenced` and neither."""
        failpoints.reach("worker.before_commit")
        mark = (held.name, held.revision, held.epoch, batch.after)
        advance = (batch.last, batch.event_id, self._lease_s, *mark)
        if not self._statements.write(connection, advance, changes):
            raise fenced(connection, held, batch)
        failpoints.reach("worker.rows_written")


@dataclass(slots=True)
class _Prepared:
    """What a batch changes, to be remembered once it is committed."""

    changed: Rows
    held: Collection[AggregateKey] = ()
    """Aggregates it holds back."""


Read: TypeAlias = Callable[[Sequence[RowKey]], Rows]


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
