"""Generate sample bodies that fit a JSON Schema, always the same, to test whether such bodies are decoded.

Samples vary one thing at a time: each member of an enum, each branch of a union, both bounds of a number, each optional
field left out. They are not all bodies that fit, so a success is only likely to hold, and only a failure is certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import islice
from typing import Any, cast

from eventjet.codec.leaves import DECIMAL_TEXT, LARGE_TEXT, LEAVES, leaf_of
from eventjet.codec.shape import LIMITS, UNKNOWN, VALIDATOR, Json
from eventjet.contracts.compare import alternatives

BODIES_MAX = 200
_VALUES_MAX = 24
_DEPTH_MAX = 8
_LARGE = ("9007199254740993", "-9007199254740993", "123456789012345678901234567890")
_FORMATS = {
    "uuid4": ("2f1a5a32-5a0c-4f0e-9e3c-0d6a2c1b3e4f",),
    "email": ("ada@example.org",),
    "uri": ("https://example.org/",),
    "path": ("a/b",),
    "ipv4": ("192.0.2.1",),
    "ipv6": ("2001:db8::1",),
}
"""Sample texts of formats that have no leaf type."""


class NoSample(Exception):
    """Raised when no value can be made for a field; the message names the field and the reason."""


class _TooDeep(Exception):
    """Raised when a shape that contains itself is nested too deeply."""


def sample_bodies(body: Json) -> list[Json]:
    """Return sample bodies of a JSON Schema, at most 200; raises `NoSample`."""
    try:
        return list(islice(_objects(body, body, "", 0), BODIES_MAX))
    except (_TooDeep, RecursionError):
        raise NoSample("its fields are nested too deeply") from None


def _values(node: Any, root: Json, path: str, depth: int) -> list[Any]:
    """Return some values that fit a schema, the plainest first."""
    if depth > _DEPTH_MAX:
        raise _TooDeep
    values: list[Any] = []
    is_deep = False
    branches = list(alternatives(node, root))
    share = max(2, _VALUES_MAX // max(1, len(branches)))
    for branch in branches:
        try:
            values += islice(_of_branch(branch, root, path, depth), share)
        except _TooDeep:
            is_deep = True
    if not values and is_deep:
        raise _TooDeep
    if not values:
        raise NoSample(f"no value could be made for `{path}`")
    return values


def _of_branch(node: Json, root: Json, path: str, depth: int) -> Iterable[Any]:
    for word in (VALIDATOR, UNKNOWN):
        if word in node:
            raise NoSample(f"`{path or 'it'}` is checked by {node[word]}, which is not known to the export")
    if "enum" in node:
        return cast("list[Any]", node["enum"])
    match node.get("type"):
        case "object":
            return _objects(node, root, path, depth)
        case "array":
            return _arrays(node, root, path, depth)
        case "string":
            return _texts(node, path)
        case "integer" | "number" as kind:
            return [number for number in _numbers(node, is_integer=kind == "integer") if _is_within(number, node)]
        case "boolean":
            return LEAVES["bool"].samples
        case "null":
            return LEAVES["none"].samples
        case _:
            return ["anything", 1, None]


def _objects(node: Json, root: Json, path: str, depth: int) -> Iterator[Json]:
    """Yield an object of plain values, then variants with another value of one field, or without an optional field."""
    required = cast("list[str]", node.get("required") or [])
    choices: dict[str, list[Any]] = {}
    for name, value in cast("dict[str, Any]", node.get("properties") or {}).items():
        try:
            choices[name] = _values(value, root, f"{path}.{name}" if path else name, depth + 1)
        except _TooDeep:
            if name in required:
                raise
    additional = node.get("additionalProperties")
    extra = _entries(node, additional, root, path, depth) if isinstance(additional, dict) and not choices else {}
    plain = {name: values[0] for name, values in choices.items()} | extra
    yield plain
    for name, values in choices.items():
        yield from ({**plain, name: value} for value in values[1:])
        if name not in required:
            yield {key: value for key, value in plain.items() if key != name}
    if extra:
        yield {}


def _entries(node: Json, values: Any, root: Json, path: str, depth: int) -> Json:
    names = cast("Json", node.get("propertyNames") or {})
    pattern = str(names.get("pattern", ""))
    keys = {DECIMAL_TEXT: "1.5", LEAVES["bool"].key_pattern: "true"}.get(pattern, "1") if pattern else "key"
    if "format" in names or "$ref" in names:
        keys = str(_values({"type": "string", **names}, root, path, depth + 1)[0])
    return {keys: _values(values, root, f"{path}{{}}", depth + 1)[0]}


def _arrays(node: Json, root: Json, path: str, depth: int) -> Iterator[list[Any]]:
    first = [
        _values(schema, root, f"{path}[{index}]", depth + 1)[0]
        for index, schema in enumerate(node.get("prefixItems") or [])
    ]
    min_items, max_items = int(node.get("minItems", 0)), node.get("maxItems")
    if "items" not in node:
        yield first
        return
    try:
        items = _values(node["items"], root, f"{path}[]", depth + 1)
    except _TooDeep:
        if min_items:
            raise
        yield []
        return
    is_set = bool(node.get("uniqueItems"))
    if is_set and min_items > len(items):
        raise NoSample(f"`{path}` wants {min_items} different items")
    count = max(1, min_items)
    for item in items:
        yield [item, *items][:count] if is_set else [*first, *[item] * count]
    if not min_items:
        yield first
    if max_items is None or int(max_items) >= len(items):
        yield [*first, *items]


def _texts(node: Json, path: str) -> list[Any]:
    pattern, limits = node.get("pattern"), cast("Json", node.get(LIMITS) or {})
    leaf = leaf_of(node)
    if leaf is not None and leaf.kind == "decimal":
        fitting: list[Any] = [text for text in leaf.samples if _decimal_fits(Decimal(text), limits)]
    elif leaf is not None:
        fitting = [] if limits else list(leaf.samples)
    elif node.get("format") is not None:
        fitting = [] if limits else list(_FORMATS.get(str(node["format"]), ()))
    else:
        min_length, max_length = int(node.get("minLength", 0)), node.get("maxLength")
        texts = [*LEAVES["str"].samples, *(_LARGE if pattern else ())]
        texts = [text.ljust(min_length, "x") for text in texts]
        texts = [text if max_length is None else text[: int(max_length)] for text in texts]
        fitting = list(dict.fromkeys(text for text in texts if not pattern or re.search(str(pattern), text)))
    if not fitting and not str(pattern).endswith(LARGE_TEXT):
        raise NoSample(f"no text could be made for `{path}`")
    return fitting


def _numbers(node: Json, *, is_integer: bool) -> Iterator[Any]:
    step = int(node.get("multipleOf", 1)) or 1
    for word, by in (("minimum", 0), ("exclusiveMinimum", step), ("maximum", 0), ("exclusiveMaximum", -step)):
        if word in node:
            yield node[word] + by
    yield from (number * step for number in LEAVES["int" if is_integer else "float"].samples)


def _is_within(value: Any, node: Json) -> bool:
    if "multipleOf" in node and Decimal(str(value)) % Decimal(str(node["multipleOf"])):
        return False
    return (
        node.get("minimum", value) <= value <= node.get("maximum", value)
        and not ("exclusiveMinimum" in node and value <= node["exclusiveMinimum"])
        and not ("exclusiveMaximum" in node and value >= node["exclusiveMaximum"])
    )


def _decimal_fits(value: Decimal, limits: Json) -> bool:
    bounds = {name: Decimal(str(limit)) for name, limit in limits.items() if name != "now_op"}
    _, digits, exponent = value.as_tuple()
    places = -exponent if isinstance(exponent, int) and exponent < 0 else 0
    significant = len(digits) + max(0, int(exponent))
    return (
        bounds.get("ge", value) <= value <= bounds.get("le", value)
        and not ("gt" in bounds and value <= bounds["gt"])
        and not ("lt" in bounds and value >= bounds["lt"])
        and places <= bounds.get("decimal_places", places)
        and max(significant, places) <= bounds.get("max_digits", max(significant, places))
        and not ("multiple_of" in bounds and value % bounds["multiple_of"])
    )
