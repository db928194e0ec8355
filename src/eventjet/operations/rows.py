"""The history of one row: its fold from the log, event by event, and the first event that the live row lacks.

A search runs in bounded steps, so that no page waits for a long history: each step reads a limited number of records.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from eventjet.app import App
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import TYPE, RawRecord, header
from eventjet.domain.identity import encode_id
from eventjet.domain.personal import masked_row
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import field_names
from eventjet.errors import CodecError, ProjectionError, Refused, StoreUnavailable, UsageError
from eventjet.jet import Jet
from eventjet.jetstream.api import message_at, next_message
from eventjet.jetstream.client import Client
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.events import plain_json
from eventjet.operations.log import page_of_log
from eventjet.operations.tables import key_of, row_query
from eventjet.projections.fold import reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.rebuild.verifying import DriftProbe, are_equal
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.locations import check_owner, located
from eventjet.sql.own_tables import quarantine
from eventjet.sql.quarantine import of
from eventjet.text import cut

STEPS_MAX = 200
"""Events of a row that are shown on one page."""
RECORDS_MAX = 50_000
"""Records that one step of a search reads at most."""
GO_S = 1.2
_BATCH = 1_000
_BATCH_BYTES = 4_000_000
_QUARANTINED_MAX = 1_000
_VALUE_MAX = 2_000


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A row as the database has it, with the checkpoint of the same snapshot."""

    checkpoint: Checkpoint
    row: Any
    """The row in its normal form; None where there is no row."""
    quarantined: Mapping[int, str]
    """Resolution by position of the row's events that are in the quarantine."""
    fault: str = ""
    """Why no fold can have written this row; empty where a fold can."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """One event that changed a row."""

    number: int
    """Counted from 1."""
    position: int
    type: str
    """The event's wire name."""
    aggregate: str
    aggregate_id: str
    recorded_at: datetime
    actor: str
    """The actor in the event's metadata; empty where there is none."""
    change: str
    """`made`, `changed` or `deleted`."""
    changed: tuple[str, ...]
    """Names of the fields that changed; all fields where the row was made or deleted."""


def why_no_history(app: App, name: str) -> str:
    """Return why the history of a read model's rows cannot be shown; empty where it can."""
    resolved = app.projections.get(name)
    if resolved is None:
        return f"The app does not declare {name!r} any more, so nobody knows how its rows were made."
    if not isinstance(resolved, ResolvedProjection):
        return (
            "Its rows are written by a SQL projection. A handler may read and write any row of any of its tables, so "
            f"no row comes of its own events alone. `eventjet verify {cut(name, 60)}` makes all of them again "
            "and compares."
        )
    return ""


def live_row(connection: Connection, resolved: ResolvedProjection, key_json: str) -> tuple[tuple[Any, ...], LiveRow]:
    """Return the key that is given as JSON, and its row and checkpoint from one database snapshot.

    The connection must not have been used yet. Raises `UsageError` for text that is no key of the table, and for a
    revision without a checkpoint.
    """
    dialect = dialect_of(connection)
    connection.execution_options(**dialect.snapshot_options)
    check_owner(connection, resolved.name, resolved.app)
    stored_checkpoint = checkpoint.read(connection, resolved.name, resolved.revision)
    if stored_checkpoint is None:
        raise UsageError(f"Revision {resolved.revision} of {resolved.name!r} has not begun, so it has no rows yet.")
    table = located(resolved.table, stored_checkpoint.location, dialect)
    key = key_of(table, key_json)
    dialect.load_all(connection)
    values = connection.execute(row_query(table, key, dialect)).one_or_none()
    row, fault = None, ""
    if values is not None:
        try:
            codec = RowCodec(resolved.table, resolved.row_type, dialect)
            row = codec.normalise(codec.load(tuple(values)))
        except Exception as error:  # noqa: BLE001 - whatever a conversion raises for a value that it was not made for
            detail = "" if resolved.is_private else f": {cut(str(error), 200)}"
            row, fault = (
                _Unreadable(),
                f"It holds a value that no fold could have written ({type(error).__name__}{detail})",
            )
    return key, LiveRow(stored_checkpoint, row, _resolutions(connection, resolved, key), fault)


class _Unreadable:
    """A value that is equal to no row."""


