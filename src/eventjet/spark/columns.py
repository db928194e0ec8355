"""The columns of records and of events' fields: their Spark and Arrow types, and the conversion of values to them.

A record has the columns of `SCHEMA` and more that follow. The types of an event's fields are read from pydantic's
schema of the class, which the codec of stored bodies uses, too. A field for which Spark has no type (unions, tuples of
mixed types, recursive classes, models with `extra="allow"`, anything else) becomes JSON text, as in the stored body. A
value that does not fit its type raises `ValueError`; it is never rounded, truncated or wrapped around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import lru_cache, partial
from importlib import import_module
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, cast
from uuid import UUID

from eventjet.codec.aliases import fields_of, written_name
from eventjet.codec.bodies import BodyCodec
from eventjet.codec.headers import TYPE, VERSION, RawRecord, header, number_of, recorded_at
from eventjet.codec.subjects import entity_of
from eventjet.errors import UsageError

STORED = ("position", "time_ns", "subject", "headers", "body")
"""The columns of a record as it is stored; `time_ns` is in ns since 1970, `headers` is the raw header block."""

Node: TypeAlias = Mapping[str, Any]
"""A node of pydantic's core schema."""

DIGITS_MAX = 38
"""The maximum number of digits of Spark's decimals."""
PLACES = 18
"""The decimal places of a `Decimal` field that declares none; Spark itself uses 18 for Python's decimals."""

_MICROSECOND = timedelta(microseconds=1)
_WRAPPERS = frozenset({"default", "function-after", "function-before", "function-wrap", "nullable"})
_LISTS = frozenset({"list", "set", "frozenset"})

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


@dataclass(frozen=True, slots=True)
class Form:
    """A Spark type, and the conversion of values to it."""

    ddl: str
    """The type in Spark's DDL."""
    arrow: Any
    """The same type in Arrow."""
    convert: Callable[[Any], Any]
    """Converts a value other than None for pyarrow; raises `ValueError` for a value that does not fit."""


def forms_of(event_type: type) -> dict[str, Form]:
    """Return the forms of an event's fields, in their order."""
    untyped: Any = event_type
    node: dict[str, Any] = untyped.__pydantic_core_schema__
    definitions: dict[str, Node] = {}
    if node["type"] == "definitions":
        definitions = {definition["ref"]: definition for definition in node["definitions"]}
        node = node["schema"]
    return _Forms(definitions).of_fields(node) or {}


def leaf(kind: str) -> Form:
    """Return the form of one of pydantic's simple types, or of a `map` from text to text."""
    return _map(leaf("str")) if kind == "map" else _LEAVES[kind](pyarrow())


class _Forms:
    """The forms of the nodes in one class's schema; `definitions` has the nodes that are shared by reference."""

    def __init__(self, definitions: Mapping[str, Node]) -> None:
        self._definitions = definitions
        self._open_refs: list[str] = []

    def of_fields(self, node: Node) -> dict[str, Form] | None:
        """Return the forms of the fields of a dataclass or a model; None when the node is neither."""
        node = self._bare(node)
        inner = node.get("schema")
        if node["type"] == "dataclass":
            fields = [
                (field["name"], field["schema"]) for field in self._bare(inner)["fields"] if field.get("init", True)
            ]
        elif node["type"] == "model" and not node.get("root_model"):
            fields = [(name, field["schema"]) for name, field in self._bare(inner)["fields"].items()]
        else:
            return None
        return {name: self.of(schema) for name, schema in fields}

    def of(self, node: Node) -> Form:
        bare = self._bare(node)
        # A recursive class cannot be a struct, because its type would be infinite.
        name = bare.get("ref")
        if name in self._open_refs:
            raise _EndlessError(name)
        self._open_refs.append(name or "")
        try:
            return self._leaf(bare) or self._nested(bare) or self._text(node)
        except _EndlessError as endless:
            if endless.args[0] != name:
                raise
            return self._text(node)
        finally:
            self._open_refs.pop()

    def _bare(self, node: Any) -> Node:
        """Return the node of the declared type, without validators, defaults, nullability and references."""
        while True:
            if node["type"] in _WRAPPERS:
                node = node["schema"]
            elif node["type"] == "definition-ref":
                node = self._definitions[node["schema_ref"]]
            else:
                return cast("Node", node)

    def _leaf(self, node: Node) -> Form | None:
        kind: str = node["type"]
        if kind == "decimal":
            return decimal_form(node.get("max_digits"), node.get("decimal_places"))
        if kind == "enum":
            return _enumeration([member.value for member in node["members"]], attrgetter("value"))
        if kind == "literal":
            return _enumeration(node["expected"], lambda value: value)
        return leaf(kind) if kind in _LEAVES else None

    def _nested(self, node: Node) -> Form | None:
        kind: str = node["type"]
        items = node.get("items_schema")
        if kind in _LISTS and items is not None:
            return _array(self.of(items), in_order=kind == "list")
        if kind == "tuple" and len(cast("Sequence[Any]", items)) == 1 and node.get("variadic_item_index") == 0:
            return _array(self.of(cast("Sequence[Any]", items)[0]), in_order=True)
        if kind == "json-or-python" and node["json_schema"]["type"] == "list":
            return self._nested(node["json_schema"])
        if kind == "dict" and self._bare(node.get("keys_schema", {"type": "any"}))["type"] == "str":
            return _map(self.of(node.get("values_schema", {"type": "any"})))
        fields = self.of_fields(node)
        if not fields:
            return None
        config: Node = node.get("config") or {}
        inner = self._bare(node["schema"])
        if node["type"] == "model" and "allow" in (config.get("extra_fields_behavior"), inner.get("extra_behavior")):
            return None  # as text, it keeps the values of fields that it does not declare
        names = {name: written_name(name, field, config) for name, field in fields_of(inner)}
        return _struct({name: (names[name], form) for name, form in fields.items()})

    def _text(self, node: Node) -> Form:
        """Return the form of a node for which Spark has no type: JSON text."""
        schema: Any = {"type": "definitions", "schema": node, "definitions": list(self._definitions.values())}
        codec = BodyCodec(object, schema if self._definitions else cast("Any", node))
        return Form("string", pyarrow().string(), lambda value: codec.written(value).decode())


