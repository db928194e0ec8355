"""Decode bodies in half of pydantic's time: msgspec checks the shape, and closures convert the values. PURE.

One law: what is decoded here, pydantic decodes to an equal object of the same types. So this module takes only classes
whose core schema has no option unknown here and in `codec.leaves`, and only JSON without unknown fields; all else is
left to pydantic, above all the errors. The measurements are in ADR 0061.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Flag
from typing import Annotated, Any, Optional, TypeAlias, cast

import msgspec

from eventjet.codec.leaves import LEAVES, Node

RESTS = 15
"""Bodies left to pydantic after a body that only pydantic could read, since a whole log may have an older form."""
_PARTS_MAX = 5_000
"""Limit of the parts of one class, since nested classes may multiply."""
_ALWAYS_ALLOWED = frozenset({"type", "metadata", "ref", "serialization"})
_LENGTHS = ("min_length", "max_length")
_PLAIN = (str, int, float, bool, type(None))
_Read: TypeAlias = Callable[[Any], Any]
_Part: TypeAlias = tuple[Any, _Read | None]
"""(the type that msgspec checks; the conversion of what it returns, None for no conversion)."""


class _Unproven(Exception):
    """Raised for a part of a schema that only pydantic can read."""


def struct_decoder(schema: Any, read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a quicker decoder with the same results as `read`; `read` itself if the class is not supported here.

    `schema` is pydantic's core schema of the class, before the leaves of the wire are put in.
    """
    try:
        parts = _Parts(schema)
        root = parts.resolved(schema["schema"] if schema["type"] == "definitions" else schema)
        if root["type"] != "dataclass":
            return read
        kind, make = parts.object(root)
        parse = msgspec.json.Decoder(kind).decode
    except (_Unproven, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return read
    rest = 0

    def decode(body: bytes) -> Any:
        nonlocal rest  # a race of threads affects only the speed
        if rest > 0:
            rest -= 1
            return read(body)
        try:
            return make(parse(body))
        except Exception:  # noqa: BLE001 - pydantic says what is wrong
            decoded = read(body)
            rest = RESTS
            return decoded

    return decode


class _Parts:
    """Builds the decoders of the parts of one class's schema."""

    def __init__(self, schema: Node) -> None:
        self._definitions: Node = {definition["ref"]: definition for definition in schema.get("definitions", ())}
        self._being_built: list[str] = []
        """References of the classes being built."""
        self._count = 0

    def of(self, node: Node) -> _Part:
        """Return how a part is read; raises `_Unproven`, or what msgspec raises for a class that it does not take."""
        self._count += 1
        if self._count > _PARTS_MAX:
            raise _Unproven
        node = self.resolved(node)
        kind = node["type"]
        if kind == "dataclass":
            return self.object(node)
        return _leaf(node) if kind in LEAVES else _CONTAINERS[kind](self, node)

    def resolved(self, node: Node) -> Node:
        """Return the part that a reference names."""
        while node["type"] == "definition-ref":
            _check_options(node, "schema_ref")
            node = self._definitions[node["schema_ref"]]
        return node

    def object(self, node: Node) -> tuple[Any, _Read]:
        """Return a struct of a class's fields, and the function that makes an object of it without the constructor."""
        ref = node.get("ref", "")
        if ref in self._being_built:
            raise _Unproven  # the class contains itself
        self._being_built.append(ref or "…")
        cls = _checked_class(node)
        fields: list[Any] = []
        conversions: list[tuple[str, _Read]] = []
        for declared in node["schema"]["fields"]:
            _check_options(declared, "name", "schema", "kw_only", "init", "init_only", "frozen")
            if not declared.get("init", True) or declared.get("init_only"):
                raise _Unproven
            field, convert = self._field(declared["name"], declared["schema"])
            fields.append(field)
            if convert is not None:
                conversions.append((field[0], convert))
        self._being_built.pop()
        struct = msgspec.defstruct(cls.__name__, fields, kw_only=True, forbid_unknown_fields=True, gc=False)
        return struct, _maker(cls, [field[0] for field in fields], conversions)

    def _field(self, name: str, node: Node) -> tuple[tuple[Any, ...], _Read | None]:
        """Return msgspec's definition of a field, and the conversion of its value."""
        if node["type"] != "default":
            kind, convert = self.of(node)
            return (name, kind), convert
        _check_options(node, "schema", "default", "default_factory", "default_factory_takes_data")
        if node.get("default_factory_takes_data"):
            raise _Unproven
        kind, convert = self.of(node["schema"])
        default, factory = node.get("default"), node.get("default_factory")
        if factory is None and convert is None and type(default) in _PLAIN:
            return (name, kind, default), None
        hash(default)  # raises for an unhashable default, which pydantic would copy

        def convert_or_default(value: Any) -> Any:
            if value is msgspec.UNSET:
                return default if factory is None else factory()
            return value if convert is None else convert(value)

        return (name, kind, msgspec.UNSET), convert_or_default


def _maker(cls: type, names: list[str], conversions: list[tuple[str, _Read]]) -> _Read:
    """Return a function that fills an object of a mutable class with the layout of `cls`, then makes it a `cls`."""
    slots = {"__slots__": vars(cls)["__slots__"]} if "__slots__" in vars(cls) else {}
    open_class: Any = dataclass(type(cls.__name__, (), {**slots, "__annotations__": dict.fromkeys(names, object)}))
    open_class(*names).__class__ = cls  # raises TypeError if the layouts differ
    values_of = msgspec.structs.astuple

    def make(struct: Any) -> Any:
        instance = open_class(*values_of(struct))
        for name, convert in conversions:
            setattr(instance, name, convert(getattr(instance, name)))
        instance.__class__ = cls
        return instance

    return make


def _checked_class(node: Node) -> type:
    """Return the class of a node if setting its fields is all its constructor does; otherwise raise `_Unproven`."""
    _check_options(node, "cls", "schema", "fields", "config", "post_init", "slots", "frozen")
    config = node.get("config", {})
    _check_options(config, "title", "strict", "hide_input_in_errors")
    _check_options(node["schema"], "dataclass_name", "fields", "collect_init_only", "computed_fields")
    cls: Any = node["cls"]
    if (
        node.get("post_init")
        or node["schema"].get("collect_init_only")
        or not config.get("strict")
        or type(cls) is not type
        or not is_dataclass(cls)
        or cls.__new__ is not object.__new__
        or node["fields"] != [field["name"] for field in node["schema"]["fields"]]
    ):
        raise _Unproven
    return cast("type", cls)


def _check_options(node: Mapping[str, Any], *names: str) -> None:
    """Raise `_Unproven` for a part with an option that is not in `names`."""
    if not _ALWAYS_ALLOWED.union(names).issuperset(name for name, value in node.items() if value is not None):
        raise _Unproven


def _bounded(kind: Any, node: Node, names: Iterable[str]) -> Any:
    limits = {name: node[name] for name in names if node.get(name) is not None}
    return Annotated[kind, msgspec.Meta(**limits)] if limits else kind


def _leaf(node: Node) -> _Part:
    leaf = LEAVES[node["type"]]
    _check_options(node, *leaf.words)
    if leaf.struct is ...:
        raise _Unproven
    if leaf.convert is not None:
        return leaf.struct, leaf.convert(node)
    if leaf.struct in (int, float) and any(
        type(node[word]) not in (int, leaf.struct) for word in leaf.words if node.get(word) is not None
    ):
        raise _Unproven
    return _bounded(leaf.struct, node, leaf.words), None


def _choice(_: _Parts, node: Node) -> _Part:
    """Return how a member of an enum is read by its value, or a literal text."""
    if node["type"] == "enum":
        _check_options(node, "cls", "members", "sub_type")
        if issubclass(node["cls"], Flag):
            raise _Unproven
        table = {member.value: member for member in node["members"]}
    else:
        _check_options(node, "expected")
        table = dict(zip(node["expected"], node["expected"], strict=True))
    kinds: set[Any] = {type(value) for value in table}
    if kinds != {str} and (kinds != {int} or node["type"] == "literal"):
        raise _Unproven
    return kinds.pop(), table.__getitem__


def _nullable(parts: _Parts, node: Node) -> _Part:
    _check_options(node, "schema")
    kind, convert = parts.of(node["schema"])
    optional = Optional[kind]  # noqa: UP045 - `None | None` is no type
    if convert is None:
        return optional, None

    def convert_some(value: Any) -> Any:
        return None if value is None else convert(value)

    return optional, convert_some


def _items(parts: _Parts, node: Node) -> _Part:
    """Return how a list, tuple, set or frozenset with items of one type is read."""
    name = node["type"]
    _check_options(node, "items_schema", "variadic_item_index", *(() if "set" in name else _LENGTHS))
    items = node["items_schema"]
    if name == "tuple":
        if node.get("variadic_item_index") != 0 or len(items) != 1:
            raise _Unproven
        items = items[0]
    kind, convert = parts.of(items)
    build: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name]
    if convert is None:
        return _bounded(tuple[kind, ...] if name == "tuple" else build[kind], node, _LENGTHS), None

    def convert_each(values: Iterable[Any]) -> Any:
        return build(map(convert, values))

    # A set is read as a list: items that differ before the conversion may be equal after it.
    return _bounded(cast("Any", list)[kind], node, _LENGTHS), convert_each


def _mapping(parts: _Parts, node: Node) -> _Part:
    _check_options(node, "keys_schema", "values_schema")
    kind, convert = parts.of(node["values_schema"])
    # Of a repeated key msgspec keeps the last value, while pydantic validates all of them.
    if convert is not None or parts.of(node["keys_schema"]) != (str, None):
        raise _Unproven
    return cast("Any", dict)[str, kind], None


_CONTAINERS: Mapping[str, Callable[[_Parts, Node], _Part]] = {
    "enum": _choice,
    "literal": _choice,
    "nullable": _nullable,
    "list": _items,
    "tuple": _items,
    "set": _items,
    "frozenset": _items,
    "dict": _mapping,
}
