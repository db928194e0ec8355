"""The parts of a body that are read without pydantic, one function each: what msgspec checks, and what is made of it.

The list of what is proven. A part says `Unproven` to every word of its schema that it does not know. PURE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Flag
from typing import Annotated, Any, NamedTuple, NoReturn, Optional, Protocol, TypeAlias, cast
from uuid import UUID

import msgspec

Json: TypeAlias = dict[str, Any]
Expression: TypeAlias = Callable[[str], str]
"""The source of a value → the source of what it is read as."""

_ALWAYS = frozenset({"type", "metadata", "ref", "serialization"})
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LENGTHS = ("min_length", "max_length")
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:E[+-]?[0-9]{1,7})?")
EXPONENT_MAX = 999_999
"""Of a Decimal: beyond it arithmetic in Python's default context overflows."""
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{6})?Z", re.ASCII)

UUID_TEXT = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def decimal(text: str) -> Decimal | None:
    """The number that a text is, as Python writes it: no sign, zero, blank or underscore too many; None for others."""
    try:
        value = Decimal(text)
    except ArithmeticError:
        return None
    if str(value) != text and _DECIMAL.fullmatch(text) is None:  # `1E3` is another spelling of `1E+3`
        return None
    return value if -EXPONENT_MAX <= value.adjusted() <= EXPONENT_MAX and value.is_finite() else None


class Unproven(Exception):
    """A part of a schema that only pydantic reads."""


class Piece(NamedTuple):
    """How one part of a body is read."""

    kind: Any
    """As msgspec checks it."""
    expression: Expression | None = None
    """What is made of it; None for a value that stays as it is."""


class Scope(Protocol):
    """The decoder that is being written."""

    def name(self, value: Any, stem: str) -> str:
        """A name by which its source knows a value, or by which it may keep one."""
        ...

    def part(self, node: Json) -> Piece:
        """How an inner part is read; raises `Unproven`."""
        ...


def only(node: Mapping[str, Any], *names: str) -> None:
    """Raise `Unproven` for a part that says more than is understood here."""
    if not _ALWAYS.union(names).issuperset(name for name, value in node.items() if value is not None):
        raise Unproven


def _text(_: Scope, node: Json) -> Piece:
    only(node, *_LENGTHS)
    return Piece(_bounded(str, node, _LENGTHS))


def _number(_: Scope, node: Json) -> Piece:
    only(node, *_BOUNDS)
    kind = int if node["type"] == "int" else float
    if any(type(node[name]) not in (int, kind) for name in _BOUNDS if name in node):
        raise Unproven
    return Piece(_bounded(kind, node, _BOUNDS))


def _plain(_: Scope, node: Json) -> Piece:
    only(node)
    return Piece({"bool": bool, "none": None, "date": date}[node["type"]])


def _decimal(scope: Scope, node: Json) -> Piece:
    only(node, *_BOUNDS)
    made, checks = scope.name(None, "x"), list[str]()
    for name, sign in _BOUNDS.items():
        if name in node:
            if type(node[name]) not in (int, Decimal):
                raise Unproven
            checks.append(f" and {made} {sign} {scope.name(node[name], 'bound')}")
    fits = "".join(checks)
    return _read(str, lambda value: f"({made} if ({made} := decimal({value})) is not None{fits} else fail())")


def _datetime(scope: Scope, node: Json) -> Piece:
    """Only as it is written here: pydantic and Python each take other forms, and not the same."""
    only(node, "microseconds_precision")
    made = scope.name(None, "x")
    found = f"moment({made}).replace(tzinfo=UTC)"
    return _read(str, lambda value: f"({found} if is_moment({made} := {value}) else fail())")


def _uuid(scope: Scope, node: Json) -> Piece:
    """msgspec takes one without hyphens, too, and no other form than these two."""
    only(node)
    made = scope.name(None, "x")
    return _read(str, lambda value: f"(convert({made}, UUID) if len({made} := {value}) == 36 else fail())")


def _bytes(_: Scope, node: Json) -> Piece:
    only(node)
    return _read(str, lambda value: f"from_base64({value})")


