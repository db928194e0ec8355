"""Check unions: the JSON of one member must not be read back as a value of another member. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import combinations, product
from typing import Any, cast

from pydantic_core import SchemaValidator

from eventjet.codec.leaves import LEAVES, SAFE_INTEGER, Node

_APART, _ALIKE, _CONFUSED = range(3)
"""Relations of two parts: they share no JSON; both read shared JSON as the same value; one may misread the other's."""


def union_faults(schema: Any, name: str) -> list[str]:
    """Return the unions of a core schema whose members JSON does not tell apart, in sentences about class `name`."""
    return list(dict.fromkeys(_Unions(schema).faults(schema, name)))


class _Unions:
    def __init__(self, schema: Any) -> None:
        self._definitions: Mapping[str, Node] = {
            definition["ref"]: definition for definition in schema.get("definitions", ())
        }
        self._visited_refs: set[str] = set()
        self._enclosing_pairs: set[tuple[int, int]] = set()
        self._is_lax = False
        """Whether the compared parts are read by a pydantic model, or within one."""

    def faults(self, part: Any, path: str) -> Iterator[str]:
        """Yield the faulty unions of a part of the schema, each as a sentence."""
        if isinstance(part, list):
            for item in cast("list[Any]", part):
                yield from self.faults(_unlabelled(item), path)
        if not isinstance(part, dict) or "type" not in part:
            return
        node = cast("Node", part)
        kind = node["type"]
        if kind == "definition-ref" and node["schema_ref"] not in self._visited_refs:
            self._visited_refs.add(node["schema_ref"])
            yield from self.faults(self._definitions.get(node["schema_ref"]), path)
        elif kind in _CLASSES:
            for name, field in _fields(node).items():
                yield from self.faults(field["schema"], f"{path}.{name}")
        elif kind in ("union", "nullable"):
            members = list(map(_unlabelled, node.get("choices") or ({"type": "none"}, node["schema"])))
            for first, second in combinations(members, 2):
                for left, right in product(self._forms(first), self._forms(second)):
                    if self._of_forms(left, right, is_choice=node.get("mode", "smart") == "smart") == _CONFUSED:
                        yield f"{path} holds {_name(left)} | {_name(right)}, {_REASON}{_int_remedy(left, right)}"
            yield from self.faults(members, path)
        elif kind == "tagged-union":
            yield from self.faults(list(node["choices"].values()), path)
        else:
            for key in _INNER:
                yield from self.faults(node.get(key), path)

    def _forms(self, node: Node) -> list[Node]:
        """Return the alternatives of a part, with unions and references resolved."""
        kind = node["type"]
        if kind == "definition-ref" and node["schema_ref"] in self._definitions:
            return self._forms(self._definitions[node["schema_ref"]])
        if kind in ("default", "function-after", "definitions", "nullable") and "serialization" not in node:
            return [{"type": "none"}] * (kind == "nullable") + self._forms(node["schema"])
        if kind in ("union", "tagged-union"):
            choices = node["choices"] if kind == "union" else node["choices"].values()
            return [form for choice in choices for form in self._forms(_unlabelled(choice))]
        return [node]

    def _relation(self, left: Node, right: Node) -> int:
        pair = (id(left), id(right))
        if left == right or pair in self._enclosing_pairs:
            return _ALIKE
        self._enclosing_pairs.add(pair)
        try:
            relations = {self._of_inner(*forms) for forms in product(self._forms(left), self._forms(right))}
        finally:
            self._enclosing_pairs.discard(pair)
        if _CONFUSED in relations:
            return _CONFUSED
        return _APART if relations == {_APART} else _ALIKE

    def _of_inner(self, left: Node, right: Node) -> int:
        # In an item or a field, pydantic reads an integer as a float if it tries the float first.
        if {left["type"], right["type"]} == {"int", "float"}:
            return _CONFUSED
        relation = self._of_forms(left, right)
        is_read = relation == _APART and self._is_lax and (_is_read_laxly(left, right) or _is_read_laxly(right, left))
        return _CONFUSED if is_read else relation

    def _of_forms(self, left: Node, right: Node, *, is_choice: bool = False) -> int:
        if "none" in (left["type"], right["type"]):
            non_null = right if left["type"] == "none" else left
            if non_null["type"] == "enum" and any(member.value is None for member in non_null["members"]):
                return _CONFUSED
            return _APART if _group(non_null) else _ALIKE
        groups = _group(left), _group(right)
        if "" in groups:
            return _CONFUSED
        if groups[0] != groups[1]:
            return _APART
        if groups[0] == "scalar":
            return _of_scalars(left, right)
        if groups[0] == "object":
            return self._of_objects(left, right, is_choice=is_choice)
        if left["type"] != right["type"]:
            return _CONFUSED
        items: Any = left.get("items_schema", _ANY), right.get("items_schema", _ANY)
        if isinstance(items[0], dict):
            return self._relation(items[0], items[1]) or _ALIKE  # both may be empty
        relations = [self._relation(*pair) for pair in zip(*items, strict=False)]
        if "variadic_item_index" in {**left, **right}:
            is_same = len(items[0]) == len(items[1]) == 1 and "variadic_item_index" in left.keys() & right.keys()
            return (relations[0] or _ALIKE) if is_same else _CONFUSED
        return _APART if _APART in relations or len(items[0]) != len(items[1]) else max(relations, default=_ALIKE)

    def _of_objects(self, left: Node, right: Node, *, is_choice: bool) -> int:
        if left["type"] == right["type"] == "dict":
            is_same = left.get("keys_schema") == right.get("keys_schema")
            values = left.get("values_schema", _ANY), right.get("values_schema", _ANY)
            return (self._relation(*values) or _ALIKE) if is_same else _CONFUSED
        if "dict" in (left["type"], right["type"]):
            return _CONFUSED
        is_confused = self._takes(left, right, is_choice) or self._takes(right, left, is_choice)
        return _CONFUSED if is_confused else _APART

    def _takes(self, reader: Node, written: Node, is_choice: bool) -> bool:
        """Return whether an object written by one class may be read as an object of the other."""
        reader_fields, written_fields = _fields(reader), _fields(written)
        required = {name for name, field in reader_fields.items() if _is_required(field)}
        always = {name for name, field in written_fields.items() if field.get("required", True)}
        was_lax, self._is_lax = self._is_lax, self._is_lax or "model" in (reader["type"], written["type"])
        common = reader_fields.keys() & written_fields.keys()
        relations = {
            name: self._relation(reader_fields[name]["schema"], written_fields[name]["schema"]) for name in common
        }
        self._is_lax = was_lax
        if required - written_fields.keys() or any(
            relations[name] == _APART for name in (required | always) & relations.keys()
        ):
            return False
        # Of choices that fit, pydantic takes the one that sets most fields, and counts those of nested objects too.
        is_counted = is_choice and all(
            form["type"] == "none" or _group(form) == "scalar"
            for name in relations
            for form in (*self._forms(reader_fields[name]["schema"]), *self._forms(written_fields[name]["schema"]))
        )
        return not (is_counted and _CONFUSED not in relations.values() and always - reader_fields.keys())


