"""Columns and rows of the log, an event type and a read model in Arrow, for DataFrames and lakes, without pyspark."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import types as sa

from eventjet.codec.catalog import Catalog, EventType
from eventjet.codec.headers import MSG_ID, SCHEMA, TYPE, VERSION, RawRecord, header, metadata_of, number_of, recorded_at
from eventjet.codec.subjects import entity_shown
from eventjet.domain.personal import field_hint, is_private
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded
from eventjet.domain.unique import CLAIMS
from eventjet.errors import UndecodableEvent, UsageError
from eventjet.projections.columns import Convert, dumps, labels, plain, wall_time
from eventjet.projections.resolve import ResolvedProjection
from eventjet.spark.columns import Form, decimal_form, forms_of, leaf, pyarrow

EVENTS = "events"
"""The name of the table that has all records of the log."""

_CONTEXT_COLUMNS = {"command_id": "str", "correlation": "str", "causation": "str", "actor": "str", "metadata": "map"}
_AGGREGATE_COLUMNS = {"aggregate": "str", "aggregate_id": "str", "version": "int", "event_id": "str"}
_POSITION_COLUMNS = {"position": "int", "recorded_at": "datetime"}
_STORED_COLUMNS = {
    **_POSITION_COLUMNS,
    "type": "str",
    "schema": "int",
    **_AGGREGATE_COLUMNS,
    **_CONTEXT_COLUMNS,
    "body": "str",
}
_RECORDED_COLUMNS = {**_POSITION_COLUMNS, **_AGGREGATE_COLUMNS, **_CONTEXT_COLUMNS}


def stored_columns() -> dict[str, Form]:
    """Return the columns of the whole log; a value that a record lacks, or that cannot be read, is null."""
    return {name: leaf(kind) for name, kind in _STORED_COLUMNS.items()}


def recorded_columns(event_type: type, left_out: Collection[str] = ()) -> dict[str, Form]:
    """Return a type's columns: the log's, then fields that are not `left_out`; `event_` precedes a name in use."""
    columns = {name: leaf(kind) for name, kind in _RECORDED_COLUMNS.items()}
    # Spark's column names are not case-sensitive.
    names_in_use = set(columns)
    for name, form in forms_of(event_type).items():
        if name in left_out:
            continue
        while name.lower() in names_in_use:
            name = f"event_{name}"
        names_in_use.add(name.lower())
        columns[name] = form
    return columns


def personal_fields(event_type: type) -> frozenset[str]:
    """Return the fields of an event that contain personal data."""
    return frozenset(name for name in forms_of(event_type) if is_private(field_hint(event_type, name)))


def masked_text(catalog: Catalog, record: RawRecord) -> str | None:
    """Return the body of a record as text without what is personal, or may be; None if nothing of it can be shown."""
    body = catalog.masked_body(header(record[3], TYPE), number_of(record[3], SCHEMA), record[4])
    return None if body is None else _text(body)


def event_tables(catalog: Catalog) -> dict[str, EventType]:
    """Return the event types of an application by the names of their tables.

    Names that would be equal get a suffix out of the type's own name. Claims of unique values, which are eventjet's own
    events, have no table.
    """
    kinds = {kind.info.name: kind for kind in catalog.kinds() if kind.aggregate != CLAIMS}
    plain = {name: re.sub(r"[^a-z0-9_]", "_", name.lower()) for name in kinds}
    taken = [EVENTS, *plain.values()]
    return {
        table if taken.count(table) == 1 else f"{table}_{sha256(name.encode()).hexdigest()[:8]}": kinds[name]
        for name, table in plain.items()
    }


def recorded_row(event: Recorded[Any], forms: Mapping[str, Form]) -> tuple[Any, ...]:
    """Return the values of `recorded_columns`; raises `UsageError` for a value that its column has no place for."""
    aggregate_values = (event.aggregate, event.aggregate_id, event.version, event.event_id)
    context = (event.command_id, *_context(event.metadata))
    return (event.position, event.recorded_at, *aggregate_values, *context, *_fields(event, forms))


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


def stored_row(record: RawRecord) -> tuple[Any, ...]:
    """Return the values of `stored_columns`; no content of a record raises."""
    position, _, subject, block, body = record
    aggregate, aggregate_id = entity_shown(subject)
    try:
        command_id, metadata = metadata_of(block)
    except ValueError:
        command_id, metadata = None, NO_METADATA
    aggregate_values = (aggregate, aggregate_id, _number(block, VERSION, 2**63), header(block, MSG_ID))
    kind = (header(block, TYPE), _number(block, SCHEMA, 2**31))
    return (position, _recorded_at(record), *kind, *aggregate_values, command_id, *_context(metadata), _text(body))


def stored_row_beside(row: tuple[Any, ...], record: RawRecord) -> tuple[Any, ...]:
    """Return what `stored_row` returns, in half the time, for a record of which `row` is the `recorded_row`."""
    block = record[3]
    kind = (header(block, TYPE), _number(block, SCHEMA, 2**31))
    begin, end = len(_POSITION_COLUMNS), len(_RECORDED_COLUMNS)
    return (*row[:begin], *kind, *row[begin:end], _text(record[4]))


def _context(metadata: Metadata) -> tuple[Any, ...]:
    traced = {} if metadata.traceparent is None else {"traceparent": metadata.traceparent}
    extra_items = list({**traced, **metadata.extra}.items())
    return (metadata.correlation, metadata.causation, metadata.actor, extra_items)


def _number(block: bytes, name: str, limit: int) -> int | None:
    number = number_of(block, name)
    return number if number is not None and number < limit else None


def _recorded_at(record: RawRecord) -> datetime | None:
    """Return the recorded time as the decoder does; None for a time that cannot be read."""
    try:
        return recorded_at(record)
    except UndecodableEvent:
        return None


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def batch_of(rows: Sequence[Sequence[Any]], columns: Mapping[str, Form]) -> Any:
    """Return at least one row of values as an Arrow batch."""
    arrow = pyarrow()
    values = [
        arrow.array(column, form.arrow) for column, form in zip(zip(*rows, strict=True), columns.values(), strict=True)
    ]
    return arrow.RecordBatch.from_arrays(values, names=list(columns))


def row_columns(resolved: ResolvedProjection) -> dict[str, Form]:
    """Return the columns of a read model, as the table declares them, in types of Spark."""
    return {column.name: _form_of(column.type) for column in resolved.table.columns}


class _RowValues:
    """The values of a read model's rows as pyarrow takes them: see `eventjet.projections.row_codec.ColumnValues`."""

    def dumper(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        return _form_of(kind).convert

    def loader(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        del kind
        return None


ROW_VALUES = _RowValues()


def _form_of(declared: sa.TypeEngine[Any]) -> Form:
    kind: Any = plain(declared)
    match kind:
        case sa.Enum():
            names: dict[Any, str] = {value: label for label, value in labels(kind).items()}
            return replace(leaf("str"), convert=names.__getitem__)
        case sa.Float():
            return leaf("float")
        case sa.Numeric():
            return decimal_form(kind.precision, None if kind.precision is None else kind.scale or 0)
        case sa.DateTime() if not kind.timezone:
            return Form("timestamp_ntz", pyarrow().timestamp("us"), wall_time)
        case sa.JSON():
            return replace(leaf("str"), convert=dumps)
        case _:
            return leaf(next(name for base, name in _LEAVES if isinstance(kind, base)))


_LEAVES: tuple[tuple[type[sa.TypeEngine[Any]], str], ...] = (
    (sa.String, "str"),
    (sa.Integer, "int"),
    (sa.Boolean, "bool"),
    (sa.DateTime, "datetime"),
    (sa.Date, "date"),
    (sa.Uuid, "uuid"),
    (sa.LargeBinary, "bytes"),
)
"""Types of columns, and the simple types of pydantic that have their values."""