def _choice(scope: Scope, node: Json) -> Piece:
    """A member of an enum by its value, or a literal text."""
    if node["type"] == "enum":
        only(node, "cls", "members", "sub_type")
        if issubclass(node["cls"], Flag):
            raise Unproven
        table = {one.value: one for one in node["members"]}
    else:
        only(node, "expected")
        table = {one: one for one in node["expected"]}
    kinds: set[Any] = {type(value) for value in table}
    if kinds != {str} and (kinds != {int} or node["type"] == "literal"):
        raise Unproven
    named = scope.name(table, "table")
    return _read(kinds.pop(), lambda value: f"{named}[{value}]")


def _nullable(scope: Scope, node: Json) -> Piece:
    only(node, "schema")
    inner = scope.part(node["schema"])
    kind = Optional[inner.kind]  # noqa: UP045 - `None | None` is no type
    if inner.expression is None:
        return Piece(kind)
    made = scope.name(None, "x")
    some = inner.expression(made)
    return _read(kind, lambda value: f"(None if ({made} := {value}) is None else {some})")


def _items(scope: Scope, node: Json) -> Piece:
    """A list, a tuple, a set or a frozenset of one kind of items; or a tuple of fields."""
    name = node["type"]
    only(node, "items_schema", "variadic_item_index", *(() if "set" in name else _LENGTHS))
    items = node["items_schema"]
    if name == "tuple":
        if node.get("variadic_item_index") != 0 or len(items) != 1:
            return _row(scope, node)
        items = items[0]
    one = scope.part(items)
    if one.expression is None:
        kinds: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return Piece(_bounded(tuple[one.kind, ...] if name == "tuple" else kinds[name][one.kind], node, _LENGTHS))
    each = scope.name(None, "each")
    item, made = one.expression(each), "" if name == "list" else name
    # A set is not read as one: what is equal before it is converted need not be what is equal after.
    kind: Any = list[one.kind]
    return _read(_bounded(kind, node, _LENGTHS), lambda value: f"{made}([{item} for {each} in {value}])")


def _row(scope: Scope, node: Json) -> Piece:
    only(node, "items_schema")
    parts = [scope.part(each) for each in node["items_schema"]]
    if not parts:
        raise Unproven
    kind = cast("Any", tuple).__class_getitem__(tuple(each.kind for each in parts))
    if not any(each.expression for each in parts):
        return Piece(kind)
    made = scope.name(None, "x")
    fields = [f"{made}[{index}]" for index in range(len(parts))]
    row = ", ".join(
        each.expression(field) if each.expression else field for each, field in zip(parts, fields, strict=True)
    )
    return _read(kind, lambda value: f"(({made} := {value}) and ({row},))")


def _mapping(scope: Scope, node: Json) -> Piece:
    only(node, "keys_schema", "values_schema")
    value = scope.part(node["values_schema"])
    # Of values under one key msgspec keeps the last; pydantic looks at all of them.
    if value.expression is not None or scope.part(node["keys_schema"]) != Piece(str):
        raise Unproven
    kind: Any = dict[str, value.kind]
    return Piece(kind)


def _read(kind: Any, expression: Expression) -> Piece:
    return Piece(kind, expression)


def _bounded(kind: Any, node: Json, names: Iterable[str]) -> Any:
    told = {name: node[name] for name in names if node.get(name) is not None}
    return Annotated[kind, msgspec.Meta(**told)] if told else kind


def _fail() -> NoReturn:
    raise ValueError("pydantic says why")


PARTS: Mapping[str, Callable[[Scope, Json], Piece]] = {
    "str": _text,
    "int": _number,
    "float": _number,
    "bool": _plain,
    "none": _plain,
    "date": _plain,
    "uuid": _uuid,
    "decimal": _decimal,
    "datetime": _datetime,
    "bytes": _bytes,
    "enum": _choice,
    "literal": _choice,
    "nullable": _nullable,
    "list": _items,
    "tuple": _items,
    "set": _items,
    "frozenset": _items,
    "dict": _mapping,
}
"""By the type of a core schema; classes apart."""

KNOWN: Mapping[str, Any] = {
    "fail": _fail,
    "decimal": decimal,
    "is_moment": _MOMENT.fullmatch,
    "moment": datetime.fromisoformat,
    "UTC": UTC,
    "UUID": UUID,
    "convert": msgspec.convert,
}
"""What the expressions name, with `from_base64`."""