def _of_scalars(left: Node, right: Node) -> int:
    left_constants, right_constants = _constants(left), _constants(right)
    if left_constants is None and right_constants is None:
        kinds = {left["type"], right["type"]}
        if len(kinds) == 1:
            return _ALIKE
        if "int" in kinds and _is_short(left if left["type"] == "int" else right):
            return _APART
        return _CONFUSED if any(kinds <= pair for pair in _CONFUSABLE) else _APART
    if left_constants is not None and right_constants is not None:
        pairs = product(left_constants, right_constants)
        if any(value == other and kind is not other_kind for (kind, value), (other_kind, other) in pairs):
            return _CONFUSED  # pydantic takes 1 for Literal[True]
        common = left_constants.keys() & right_constants.keys()
        if not common:
            return _APART
        return _ALIKE if all(left_constants[key] is right_constants[key] for key in common) else _CONFUSED
    table, kind = (left_constants or {}, right["type"]) if right_constants is None else (right_constants, left["type"])
    if kind in _NUMBERS:
        # pydantic takes any equal number for the constant, so False for 0 and Decimal(1) for True.
        exact = {value for value in table.values() if type(value).__name__ == kind}
        inexact = [value for (_, written), value in table.items() if isinstance(written, int) and value not in exact]
        if any(kind != "bool" or value in (0, 1) for value in inexact):
            return _CONFUSED
    common = [value for (_, written), value in table.items() if _is_read(kind, written)]
    if not common:
        return _APART
    return _ALIKE if all(type(value).__name__ == kind for value in common) else _CONFUSED


def _is_read_laxly(reader: Node, written: Node) -> bool:
    """Return whether a field of a model takes the other's JSON, such as a number as text for a float or a bool."""
    if written["type"] == "decimal":
        return reader["type"] in ("bool", "float")
    if written["type"] != "enum" or reader["type"] not in _LAX:
        return False
    validator = SchemaValidator(cast("Any", reader))
    return any(validator.isinstance_python(member.value) for member in written["members"])


