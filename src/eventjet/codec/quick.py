"""Bodies in the form they were written in, read without pydantic: msgspec checks the shape, written-out code the rest.

One law: what is read here, pydantic reads as an equal object of the same types. So this is made only of parts of a core
schema whose every word is known here, takes only JSON in which nothing is left over, and leaves everything else to
pydantic, errors above all. PURE.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Flag
from types import MemberDescriptorType
from typing import Annotated, Any, NamedTuple, NoReturn, Optional, TypeAlias, cast
from uuid import UUID

import msgspec
from pydantic_core import TzInfo

Json: TypeAlias = dict[str, Any]
Expression: TypeAlias = Callable[[str], str]
"""The source of a value → the source of what it is read as."""

RESTS = 15
"""Bodies that pydantic alone reads after one that only it could: a whole log may be of an older form."""

_NAMES_MAX = 5_000
"""Of parts in one decoder: classes that hold classes may come to many."""

_ALWAYS = frozenset({"type", "metadata", "ref", "serialization"})
_BOUNDS = ("gt", "ge", "lt", "le")
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LENGTHS = ("min_length", "max_length")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{6})?Z", re.ASCII)
_UTC = TzInfo(0)
"""The zone that pydantic gives to a time in UTC."""
_PLAIN = (str, int, float, bool, type(None))


class Unproven(Exception):  # noqa: N818 - no fault: pydantic reads it
    """A part of a schema that only pydantic reads."""


def quick_decoder(schema: Any, read: Callable[[bytes], Any], from_base64: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """What reads bodies of a class as `read` does, which is `read` itself where nothing quicker is proven.

    `schema` is pydantic's own of the class, before the wire's leaves are put in.
    """
    try:
        return _Writing(read, from_base64).decoder(schema)
    except (Unproven, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return read


class _Part(NamedTuple):
    """How one part of a body is read."""

    kind: Any
    """As msgspec checks it."""
    expression: Expression | None = None
    """What is made of it; None for a value that stays as it is."""


class _Writing:
    """One decoder in the making: the source of its functions, and the objects that they name."""

    def __init__(self, read: Callable[[bytes], Any], from_base64: Callable[[Any], Any]) -> None:
        self._read = read
        self._lines: list[str] = []
        self._known: Json = {
            "read": read,
            "from_base64": from_base64,
            "fail": _fail,
            "Decimal": Decimal,
            "is_moment": _MOMENT.fullmatch,
            "moment": datetime.fromisoformat,
            "UTC": _UTC,
            "UNSET": msgspec.UNSET,
            "new": object.__new__,
            "rest": 0,
            "RESTS": RESTS,
        }
        self._definitions: Json = {}
        self._classes: dict[str, _Part | None] = {}
        """By their references; None while one is being made."""
        self._count = 0

    def decoder(self, schema: Any) -> Callable[[bytes], Any]:
        node = cast("Json", schema)
        if node["type"] == "definitions":
            self._definitions = {each["ref"]: each for each in node["definitions"]}
            node = cast("Json", node["schema"])
        kind, make = self._part(node)
        if make is None or self._resolved(node)["type"] != "dataclass":
            raise Unproven
        self._known["parse"] = msgspec.json.Decoder(kind).decode
        # A global of its own: threads may read it at once, and what they make of it is a matter of speed alone.
        self._lines += (
            "def decode(body):",
            " global rest",
            " if rest > 0:",
            "  rest -= 1",
            "  return read(body)",
            " try:",
            f"  return {make('parse(body)')}",
            " except Exception:",
            "  found = read(body)",
            "  rest = RESTS",
            "  return found",
        )
        exec("\n".join(self._lines), self._known)  # noqa: S102 - of names of fields, which are identifiers
        return self._known["decode"]

    def _name(self, value: Any, stem: str) -> str:
        self._count += 1
        if self._count > _NAMES_MAX:
            raise Unproven
        name = f"{stem}{self._count}"
        self._known[name] = value
        return name

    def _resolved(self, node: Json) -> Json:
        while node["type"] == "definition-ref":
            _only(node, "schema_ref")
            node = self._definitions[node["schema_ref"]]
        return node

    def _part(self, given: Json) -> _Part:
        node = self._resolved(given)
        made = _PARTS.get(node["type"])
        if made is None:
            raise Unproven
        ref = node.get("ref") if node["type"] == "dataclass" else None
        if ref is None:
            return made(self, node)
        if ref not in self._classes:
            self._classes[ref] = None
            self._classes[ref] = made(self, node)
        part = self._classes[ref]
        if part is None:
            raise Unproven  # it holds itself
        return part

    def _text(self, node: Json) -> _Part:
        _only(node, *_LENGTHS)
        return _Part(_bounded(str, node, _LENGTHS))

    def _number(self, node: Json) -> _Part:
        _only(node, *_BOUNDS)
        kind = int if node["type"] == "int" else float
        if any(type(node[name]) not in (int, kind) for name in _BOUNDS if name in node):
            raise Unproven
        return _Part(_bounded(kind, node, _BOUNDS))

    def _plain(self, node: Json) -> _Part:
        _only(node)
        return _Part({"bool": bool, "none": None, "date": date, "uuid": UUID}[node["type"]])

    def _decimal(self, node: Json) -> _Part:
        _only(node, *_BOUNDS)
        made = self._name(None, "x")
        checks: list[str] = []
        for name in _BOUNDS:
            if name in node:
                if type(node[name]) not in (int, Decimal):
                    raise Unproven
                checks.append(f" and {made} {_SIGNS[name]} {self._name(node[name], 'bound')}")
        fits = "".join(checks)
        return _Part(str, lambda value: f"({made} if ({made} := Decimal({value})).is_finite(){fits} else fail())")

    def _datetime(self, node: Json) -> _Part:
        _only(node, "microseconds_precision")
        made = self._name(None, "x")
        read = f"moment({made}).replace(tzinfo=UTC)"
        return _Part(str, lambda value: f"({read} if is_moment({made} := {value}) else fail())")

    def _bytes(self, node: Json) -> _Part:
        _only(node)
        return _Part(str, lambda value: f"from_base64({value})")

    def _choice(self, node: Json) -> _Part:
        """A member of an enum by its value, or a literal text."""
        if node["type"] == "enum":
            _only(node, "cls", "members", "sub_type")
            if issubclass(node["cls"], Flag):
                raise Unproven
            table = {one.value: one for one in node["members"]}
        else:
            _only(node, "expected")
            table = {one: one for one in node["expected"]}
        kinds = {type(value) for value in table}
        if kinds not in ({str}, {int}) or (kinds == {int} and node["type"] == "literal"):
            raise Unproven
        named = self._name(table, "table")
        return _Part(kinds.pop(), lambda value: f"{named}[{value}]")

    def _nullable(self, node: Json) -> _Part:
        _only(node, "schema")
        inner = self._part(node["schema"])
        if inner.expression is None:
            return _Part(Optional[inner.kind])  # noqa: UP045 - of a kind known only now
        made = self._name(None, "x")
        some = inner.expression(made)
        kind = Optional[inner.kind]  # noqa: UP045
        return _Part(kind, lambda value: f"(None if ({made} := {value}) is None else {some})")

    def _items(self, node: Json) -> _Part:
        """A list, a tuple, a set or a frozenset of one kind of items; or a tuple of fields."""
        name = node["type"]
        found: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name]
        _only(node, "items_schema", "variadic_item_index", *(() if "set" in name else _LENGTHS))
        items = node["items_schema"]
        if name != "tuple":
            one = self._part(items)
            kind = found[one.kind]
        elif node.get("variadic_item_index") == 0 and len(items) == 1:
            one = self._part(items[0])
            kind = tuple[one.kind, ...]
        else:
            return self._row(node)
        if one.expression is None:
            return _Part(_bounded(kind, node, _LENGTHS))
        each = self._name(None, "each")
        item, made = one.expression(each), "" if name == "list" else name
        # Not read as a set: what is equal before it is converted need not be what is equal after.
        kind = _bounded(list[one.kind], node, _LENGTHS)
        return _Part(kind, lambda value: f"{made}([{item} for {each} in {value}])")

    def _row(self, node: Json) -> _Part:
        _only(node, "items_schema")
        parts = [self._part(each) for each in node["items_schema"]]
        if not parts:
            raise Unproven
        kind = tuple.__class_getitem__(tuple(each.kind for each in parts))
        if not any(each.expression for each in parts):
            return _Part(kind)
        made = self._name(None, "x")
        items = [
            each.expression(f"{made}[{index}]") if each.expression else f"{made}[{index}]"
            for index, each in enumerate(parts)
        ]
        row = ", ".join(items)
        return _Part(kind, lambda value: f"(({made} := {value}) and ({row},))")

    def _mapping(self, node: Json) -> _Part:
        _only(node, "keys_schema", "values_schema")
        value = self._part(node["values_schema"])
        # Of values under one key msgspec keeps the last; pydantic looks at all of them.
        if value.expression is not None or self._part(node["keys_schema"]) != _Part(str):
            raise Unproven
        return _Part(dict[str, value.kind])

    def _dataclass(self, node: Json) -> _Part:
        cls = _checked_class(node)
        told = cast("list[Json]", node["schema"]["fields"])
        names = [str(one["name"]) for one in told]
        fields: list[Any] = []
        values: list[str] = []
        for index, one in enumerate(told):
            _only(one, "name", "schema", "kw_only", "init", "init_only", "frozen")
            if not one.get("init", True) or one.get("init_only"):
                raise Unproven
            field, value = self._field(f"f{index}", cast("Json", one["schema"]))
            fields.append(field)
            values.append(value)
        kind = msgspec.defstruct(
            cls.__name__,
            fields,
            rename={f"f{index}": name for index, name in enumerate(names)},
            kw_only=True,
            forbid_unknown_fields=True,
            gc=False,
        )
        make = self._maker(cls, names, values)
        return _Part(kind, lambda value: f"{make}({value})")

    def _field(self, name: str, node: Json) -> tuple[tuple[Any, ...], str]:
        """Of one field what msgspec is told, and the source of its value."""
        if node["type"] != "default":
            part = self._part(node)
            return (name, part.kind), part.expression(f"got.{name}") if part.expression else f"got.{name}"
        _only(node, "schema", "default", "default_factory", "default_factory_takes_data")
        part = self._part(node["schema"])
        if "default_factory" in node:
            if node.get("default_factory_takes_data"):
                raise Unproven
            absent = f"{self._name(node['default_factory'], 'factory')}()"
        elif part.expression is None and type(node["default"]) in _PLAIN:
            return (name, part.kind, node["default"]), f"got.{name}"
        else:
            hash(node["default"])  # what has none, pydantic copies
            absent = self._name(node["default"], "default")
        made = self._name(None, "x")
        present = part.expression(made) if part.expression else made
        return (name, part.kind, msgspec.UNSET), f"({absent} if ({made} := got.{name}) is UNSET else {present})"

    def _maker(self, cls: type, names: Iterable[str], values: Iterable[str]) -> str:
        """The name of the function that makes an object of what msgspec read, without the class's constructor."""
        made = self._name(None, "make")
        if cls.__bases__ == (object,):
            # A class of the same layout whose fields can be set, and which then becomes the frozen one.
            twin = self._name(_twin(cls), "twin")
            self._lines += (f"def {made}(got):", f" made = {twin}()")
            self._lines += [f" made.{name} = {value}" for name, value in zip(names, values, strict=True)]
            self._lines += (f" made.__class__ = {self._name(cls, 'cls')}", " return made")
            return made
        self._lines += (f"def {made}(got):", f" made = new({self._name(cls, 'cls')})")
        for name, value in zip(names, values, strict=True):
            self._lines.append(f" {self._name(_setter(cls, name), 'set')}(made, {value})")
        self._lines.append(" return made")
        return made


