"""The columns of a record, with names and types, and the conversion of records to and from Arrow batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from operator import itemgetter
from typing import Any, TypeAlias

from eventjet.codec.headers import TYPE, VERSION, RawRecord, header, number_of, recorded_at
from eventjet.codec.subjects import entity_of
from eventjet.errors import UsageError

STORED = ("position", "time_ns", "subject", "headers", "body")
"""The columns of a record as it is stored; `time_ns` is in ns since 1970, `headers` is the raw header block."""

_Fields: TypeAlias = tuple[Any, Any, Any, Any, Any]
"""One sequence of values for each column in `STORED`."""


def schema_of(columns: Sequence[str]) -> str:
    """Return the schema of columns in Spark's DDL."""
    return ", ".join(f"{name} {_COLUMNS[name][0]}" for name in columns)


def parse_columns(text: str) -> tuple[str, ...]:
    """Return the column names in a comma-separated text, in its order; raises `UsageError`."""
    return _checked_names([name.strip().lower() for name in text.split(",") if name.strip()])


def columns_in(schema: Any) -> tuple[str, ...]:
    """Return the column names of a Spark `StructType`, which may be the user's own; raises `UsageError`."""
    names = _checked_names(schema.names)
    for field in schema.fields:
        if field.dataType.simpleString() != _COLUMNS[field.name][0]:
            raise UsageError(
                f"The column {field.name} is {_COLUMNS[field.name][0]}, not {field.dataType.simpleString()}. "
                "Leave the schema out, and cast what was read."
            )
    return names


def pyarrow() -> Any:
    """Import and return pyarrow, which has no type annotations."""
    return import_module("pyarrow")


def arrow_schema(columns: Mapping[str, str]) -> Any:
    """Return the Arrow schema for column names with types in Spark's DDL."""
    arrow = pyarrow()
    types = {
        "int": arrow.int32(),
        "bigint": arrow.int64(),
        "string": arrow.string(),
        "binary": arrow.binary(),
        "timestamp": arrow.timestamp("us", tz="UTC"),
    }
    return arrow.schema([(name, types[ddl]) for name, ddl in columns.items()])


def records_of(batch: Any) -> Iterator[RawRecord]:
    """Iterate over the records of an Arrow batch whose columns are the source's `SCHEMA`."""
    position, time_ns, subject, headers, body = batch.columns
    return zip(
        position.to_pylist(),
        time_ns.to_pylist(),
        subject.cast(pyarrow().binary()).to_pylist(),
        headers.to_pylist(),
        body.to_pylist(),
        strict=True,
    )


def arrow_batch(records: Sequence[RawRecord], columns: Sequence[str] = STORED) -> Any:
    """Return records as one Arrow batch; headers and body stay bytes, which a fold decodes later."""
    arrow = pyarrow()
    fields: Any = tuple(zip(*records, strict=True))
    schema = arrow_schema({name: _COLUMNS[name][0] for name in columns})
    try:
        arrays = [arrow.array(_COLUMNS[field.name][1](fields), field.type) for field in schema]
    except arrow.ArrowInvalid:
        # A subject that is not UTF-8 comes from another program; it is shown as JetStream's API shows it.
        readable = [subject.decode("utf-8", "replace").encode() for subject in fields[2]]
        fields = (*fields[:2], readable, *fields[3:])
        arrays = [arrow.array(_COLUMNS[field.name][1](fields), field.type) for field in schema]
    return arrow.RecordBatch.from_arrays(arrays, schema=schema)


def pack_rows(rows: Sequence[Sequence[Any]]) -> bytes:
    """Pack rows of values for SQLite's driver (int, float, str, bytes, None) into one Arrow stream."""
    arrow = pyarrow()
    columns = [arrow.array(column) for column in zip(*rows, strict=True)]
    batch = arrow.RecordBatch.from_arrays(columns, names=[str(number) for number in range(len(columns))])
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def unpack_rows(payload: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield the rows in an Arrow stream from `pack_rows`."""
    with pyarrow().ipc.open_stream(payload) as reader:
        for batch in reader:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown:
        raise UsageError(f"The source jetstream has no column {unknown[0]!r}. It has: {', '.join(_COLUMNS)}.")
    if not names or len(set(names)) < len(names):
        raise UsageError("`columns` names none, or one twice. Name each column that is wanted once.")
    return tuple(names)


@lru_cache(maxsize=65_536)
def _aggregate_of(subject: bytes) -> tuple[str | None, str | None]:
    """Return (aggregate, aggregate id) of a subject; None twice for a subject that eventjet did not make."""
    try:
        return entity_of(subject)
    except ValueError:
        return None, None


_COLUMNS: Mapping[str, tuple[str, Callable[[_Fields], Sequence[Any]]]] = {
    "position": ("bigint", itemgetter(0)),
    "time_ns": ("bigint", itemgetter(1)),
    "subject": ("string", itemgetter(2)),
    "headers": ("binary", itemgetter(3)),
    "body": ("binary", itemgetter(4)),
    # As everywhere, the time in a record's header comes before JetStream's time, because the log may be a restored log.
    "time": ("timestamp", lambda fields: [recorded_at(record) for record in zip(*fields, strict=True)]),
    "aggregate": ("string", lambda fields: [_aggregate_of(subject)[0] for subject in fields[2]]),
    "aggregate_id": ("string", lambda fields: [_aggregate_of(subject)[1] for subject in fields[2]]),
    "type": ("string", lambda fields: [header(block, TYPE) for block in fields[3]]),
    "version": ("bigint", lambda fields: [number_of(block, VERSION) for block in fields[3]]),
}
"""Column name → (type in Spark's DDL, function from the stored fields to the column's values)."""

SCHEMA = schema_of(STORED)
"""The default columns of the source `jetstream`, in Spark's DDL; the files of an archive have the same columns."""
