"""Bodies in the form they were written in, read without pydantic: msgspec checks the shape, written-out code the rest.

One law: what is read here, pydantic reads as an equal object of the same types. So this is made only of parts of a core
schema whose every word is known (`quick_parts`), takes only JSON in which nothing is left over, and leaves everything
else to pydantic, errors above all. PURE.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from dataclasses import is_dataclass
from types import MemberDescriptorType
from typing import Any, cast

import msgspec

from eventjet.codec.quick_parts import KNOWN, PARTS, Json, Piece, Unproven, only

RESTS = 15
"""Bodies that pydantic alone reads after one that only it could: a whole log may be of an older form."""

_NAMES_MAX = 5_000
"""Of one decoder: classes that hold classes may come to many."""
_PLAIN = (str, int, float, bool, type(None))


def quick_decoder(
    schema: Any, read: Callable[[bytes], Any], from_base64: Callable[[Any], Any]
) -> Callable[[bytes], Any]:
    """What reads bodies of a class as `read` does, which is `read` itself where nothing quicker is proven.

    `schema` is pydantic's own of the class, before the wire's leaves are put in.
    """
    try:
        return _Writing(read, from_base64).decoder(schema)
    except (Unproven, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return read


class _Writing:
    """One decoder in the making: the source of its functions, and the objects that they name."""

    def __init__(self, read: Callable[[bytes], Any], from_base64: Callable[[Any], Any]) -> None:
        self._lines: list[str] = []
        self._known: Json = {
            **KNOWN,
            "from_base64": from_base64,
            "read": read,
            "new": object.__new__,
            "UNSET": msgspec.UNSET,
            "rest": 0,
            "RESTS": RESTS,
        }
        self._definitions: Json = {}
        self._classes: dict[str, Piece | None] = {}
        """By their references; None while one is being made."""
        self._count = 0

    def decoder(self, schema: Json) -> Callable[[bytes], Any]:
        """Raises `Unproven`, and what msgspec raises for a class that it does not take."""
        node = schema
        if node["type"] == "definitions":
            self._definitions = {each["ref"]: each for each in node["definitions"]}
            node = cast("Json", node["schema"])
        node = self._resolved(node)
        if node["type"] != "dataclass":
            raise Unproven
        self._classes[node.get("ref", "")] = None
        kind, statements = self._made(node)
        self._known["parse"] = msgspec.json.Decoder(kind).decode
        # Threads may set `rest` at once: what they make of it is a matter of speed alone.
        self._lines += (
            "def decode(body):",
            " global rest",
            " if rest > 0:",
            "  rest -= 1",
            "  return read(body)",
            " try:",
            "  got = parse(body)",
            *(f"  {line}" for line in statements),
            " except Exception:",
            "  made = read(body)",
            "  rest = RESTS",
            "  return made",
        )
        exec("\n".join(self._lines), self._known)  # noqa: S102 - of names of fields, which are identifiers
        return cast("Callable[[bytes], Any]", self._known["decode"])

    def name(self, value: Any, stem: str) -> str:
        """As `Scope` says."""
        self._count += 1
        if self._count > _NAMES_MAX:
            raise Unproven
        name = f"{stem}{self._count}"
        self._known[name] = value
        return name

    def part(self, node: Json) -> Piece:
        """As `Scope` says."""
        node = self._resolved(node)
        if node["type"] != "dataclass":
            if node["type"] not in PARTS:
                raise Unproven
            return PARTS[node["type"]](self, node)
        ref = node.get("ref")
        if ref is None:
            return self._dataclass(node)
        if ref not in self._classes:
            self._classes[ref] = None
            self._classes[ref] = self._dataclass(node)
        part = self._classes[ref]
        if part is None:
            raise Unproven  # it holds itself
        return part

    def _resolved(self, node: Json) -> Json:
        while node["type"] == "definition-ref":
            only(node, "schema_ref")
            node = self._definitions[node["schema_ref"]]
        return node

    def _dataclass(self, node: Json) -> Piece:
        kind, statements = self._made(node)
        make = self.name(None, "make")
        self._lines += (f"def {make}(got):", *(f" {line}" for line in statements))

        def expression(value: str) -> str:
            return f"{make}({value})"

        return Piece(kind, expression)

    def _made(self, node: Json) -> tuple[Any, list[str]]:
        """What msgspec reads as `got`, and the statements that return an object of it, past the class's constructor."""
        cls = _checked_class(node)
        told = cast("list[Json]", node["schema"]["fields"])
        names = [str(one["name"]) for one in told]
        fields: list[Any] = []
        values: list[str] = []
        for index, one in enumerate(told):
            only(one, "name", "schema", "kw_only", "init", "init_only", "frozen")
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
        if cls.__bases__ == (object,):
            # A class of the same layout whose fields can be set, and which then becomes the frozen one.
            first, last = f"made = {self.name(_twin(cls), 'twin')}()", [f"made.__class__ = {self.name(cls, 'cls')}"]
            each = [f"made.{name} = {value}" for name, value in zip(names, values, strict=True)]
        else:
            first, last = f"made = new({self.name(cls, 'cls')})", list[str]()
            setters = [self.name(_setter(cls, name), "set") for name in names]
            each = [f"{setter}(made, {value})" for setter, value in zip(setters, values, strict=True)]
        return kind, [first, *each, *last, "return made"]

    def _field(self, name: str, node: Json) -> tuple[tuple[Any, ...], str]:
        """Of one field what msgspec is told, and the source of its value."""
        if node["type"] != "default":
            part = self.part(node)
            return (name, part.kind), part.expression(f"got.{name}") if part.expression else f"got.{name}"
        only(node, "schema", "default", "default_factory", "default_factory_takes_data")
        part = self.part(node["schema"])
        if "default_factory" in node:
            if node.get("default_factory_takes_data"):
                raise Unproven
            absent = f"{self.name(node['default_factory'], 'factory')}()"
        elif part.expression is None and type(node["default"]) in _PLAIN:
            return (name, part.kind, node["default"]), f"got.{name}"
        else:
            hash(node["default"])  # what has none, pydantic copies
            absent = self.name(node["default"], "default")
        made = self.name(None, "x")
        present = part.expression(made) if part.expression else made
        return (name, part.kind, msgspec.UNSET), f"({absent} if ({made} := got.{name}) is UNSET else {present})"


def _checked_class(node: Json) -> type:
    """The class of objects that are made field by field and in no other way; raises `Unproven` for others."""
    only(node, "cls", "schema", "fields", "config", "post_init", "slots", "frozen")
    config = node.get("config", {})
    only(config, "title", "strict", "hide_input_in_errors")
    only(node["schema"], "dataclass_name", "fields", "collect_init_only", "computed_fields")
    cls: Any = node["cls"]
    names: list[str] = node["fields"]
    if (
        node.get("post_init")
        or node["schema"].get("collect_init_only")
        or not config.get("strict")
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
    twin: Any = type(cls.__name__, (), {"__slots__": told["__slots__"]} if "__slots__" in told else {})
    twin().__class__ = cls  # raises TypeError where they are not alike
    return twin


def _setter(cls: type, name: str) -> Callable[[Any, Any], None]:
    found = next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)
    if not isinstance(found, MemberDescriptorType):
        raise Unproven
    return found.__set__