def _fail() -> NoReturn:
    raise ValueError("pydantic says why")


def _only(node: Mapping[str, Any], *names: str) -> None:
    """Raise `Unproven` for a part that says more than is understood here."""
    if not _ALWAYS.union(names).issuperset(name for name, value in node.items() if value is not None):
        raise Unproven


def _bounded(kind: Any, node: Json, names: Iterable[str]) -> Any:
    told = {name: node[name] for name in names if node.get(name) is not None}
    return Annotated[kind, msgspec.Meta(**told)] if told else kind


def _checked_class(node: Json) -> type:
    """The class of objects that are made field by field and in no other way; raises `Unproven` for others."""
    _only(node, "cls", "schema", "fields", "config", "post_init", "slots", "frozen")
    _only(node.get("config", {}), "title", "strict", "hide_input_in_errors")
    _only(node["schema"], "dataclass_name", "fields", "collect_init_only", "computed_fields")
    cls: Any = node["cls"]
    names: list[str] = node["fields"]
    if (
        node.get("post_init")
        or node["schema"].get("collect_init_only")
        or not node.get("config", {}).get("strict")
        or type(cls) is not type
        or not is_dataclass(cls)
        or cls.__new__ is not object.__new__
        or names != [one["name"] for one in node["schema"]["fields"]]
        or not all(name.isascii() and name.isidentifier() and not keyword.iskeyword(name) for name in names)
    ):
        raise Unproven
    return cast("type", cls)


def _twin(cls: type) -> type:
    told = vars(cls)
    twin = type(cls.__name__, (), {"__slots__": told["__slots__"]} if "__slots__" in told else {})
    twin().__class__ = cls  # raises TypeError where they are not alike
    return twin


def _setter(cls: type, name: str) -> Callable[[Any, Any], None]:
    found = next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)
    if not isinstance(found, MemberDescriptorType):
        raise Unproven
    return found.__set__


_PARTS: Mapping[str, Callable[[_Writing, Json], _Part]] = {
    "str": _Writing._text,
    "int": _Writing._number,
    "float": _Writing._number,
    "bool": _Writing._plain,
    "none": _Writing._plain,
    "date": _Writing._plain,
    "uuid": _Writing._plain,
    "decimal": _Writing._decimal,
    "datetime": _Writing._datetime,
    "bytes": _Writing._bytes,
    "enum": _Writing._choice,
    "literal": _Writing._choice,
    "nullable": _Writing._nullable,
    "list": _Writing._items,
    "tuple": _Writing._items,
    "set": _Writing._items,
    "frozenset": _Writing._items,
    "dict": _Writing._mapping,
    "dataclass": _Writing._dataclass,
}
