"""What Spark's Python workers run to show the log: values that can be pickled, holding names and references only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from eventjet.codec.envelope import (
    MSG_ID,
    SCHEMA,
    TYPE,
    VERSION,
    Decoder,
    RawRecord,
    header,
    metadata_of,
    number_of,
    recorded_at,
)
from eventjet.codec.subjects import entity_shown
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded
from eventjet.errors import UndecodableEvent, UsageError
from eventjet.projections.app_ref import AppRef
from eventjet.spark.columns import pyarrow, records_of
from eventjet.spark.schema import Form, forms_of, leaf, quoted

_CONTEXT = {"command_id": "str", "correlation": "str", "causation": "str", "actor": "str", "metadata": "map"}
_WHOSE = {"aggregate": "str", "aggregate_id": "str", "version": "int", "event_id": "str"}
_PLACE = {"position": "int", "recorded_at": "datetime"}
_STORED = {**_PLACE, "type": "str", "schema": "int", **_WHOSE, **_CONTEXT, "body": "str"}
_RECORDED = {**_PLACE, **_WHOSE, **_CONTEXT}


def stored_columns() -> dict[str, Form]:
    """Of the whole log. What a record lacks, or has in no readable form, is null."""
    return {name: leaf(kind) for name, kind in _STORED.items()}


def recorded_columns(event_type: type) -> dict[str, Form]:
    """Of one event type: what the log knows of it, then its fields; `event_` comes before a name that is taken."""
    columns = {name: leaf(kind) for name, kind in _RECORDED.items()}
    # Spark does not tell upper case from lower.
    taken = set(columns)
    for name, form in forms_of(event_type).items():
        while name.lower() in taken:
            name = f"event_{name}"
        taken.add(name.lower())
        columns[name] = form
    return columns


def ddl_of(columns: Mapping[str, Form]) -> str:
    """The columns as Spark's SQL declares them."""
    return ", ".join(f"{quoted(name)} {form.ddl}" for name, form in columns.items())


@dataclass(frozen=True, slots=True)
class StoredTask:
    """Shows records as they are stored; needs no application, and raises for nothing that is in them."""

    until: datetime | None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        columns = stored_columns()
        for batch in batches:
            rows = [_stored(record) for record in records_of(batch)]
            if self.until is not None:
                rows = [row for row in rows if row[1] is not None and row[1] <= self.until]
            yield from _batch(rows, columns)


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """Shows the events of one type, decoded by the application's own code."""

    app: AppRef
    type_name: str
    schema: int
    until: datetime | None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        catalog = self.app.load().catalog
        resolved = catalog.resolve(self.type_name, self.schema)
        if resolved is None:
            raise UsageError(
                f"The app where this task runs does not declare {self.type_name!r} schema {self.schema}. "
                "Install the same version there."
            )
        event_type, info = resolved.event.event_type, resolved.event.info
        decode = Decoder(catalog, (event_type,))
        columns = recorded_columns(event_type)
        forms = forms_of(event_type)
        # Other names are other events, declared or not; a newer schema of this one must not be passed over.
        names = {info.name, *info.formerly}
        for batch in batches:
            named = (record for record in records_of(batch) if header(record[3], TYPE) in names)
            found = [event for record in named if (event := decode(record)) is not None]
            if self.until is not None:
                found = [event for event in found if event.recorded_at <= self.until]
            yield from _batch([_recorded(event, forms) for event in found], columns)


def _recorded(event: Recorded[Any], forms: Mapping[str, Form]) -> tuple[Any, ...]:
    whose = (event.aggregate, event.aggregate_id, event.version, event.event_id)
    context = (event.command_id, *_context(event.metadata))
    return (event.position, event.recorded_at, *whose, *context, *_fields(event, forms))


def _fields(event: Recorded[Any], forms: Mapping[str, Form]) -> Iterator[Any]:
    for name, form in forms.items():
        value = getattr(event.data, name)
        try:
            yield None if value is None else form.convert(value)
        except ValueError as error:
            raise UsageError(
                f"{name} of the event at position {event.position} has no place in a column: {error}. "
                "Declare the field's digits, or take it as text: `body` in `events(spark, app)` holds it as stored."
            ) from None


def _stored(record: RawRecord) -> tuple[Any, ...]:
    position, _, subject, block, body = record
    aggregate, aggregate_id = entity_shown(subject)
    try:
        command_id, metadata = metadata_of(block)
    except ValueError:
        command_id, metadata = None, NO_METADATA
    whose = (aggregate, aggregate_id, _number(block, VERSION, 2**63), header(block, MSG_ID))
    kind = (header(block, TYPE), _number(block, SCHEMA, 2**31))
    return (position, _recorded_at(record), *kind, *whose, command_id, *_context(metadata), _text(body))


def _context(metadata: Metadata) -> tuple[Any, ...]:
    traced = {} if metadata.traceparent is None else {"traceparent": metadata.traceparent}
    other = list({**traced, **metadata.extra}.items())
    return (metadata.correlation, metadata.causation, metadata.actor, other)


def _number(block: bytes, name: str, below: int) -> int | None:
    found = number_of(block, name)
    return found if found is not None and found < below else None


def _recorded_at(record: RawRecord) -> datetime | None:
    """As the decoder has it; None for a time that cannot be read."""
    try:
        return recorded_at(record)
    except UndecodableEvent:
        return None


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _batch(rows: Sequence[Sequence[Any]], columns: Mapping[str, Form]) -> Iterator[Any]:
    """The rows as one Arrow batch, if there are any."""
    if rows:
        arrow = pyarrow()
        values = [
            arrow.array(column, form.arrow)
            for column, form in zip(zip(*rows, strict=True), columns.values(), strict=True)
        ]
        yield arrow.RecordBatch.from_arrays(values, names=list(columns))