def _resolutions(connection: Connection, resolved: ResolvedProjection, key: tuple[Any, ...]) -> dict[int, str]:
    """Return position → resolution of the row's quarantined events, without retried ones; raises `UsageError`."""
    if not resolved.quarantines:
        return {}
    c = quarantine.c
    conditions = of(resolved.name, resolved.revision), c.aggregate_id == str(key[0]), c.resolution != "retried"
    rows = connection.execute(select(c.position, c.resolution).where(*conditions).limit(_QUARANTINED_MAX + 1)).all()
    if len(rows) > _QUARANTINED_MAX:
        raise UsageError(f"More than {_QUARANTINED_MAX:,} events of it are in the quarantine. Decide about them first.")
    return {int(position): str(resolution) for position, resolution in rows}


@dataclass(slots=True)
class RowSearch:
    """The fold of one row from the log up to the read model's checkpoint; call `go_on` until it is `done`."""

    jet: Jet
    client: Client
    catalog: Catalog
    """The catalog of the open log."""
    app: App
    resolved: ResolvedProjection
    key: tuple[Any, ...]
    live: LiveRow
    at: int | None = None
    """Choose the last step at or before this position; None for the row's last event."""
    number: int | None = None
    """Choose the step of this number instead; None to choose by `at`."""
    until: int | None = None
    """List the last steps before this position; None for the last steps of all."""
    # The results so far.
    read_to: int = 0
    records: int = 0
    done: bool = False
    fault: str = ""
    """Why the search stopped before the end; empty where it did not."""
    made: int = 0
    """Number of events that changed the row so far."""
    first: int | None = None
    """Position of the first event that changed the row."""
    steps: deque[RowStep] = field(default_factory=lambda: deque[RowStep](maxlen=STEPS_MAX))
    chosen: tuple[RowStep, Any, Any] | None = None
    """The step that `at` or `number` chooses, as far as was read, with the row before and after it."""
    _probe: DriftProbe | None = None

    @property
    def expected(self) -> Any:
        """The row as folded from the records that were read so far."""
        return None if self._probe is None else self._probe.rows.get(self.key)

    @property
    def missed_since(self) -> int | None:
        """Position of the first event that the live row lacks; None where it lacks none, or never equalled the fold."""
        return None if self._probe is None else self._probe.drifted_at(self.key)

    @property
    def is_equal(self) -> bool:
        """Whether the live row equals the fold; valid once the search is `done`."""
        return self._is_stored_as(self.expected, self.live.row)

    def _is_stored_as(self, folded: Any, live: Any) -> bool:
        codec = RowCodec(self.resolved.table, self.resolved.row_type, Database(self.jet.settings.database).dialect)
        return not isinstance(live, _Unreadable) and are_equal(folded, live, codec)

    @property
    def subject(self) -> str | None:
        """Subject of the records to read; None for the whole log. Raises `Refused` for a key that is no valid id."""
        return f"{self.app.name}.*.{encode_id(str(self.key[0]))}" if self.resolved.keyed_by_aggregate else None

    async def go_on(self) -> None:
        """Read and fold more records, for about 1.2 s. Raises `StoreUnavailable`, `Unreachable` and `UsageError`."""
        if self._probe is None:
            await self._begin()
        assert self._probe is not None
        end, until, remaining = self.live.checkpoint.position, time.monotonic() + GO_S, RECORDS_MAX
        predecessors = PredecessorReader(Endpoint.of(self.jet.settings), self.app.name)
        decode = reader(self.catalog, self.resolved, self.live.quarantined, predecessors)
        try:
            while not self.done and remaining > 0 and time.monotonic() < until:
                records = await self._next_records(min(_BATCH, remaining), end)
                remaining -= max(1, len(records))
                await asyncio.to_thread(self._fold_records, records, decode)
                if records and not self.fault:
                    self.read_to = records[-1][0]
                self.done = self.done or bool(self.fault) or self.read_to >= end
        finally:
            predecessors.close()

    async def _begin(self) -> None:
        await self.jet.skipped()
        log, stored_checkpoint = await self.jet.log(), self.live.checkpoint
        self._probe = DriftProbe(self.resolved, {self.key: self.live.row}, self.live.quarantined, self._is_stored_as)
        if stored_checkpoint.log and stored_checkpoint.log != log.identity:
            raise UsageError("The read model was made from another log than this one. Rebuild it.")
        if stored_checkpoint.position > log.last:
            raise UsageError(
                f"The read model is at position {stored_checkpoint.position:,} and the log ends at {log.last:,}."
            )
        if self.jet.store.missing_range:
            raise UsageError(
                f"The log is not whole: {self.jet.store.missing_range}. So no row can be made again from it."
            )
        self.done = stored_checkpoint.position == 0
        if not self.resolved.reads:
            # Each row comes from a single event, whose position begins its key.
            self.read_to = max(0, min(int(self.key[0]), stored_checkpoint.position + 1) - 1)
            self.done = self.done or not 1 <= int(self.key[0]) <= stored_checkpoint.position

    async def _next_records(self, count: int, end: int) -> list[RawRecord]:
        """Return the next records; none at the end, which the leader confirms since a replica may lag behind."""
        if not self.resolved.reads:
            record = await self.client.ask(message_at(self.app.name, self.read_to + 1))
            self.done = True
            return [] if record is None else [record]
        try:
            subject = self.subject
        except Refused:
            self.done = True  # an invalid id: no aggregate has it, so the log has no events of it
            return []
        records, _ = await page_of_log(self.client, self.app.name, self.read_to + 1, subject, count, _BATCH_BYTES)
        records = [record for record in records if record[0] <= end]
        if not records:
            ahead = await self.client.ask(next_message(self.app.name, self.read_to + 1, subject or ">"))
            if ahead is not None and ahead[0] <= end:
                raise StoreUnavailable("The log", "a replica lags behind the read model; load the page again")
            self.done = True
        return records

    def _fold_records(self, records: list[RawRecord], decode: Any) -> None:
        """Fold records; blocks where a record has to be checked against its predecessor."""
        assert self._probe is not None
        self.records += len(records)
        decode.expect(records)
        for record in records:
            before = self._probe.rows.get(self.key)
            try:
                event: Any = decode(record)
                changed = {} if event is None else self._probe.fold(event)
            except (CodecError, ProjectionError) as error:
                self.fault = f"It cannot be folded beyond position {record[0]:,}: {error}"
                return
            if event is not None and self.key in changed:
                self._add_step(record, getattr(event, "event", event), before, changed[self.key])

    def _add_step(self, record: RawRecord, event: Recorded[Any], before: Any, after: Any) -> None:
        self.made += 1
        self.first = self.first or record[0]
        step = RowStep(
            number=self.made,
            position=event.position,
            type=header(record[3], TYPE) or "?",
            aggregate=event.aggregate,
            aggregate_id=event.aggregate_id,
            recorded_at=event.recorded_at,
            actor=event.metadata.actor or "",
            change="made" if before is None else "deleted" if after is None else "changed",
            changed=_changed_fields(before, after),
        )
        if self.until is None or step.position < self.until:
            self.steps.append(step)
        if self._is_chosen(step):
            self.chosen = step, before, after

    def _is_chosen(self, step: RowStep) -> bool:
        if self.number is not None:
            return step.number <= self.number
        return self.at is None or step.position <= self.at


def compared(before: Any, after: Any) -> list[dict[str, Any]]:
    """Return (name, before, after, changed) of each field of two rows; long values are cut, personal data is masked."""
    rows = [None if isinstance(row, _Unreadable) else row for row in (before, after)]
    present = rows[1] if rows[1] is not None else rows[0]
    if present is None:
        return []
    changed = _changed_fields(before, after)
    texts = [
        {} if row is None else {name: _field_text(value) for name, value in masked_row(row).items()} for row in rows
    ]
    names = field_names(type(present))
    return [
        {"name": name, "before": texts[0].get(name), "after": texts[1].get(name), "changed": name in changed}
        for name in names
    ]


def _field_text(value: Any) -> str:
    value = plain_json(value) if isinstance(value, dict | list | tuple) else value
    return "NULL" if value is None else cut(str(getattr(value, "value", value)), _VALUE_MAX)


def _changed_fields(before: Any, after: Any) -> tuple[str, ...]:
    row = after if after is not None else before
    if row is None or isinstance(before, _Unreadable) or isinstance(after, _Unreadable):
        return ()
    names = field_names(type(row))
    if before is None or after is None:
        return tuple(names)
    return tuple(name for name in names if getattr(before, name) != getattr(after, name))
