"""Compare two JSON Schemas field by field: which bodies written in one shape are misread in the other?

The comparison knows the keywords that `codec/shape.py` uses. A difference that it cannot judge counts as refused, since
nobody can rely on a reader that may refuse an event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import IntEnum
from typing import Any, NamedTuple, cast

from eventjet.codec.leaves import LARGE_TEXT, LEAVES, leaf_of
from eventjet.codec.shape import DEFAULT, LIMITS, MEMBERS, ORDER, UNKNOWN, VALIDATOR, Json

_SAYS_NOTHING = {
    "$defs",
    "$schema",
    "$id",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    DEFAULT,
    MEMBERS,
    ORDER,
}
_STRUCTURE = {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems"}
_LOWER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "gt", "ge", "min_length"}
_UPPER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "lt", "le"} | {
    "max_length",
    "max_digits",
    "decimal_places",
}
_ELSEWHERE = _SAYS_NOTHING | _STRUCTURE | _LOWER | _UPPER | {LIMITS, UNKNOWN, "uniqueItems"}
_SHOWN_MAX = 60
_DEPTH_MAX = 30


class Weight(IntEnum):
    """The effect of a difference on a body that is written in one shape and read in the other."""

    IGNORED = 0
    """The body is read as before, and some of its data is ignored."""
    UNSURE = 1
    """The body is read as before, and what it means may have changed in the code."""
    OTHERWISE = 2
    """The body is read with another meaning."""
    REFUSED = 3
    """The body may be refused."""


class Misfit(NamedTuple):
    """A difference between two shapes at one path."""

    path: str
    weight: Weight
    reason: str
    """The rest of a sentence that begins with the path."""


@dataclass(slots=True)
class Comparison:
    """The comparison of the shape in which bodies are written with the shape in which they are read."""

    writer: Json
    reader: Json
    always: bool
    """Whether every body has the fields with a default: true for bodies of one release, not of all releases before."""
    _compared_pairs: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def misfits(self) -> list[Misfit]:
        """Return the differences without duplicates, in the order of the fields."""
        misfits: dict[tuple[str, Weight, str], Misfit] = {}
        for misfit in self._fits(self.writer, self.reader, ""):
            # An integer is a number or, when large, text: report only once that the reader does not take it.
            misfits.setdefault((misfit.path, misfit.weight, misfit.reason.partition(", and was ")[0]), misfit)
        return list(misfits.values())

    def _fits(self, writer: Any, reader: Any, path: str) -> Iterator[Misfit]:
        if writer == reader and self.writer.get("$defs") == self.reader.get("$defs"):
            return
        pair = (_reference(writer), _reference(reader))
        if all(pair):
            if pair in self._compared_pairs:
                return
            self._compared_pairs.add(pair)
        readers = list(alternatives(reader, self.reader))
        for written in alternatives(writer, self.writer, spread=True):
            misfits_by_reader = [list(self._branch(written, read, path)) for read in readers]
            if not misfits_by_reader:
                yield Misfit(path, Weight.REFUSED, "takes nothing any more")
            elif all(misfits_by_reader):
                yield from min(misfits_by_reader, key=_badness)

    def _branch(self, writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
        """Yield the differences of one alternative of the writer and one alternative of the reader."""
        if path.count(".") + path.count("[") > _DEPTH_MAX:
            yield Misfit(path, Weight.REFUSED, "is nested too deeply to be compared")
            return
        if UNKNOWN in reader and reader.get(UNKNOWN) != writer.get(UNKNOWN):
            yield Misfit(path, Weight.REFUSED, f"is read by {reader[UNKNOWN]}, so what it accepts is unknown")
            return
        if "const" in writer:
            yield from _value_fits(writer["const"], reader, path)
            yield from _member_fits(writer, reader, path)
            return
        if "enum" in reader:
            yield Misfit(path, Weight.REFUSED, f"takes only {_values_text(reader['enum'])}, and was {kind_of(writer)}")
            return
        types = writer.get("type"), reader.get("type")
        if types[1] is not None and types[0] != types[1] and types != ("integer", "number"):
            yield Misfit(path, Weight.REFUSED, f"takes {kind_of(reader)}, and was {kind_of(writer)}")
            return
        if types[0] == types[1] == "object":
            yield from self._object(writer, reader, path)
        elif types[0] == types[1] == "array":
            yield from self._array(writer, reader, path)
        yield from _constraints(writer, reader, path)

    def _object(self, writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
        theirs, ours = (cast("dict[str, Any]", schema.get("properties") or {}) for schema in (writer, reader))
        additional = reader.get("additionalProperties", True)
        added = [name for name in ours if name not in theirs]
        for name, value in theirs.items():
            where = _under(path, name)
            if name in ours:
                yield from self._fits(value, ours[name], where)
                yield from self._presence(name, writer, reader, where)
            elif additional is False:
                yield Misfit(where, Weight.REFUSED, "is a field that is refused")
            elif isinstance(additional, dict):
                yield from self._fits(value, additional, where)
            elif not self.always:
                yield self._dropped(
                    where, value, [candidate for candidate in added if candidate not in _required(reader)], ours
                )
        for name in added:
            where, needed = _under(path, name), name in _required(reader)
            if isinstance(writer.get("additionalProperties"), dict):
                yield from self._fits(writer["additionalProperties"], ours[name], where)
            if needed:
                yield Misfit(where, Weight.REFUSED, "is required, and is not there")
            elif self.always:
                yield Misfit(where, Weight.OTHERWISE, f"is not there, and is read as {_default_text(ours[name])}")
        yield from _swapped_fields(writer, reader, path)
        keys = writer.get("propertyNames"), reader.get("propertyNames")
        if all(map(_reference, keys)):
            yield from self._fits(*keys, f"{path}{{keys}}")
        values = writer.get("additionalProperties"), reader.get("additionalProperties")
        if isinstance(values[0], dict) and isinstance(values[1], dict):
            yield from self._fits(values[0], values[1], f"{path}{{}}")

    def _dropped(self, where: str, value: Json, candidates: Sequence[str], ours: Mapping[str, Any]) -> Misfit:
        """Return the misfit of a field that is no longer read, which loses its data if the field was renamed."""
        for name in candidates:
            if not any(misfit.weight is Weight.REFUSED for misfit in self._fits(value, ours[name], where)):
                reason = f"is no longer read; if its new name is {name!r}, what it holds is lost"
                return Misfit(where, Weight.OTHERWISE, reason)
        return Misfit(where, Weight.IGNORED, "is no longer read")

    def _presence(self, name: str, writer: Json, reader: Json, where: str) -> Iterator[Misfit]:
        theirs, ours = writer["properties"][name], reader["properties"][name]
        is_always = name in _required(writer) or (self.always and ("default" in theirs or DEFAULT in theirs))
        if is_always:
            return
        if name in _required(reader):
            yield Misfit(where, Weight.REFUSED, "is required, and was not, so it may not be there")
        elif _default(theirs) != _default(ours):
            reason = f"is read as {_default_text(ours)} where it is not there, and was as {_default_text(theirs)}"
            yield Misfit(where, Weight.OTHERWISE, reason)

    def _array(self, writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
        theirs, ours = (cast("list[Any]", schema.get("prefixItems") or []) for schema in (writer, reader))
        for index in range(max(len(theirs), len(ours))):
            written, read = (
                items[index] if index < len(items) else schema.get("items", {})
                for items, schema in ((theirs, writer), (ours, reader))
            )
            yield from self._fits(written, read, f"{path}[{index}]")
        if "items" in reader and "items" in writer:
            yield from self._fits(writer["items"], reader["items"], f"{path}[]")
        if reader.get("uniqueItems") and not writer.get("uniqueItems"):
            yield Misfit(path, Weight.OTHERWISE, "keeps one of several equal items")


def alternatives(node: Any, root: Json, *, spread: bool = False, depth: int = 0) -> Iterator[Json]:
    """Yield the alternatives of a schema, with references and unions resolved; with `spread`, each value of an enum."""
    if not isinstance(node, dict) or depth > _DEPTH_MAX:
        yield {}
        return
    schema = cast("Json", node)
    beside = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "oneOf", "allOf")}
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        target = cast("Json", root.get("$defs", {}).get(name, {}))
        yield from alternatives({**target, **beside}, root, spread=spread, depth=depth + 1)
        return
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in cast("list[Any]", schema.get(key) or []):
            merged = {**cast("Json", branch), **{name: value for name, value in beside.items() if name not in branch}}
            yield from alternatives(merged, root, spread=spread, depth=depth + 1)
    if {"anyOf", "oneOf", "allOf"} & schema.keys():
        return
    if spread and "enum" in schema:
        yield from ({**beside, "const": value} for value in schema["enum"])
    elif isinstance(schema.get("type"), list):
        for kind in cast("list[str]", schema["type"]):
            drop = _NUMERIC if kind == "string" else frozenset({"pattern", "format"})
            yield {**{key: value for key, value in schema.items() if key not in drop}, "type": kind}
    elif "const" in schema and not spread:
        yield {**beside, "enum": [schema["const"]]}
    else:
        yield schema


_NUMERIC = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def _constraints(writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
    yield from _bounds({**writer, **(writer.get(LIMITS) or {})}, {**reader, **(reader.get(LIMITS) or {})}, path)
    if writer.get("contentEncoding") != reader.get("contentEncoding") and "contentEncoding" in writer:
        yield Misfit(path, Weight.OTHERWISE, f"was {kind_of(writer)}, and is read as the text of its base64")
    for word, value in reader.items():
        if word in _ELSEWHERE or writer.get(word) == value:
            continue
        if word == "propertyNames" and _reference(value) and _reference(writer.get(word)):
            continue  # the keys are compared like values
        if word == VALIDATOR:
            yield Misfit(path, Weight.REFUSED, f"is checked by {value}, so what it refuses is unknown")
        elif word == "multipleOf" and writer.get(word) and Decimal(str(writer[word])) % Decimal(str(value)) == 0:
            continue
        else:
            yield Misfit(path, Weight.REFUSED, f"takes {kind_of(reader)}, and was {kind_of(writer)}")


def _bounds(writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
    for word, value in reader.items():
        if word not in _LOWER | _UPPER or writer.get(word) == value:
            continue
        theirs = _number(writer.get(word))
        ours = _number(value)
        if theirs is not None and ours is not None and (theirs >= ours if word in _LOWER else theirs <= ours):
            continue
        previous = "nothing" if writer.get(word) is None else writer[word]
        yield Misfit(path, Weight.REFUSED, f"has the limit {word} {value}, and had {previous}")


def _value_fits(value: Any, reader: Json, path: str) -> Iterator[Misfit]:
    if "enum" in reader:
        if value not in reader["enum"]:
            yield Misfit(path, Weight.REFUSED, f"does not take {_values_text([value])}")
        return
    names = {"str": "string", "bool": "boolean", "int": "integer", "float": "number", "NoneType": "null"}
    kind = names.get(type(value).__name__)
    fits = reader.get("type") in (None, kind) or (reader.get("type"), kind) == ("number", "integer")
    pattern = reader.get("pattern")
    if not fits or (isinstance(value, str) and pattern and not re.search(str(pattern), value)) or "format" in reader:
        yield Misfit(path, Weight.REFUSED, f"takes {kind_of(reader)}, and was {_values_text([value])}")
    else:
        yield from _bounds({}, {**reader, **(reader.get(LIMITS) or {})}, path)


def _member_fits(writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
    """Yield the misfit of a value that was one member of an enum and is another one that had another value."""
    before, now = (cast("Mapping[str, Any]", schema.get(MEMBERS) or {}) for schema in (writer, reader))
    was, is_now = ([name for name, value in names.items() if value == writer["const"]] for names in (before, now))
    if was and is_now and not set(was) & set(is_now) and (set(was) & set(now) or set(is_now) & set(before)):
        reason = f"is {is_now[0]} where it is {writer['const']!r}, which was {was[0]}; give {was[0]} its value back"
        yield Misfit(path, Weight.OTHERWISE, reason)


def _swapped_fields(writer: Json, reader: Json, path: str) -> Iterator[Misfit]:
    """Yield a misfit for each two fields of one type that have changed places: perhaps their names were swapped."""
    orders = [cast("Sequence[str]", schema.get(ORDER) or _required(schema)) for schema in (writer, reader)]
    before, now = ([name for name in order if name in orders[0] and name in orders[1]] for order in orders)
    for name, other in zip(before, now, strict=True):
        if name < other and before.index(other) == now.index(name):
            fields = [
                cast("Json", schema["properties"][field]) for schema in (writer, reader) for field in (name, other)
            ]
            if all({**field, "default": None} == {**fields[0], "default": None} for field in fields):
                reason = (
                    f"and `{other}`, of one type, have changed places: if their names were swapped, each is read as"
                )
                yield Misfit(_under(path, name), Weight.UNSURE, f"{reason} the other")


def kind_of(schema: Any) -> str:
    """Return the words for a schema's type in messages."""
    if not isinstance(schema, dict):
        return "anything"
    node = cast("Json", schema)
    if "$ref" in node:
        return f"a {str(node['$ref']).rpartition('/')[2]}"
    if "const" in node or "enum" in node:
        return _values_text([node["const"]] if "const" in node else node["enum"])
    if "anyOf" in node or "oneOf" in node:
        return " or ".join(kind_of(branch) for branch in node.get("anyOf") or node["oneOf"])
    kind = node.get("type")
    if kind == "string":
        pattern, leaf = str(node.get("pattern", "")), leaf_of(node)
        if pattern.endswith(LARGE_TEXT):
            return "the text of an integer beyond 2^53"
        if leaf is not None:
            return leaf.title
        if pattern:
            return f"text like {pattern[:_SHOWN_MAX]}"
        return f"a {node['format']}" if "format" in node else LEAVES["str"].title
    if isinstance(kind, list):
        return LEAVES["int"].title
    titles = {"object": str(node.get("title") or "an object"), "array": "a list"}
    scalars = {"integer": "int", "number": "float", "boolean": "bool", "null": "none"}
    return LEAVES[scalars[str(kind)]].title if kind in scalars else titles.get(str(kind), "anything")


def _reference(node: Any) -> str:
    return str(cast("Json", node).get("$ref", "")) if isinstance(node, dict) else ""


def _required(schema: Json) -> Sequence[str]:
    return cast("list[str]", schema.get("required") or [])


def _default(schema: Json) -> Any:
    return schema.get("default", ("made by", schema.get(DEFAULT)))


def _default_text(schema: Json) -> str:
    return _values_text([schema["default"]]) if "default" in schema else f"what {schema.get(DEFAULT, 'nothing')} makes"


def _values_text(values: Sequence[Any]) -> str:
    text = ", ".join(map(repr, values[:8])) + (", …" if len(values) > 8 else "")
    return text if len(text) <= _SHOWN_MAX * 2 else f"{text[: _SHOWN_MAX * 2]}…"


def _number(value: Any) -> Decimal | None:
    try:
        return None if value is None else Decimal(str(value))
    except InvalidOperation:
        return None


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _badness(misfits: Sequence[Misfit]) -> tuple[int, int]:
    return max((misfit.weight for misfit in misfits), default=Weight.IGNORED), len(misfits)