class _EndlessError(Exception):
    """A class contains itself, directly or through its fields."""


def decimal_form(digits: int | None, places: int | None) -> Form:
    """Return the form of decimals of so many digits, of which `places` are after the point; None where none is said."""
    precision = DIGITS_MAX if digits is None or places is None else min(max(digits, places), DIGITS_MAX)
    scale = PLACES if places is None else min(places, DIGITS_MAX)
    exact = Context(prec=precision, traps=[Inexact, InvalidOperation])
    unit = Decimal(1).scaleb(-scale)
    ddl = f"decimal({precision},{scale})"

    def convert(value: Any) -> Decimal:
        try:
            return _checked(Decimal, value).quantize(unit, context=exact)
        except (Inexact, InvalidOperation):
            raise ValueError(f"it has more digits than {ddl}") from None

    return Form(ddl, pyarrow().decimal128(precision, scale), convert)


def _integer(value: Any) -> int:
    if not -(2**63) <= _checked(int, value) < 2**63:
        raise ValueError("it does not fit into bigint")
    return int(value)


def _double(value: Any) -> float:
    # The default of a field may be an integer, which nothing has converted.
    return float(value) if type(value) is int and abs(value) <= 2**53 else _checked(float, value)


def _duration(value: Any) -> timedelta:
    if not -(2**63) <= _checked(timedelta, value) // _MICROSECOND < 2**63:
        raise ValueError("its microseconds do not fit into 64 bits")
    return value


def _enumeration(values: Sequence[Any], value_of: Callable[[Any], Any]) -> Form | None:
    """Return the common form of all values of an enumeration; None when their types differ or are not simple."""
    kinds: set[type] = {type(value) for value in values if value is not None}
    kind = next(
        (kind for python_type, kind in ((str, "str"), (int, "int"), (bool, "bool")) if kinds == {python_type}), None
    )
    if kind is None:
        return None
    inner = leaf(kind)
    return Form(inner.ddl, inner.arrow, lambda value: _unless_none(inner, value_of(value)))


def _array(item: Form, *, in_order: bool) -> Form:
    """Return the form of an array; sets are sorted, so that equal sets give equal arrays."""

    # A set in an item has another order in each process; a converted one is in order.
    has_sets = not in_order and "array<" in item.ddl

    def convert(value: Any) -> list[Any]:
        in_turn = value if in_order or has_sets else sorted(value, key=repr)
        converted = [_unless_none(item, element) for element in in_turn]
        return sorted(converted, key=repr) if has_sets else converted

    return Form(f"array<{item.ddl}>", pyarrow().list_(item.arrow), convert)


def _map(item: Form) -> Form:
    arrow = pyarrow()
    return Form(
        f"map<string,{item.ddl}>",
        arrow.map_(arrow.string(), item.arrow),
        lambda value: [(key, _unless_none(item, element)) for key, element in value.items()],
    )


def _struct(fields: Mapping[str, tuple[str, Form]]) -> Form:
    """Return the form of an object, whose `fields` have the names by which they are stored and their forms."""
    arrow = pyarrow()
    fields_ddl = ",".join(f"{quoted(written)}:{form.ddl}" for written, form in fields.values())
    return Form(
        f"struct<{fields_ddl}>",
        arrow.struct([arrow.field(written, form.arrow) for written, form in fields.values()]),
        lambda value: {written: _unless_none(form, getattr(value, name)) for name, (written, form) in fields.items()},
    )


def _unless_none(form: Form, value: Any) -> Any:
    return None if value is None else form.convert(value)


def quoted(name: str) -> str:
    """Quote a name for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def _checked(kind: type, value: Any) -> Any:
    """Return the value; raises `ValueError` if a validator of the application has changed its declared type."""
    if not isinstance(value, kind):
        raise ValueError(f"it is a {type(value).__name__}, and the field declares {kind.__name__}")
    return value


_LEAVES: Mapping[str, Callable[[Any], Form]] = {
    "bool": lambda arrow: Form("boolean", arrow.bool_(), partial(_checked, bool)),
    "bytes": lambda arrow: Form("binary", arrow.binary(), partial(_checked, bytes)),
    "date": lambda arrow: Form("date", arrow.date32(), partial(_checked, date)),
    "datetime": lambda arrow: Form("timestamp", arrow.timestamp("us", "UTC"), partial(_checked, datetime)),
    "float": lambda arrow: Form("double", arrow.float64(), _double),
    "int": lambda arrow: Form("bigint", arrow.int64(), _integer),
    "str": lambda arrow: Form("string", arrow.string(), partial(_checked, str)),
    "time": lambda arrow: Form("string", arrow.string(), lambda value: _checked(time, value).isoformat()),
    "timedelta": lambda arrow: Form("interval day to second", arrow.duration("us"), _duration),
    "uuid": lambda arrow: Form("string", arrow.string(), lambda value: str(_checked(UUID, value))),
}