def _is_read(kind: str, written: Any) -> bool:
    """Return whether a scalar type reads the JSON of a constant."""
    if isinstance(written, str):
        return bool(kind in _TEXTS and _TEXTS[kind](written))
    return written is not None and kind in (("bool",) if isinstance(written, bool) else ("int", "float"))


def _constants(node: Node) -> Mapping[tuple[type, Any], Any] | None:
    """Return the values of an enum or a literal, by (type, JSON value); None for other parts."""
    if node["type"] not in ("enum", "literal"):
        return None
    values: list[Any] = node["members"] if node["type"] == "enum" else node["expected"]
    constants = [(constant.value if isinstance(constant, Enum) else constant, constant) for constant in values]
    return {(type(value), value): constant for value, constant in constants}


def _group(node: Node) -> str:
    """Return which JSON a part is written as (scalar, array, object); empty if only application code can tell."""
    kind = node["type"]
    if "serialization" in node or any(node.get(word) for word in _REWRITING):
        return ""
    if (constants := _constants(node)) is not None:
        return "scalar" if all(key[0] in (str, int, bool, type(None)) for key in constants) else ""
    if kind in _CLASSES:
        inner = node.get("schema", node)
        is_plain = inner["type"] in ("dataclass-args", "model-fields", "typed-dict") and not inner.get(
            "computed_fields"
        )
        is_open = "allow" in (inner.get("extra_behavior"), node.get("config", {}).get("extra_fields_behavior"))
        is_complete = all(
            field.get("init", True) and not any(map(field.get, _HIDING)) for field in _fields(node).values()
        )
        return "object" if is_plain and is_complete and not is_open and not node.get("root_model") else ""
    return _GROUPS.get(kind, "")


def _fields(node: Node) -> dict[str, Node]:
    """Return the fields of a dataclass, a model or a TypedDict; empty if their schema is not visible."""
    fields = cast("list[Node] | dict[str, Node]", node.get("schema", node).get("fields") or {})
    return fields if isinstance(fields, dict) else {str(field["name"]): field for field in fields}


def _is_required(field: Node) -> bool:
    return bool(field.get("required", True)) and field["schema"]["type"] != "default"


def _is_short(node: Node) -> bool:
    low: int | None = node.get("ge", node.get("gt"))
    high: int | None = node.get("le", node.get("lt"))
    return low is not None and high is not None and -SAFE_INTEGER <= low <= high <= SAFE_INTEGER


def _unlabelled(choice: Any) -> Any:
    return cast("Any", choice)[0] if isinstance(choice, tuple) else choice


def _name(node: Node) -> str:
    kind = node["type"]
    if kind == "literal":
        return f"Literal[{', '.join(map(repr, node['expected']))}]"
    return str(getattr(node.get("cls"), "__name__", "") or _NAMES.get(kind, kind))


def _int_remedy(left: Node, right: Node) -> str:
    is_long = "int" in (left["type"], right["type"]) and {left["type"], right["type"]} <= {
        "int",
        "str",
        "decimal",
        "bytes",
    }
    return "; or bound the int by Field(ge=-2**53, le=2**53), beyond which it travels as text" if is_long else ""


_REASON = (
    "which JSON or pydantic does not tell apart, so that a value might become one of the other type; "
    "take one of them, or for each a class with a Literal field that says which it is"
)
_ANY: Node = {"type": "any"}
_CLASSES = ("dataclass", "model", "typed-dict")
_INNER = ("schema", "items_schema", "keys_schema", "values_schema", "steps", "strict_schema", "python_schema")
_NAMES = {"decimal": "Decimal", "uuid": "UUID", "none": "None", "any": "Any"}
_REWRITING = ("to_lower", "to_upper", "strip_whitespace", "coerce_numbers_to_str", "missing")
_HIDING = ("init_only", "validation_alias", "serialization_alias", "serialization_exclude")
_TEXTS = {kind: leaf.is_text for kind, leaf in LEAVES.items() if leaf.is_text is not None}
"""Scalars that travel as text, among them integers beyond 2^53, each with its check whether a text may be one."""
_CONFUSABLE = (*({"str", kind} for kind in _TEXTS), {"int", "decimal", "bytes"}, {"bytes", "timedelta"})
"""Sets of types of which some text fits more than one."""
_LAX = ("bool", "float", "enum", "datetime", "time", "timedelta")
"""Types whose values pydantic also makes of constants of another type."""
_NUMBERS = ("bool", "int", "float", "decimal")
_GROUPS = dict.fromkeys((*_TEXTS, "float", "bool"), "scalar") | dict.fromkeys(
    ("list", "tuple", "set", "frozenset"), "array"
)
_GROUPS["dict"] = "object"
