"""Generate the JSON Schema (2020-12) of a body on the wire, as `codec/bodies.py` writes and reads it. PURE.

The schema is generated from the same core schema as the codec, with the same leaves in another form. What JSON Schema
cannot express has names that begin with `x-`: `x-limits` (bounds of values that travel as text), `x-default` (the
factory of an omitted value), `x-validator` (application code that may refuse more), `x-unknown` (application code that
alone decides what fits), `x-members` (the values of an enum by the names of its members), `x-order` (the fields in the
order of their declaration, which sorted files lose).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema, to_jsonable_python

from eventjet.codec.aliases import with_written_names
from eventjet.codec.bodies import reading_schema
from eventjet.codec.json import dump_json
from eventjet.codec.leaves import LEAVES, SAFE_INTEGER, datetime_to_json
from eventjet.domain.aggregate import is_event

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIMITS, DEFAULT, VALIDATOR, UNKNOWN = "x-limits", "x-default", "x-validator", "x-unknown"
MEMBERS, ORDER = "x-members", "x-order"

_LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "max_digits", "decimal_places", "min_length", "max_length", "now_op")
Json = dict[str, Any]


def shape_of(cls: Any, core: core_schema.CoreSchema | None = None) -> Json:
    """Return the JSON Schema of a class's body: of an event, or of another class with a given core schema."""
    shape = _Shapes(by_alias=True).generate(with_written_names(reading_schema(cls, core)), mode="validation")
    for node in (shape, *shape.get("$defs", {}).values()):
        if len(node.get("properties", ())) > 1:
            node[ORDER] = list(node["properties"])
    return _without_docs_of(shape, cls)


def without_docs(shape: Any) -> Any:
    """Return a JSON Schema without titles and descriptions, which change no value."""
    if isinstance(shape, list):
        return list(map(without_docs, cast("list[Any]", shape)))
    if not isinstance(shape, dict):
        return shape
    # A field may have one of these names; then the value is its schema.
    pairs = cast("Json", shape).items()
    return {
        name: value if name == "default" else without_docs(value)
        for name, value in pairs
        if name not in ("title", "description") or not isinstance(value, str)
    }


def wire_value(value: Any) -> Any:
    """Return a value as JSON data in the profile of `codec/bodies.py`."""
    if isinstance(value, Enum):
        return wire_value(value.value)
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        return value if -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)
    if isinstance(value, datetime):
        return datetime_to_json(value) if value.tzinfo else value.isoformat()
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {str(wire_value(key)): wire_value(item) for key, item in mapping.items()}
    if isinstance(value, Set):
        return sorted(map(wire_value, cast("Set[Any]", value)), key=dump_json)
    if isinstance(value, list | tuple):
        return [wire_value(item) for item in cast("Sequence[Any]", value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: wire_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return b64encode(value).decode()  # pydantic's own base64 is that of URLs
    return to_jsonable_python(value)


class _Shapes(GenerateJsonSchema):
    schema_dialect = DIALECT

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic passes it
        return False

    def enum_schema(self, schema: core_schema.EnumSchema) -> Json:
        members = cast("Mapping[str, Enum]", schema["cls"].__members__)
        return {**super().enum_schema(schema), MEMBERS: {name: wire_value(member) for name, member in members.items()}}

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> Json:
        shape = _leaf(schema)
        if schema.get("allow_inf_nan"):
            del shape["pattern"]
        return shape

    def int_schema(self, schema: core_schema.IntSchema) -> Json:
        shape = super().int_schema(schema)
        low, high = (_bound(schema, *names) for names in (("ge", "gt"), ("le", "lt")))
        is_high = high is None or high > SAFE_INTEGER
        is_low = low is None or low < -SAFE_INTEGER
        if not (is_high or is_low):
            return shape
        sign = ("-?" if is_high else "-") if is_low else ""
        return {**shape, "type": ["integer", "string"], "pattern": f"^{sign}[1-9][0-9]{{15,}}$"}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> Json:
        return _leaf(schema)

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> Json:
        return _leaf(schema)

    def date_schema(self, schema: core_schema.DateSchema) -> Json:
        return _leaf(schema)

    def time_schema(self, schema: core_schema.TimeSchema) -> Json:
        return _leaf(schema)

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> Json:
        return _leaf(schema)

    def dict_schema(self, schema: core_schema.DictSchema) -> Json:
        leaf = LEAVES.get(str(schema.get("keys_schema", {}).get("type")))
        if leaf is None or not leaf.key_pattern:
            return super().dict_schema(schema)
        text = core_schema.str_schema()
        return {**super().dict_schema({**schema, "keys_schema": text}), "propertyNames": {"pattern": leaf.key_pattern}}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> Json:
        shape = super().tagged_union_schema(schema)
        shape.pop("discriminator", None)  # a word of OpenAPI, which adds nothing to the branches
        return shape

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Json:
        shape = super().default_schema(schema)
        factory = schema.get("default_factory")
        if factory is None or "default" in shape:
            return shape
        if factory in (list, tuple, set, frozenset, dict):
            return {**shape, "default": wire_value(cast("Any", factory)())}
        return {**shape, DEFAULT: _name_of(factory)}

    def encode_default(self, dft: Any) -> Any:
        return wire_value(dft)

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> Json:
        return {**super().function_after_schema(schema), VALIDATOR: _name_of(schema["function"]["function"])}

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> Json:
        return {**super().function_before_schema(schema), VALIDATOR: _name_of(schema["function"]["function"])}

    def function_wrap_schema(self, schema: core_schema.WrapValidatorFunctionSchema) -> Json:
        return {**super().function_wrap_schema(schema), VALIDATOR: _name_of(schema["function"]["function"])}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Json:
        shape = super().dataclass_schema(schema)
        if is_event(schema["cls"]):
            shape.pop("additionalProperties", None)  # only the constructor refuses them, readers ignore them
        return shape

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Json:  # noqa: ARG002 - with an address in it
        function = cast("Json", schema.get("function") or {}).get("function")
        return {UNKNOWN: str(schema.get("type")) if function is None else _name_of(function)}


def _leaf(schema: Any) -> Json:
    """Return the JSON Schema of a leaf that travels as text, with its bounds in the same form as its values."""
    options = cast("Mapping[str, Any]", schema)
    limits = {name: _limit(options[name]) for name in _LIMITS if options.get(name) is not None}
    return {**LEAVES[options["type"]].schema, **({LIMITS: limits} if limits else {})}


def _limit(value: Any) -> Any:
    return str(value) if isinstance(value, Decimal) else wire_value(value)


def _bound(schema: Any, *names: str) -> int | None:
    options = cast("Mapping[str, Any]", schema)
    return next((int(options[name]) for name in names if options.get(name) is not None), None)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _without_docs_of(schema: Json, cls: Any) -> Json:
    """Remove the description that Python generated for a dataclass, since it says nothing."""
    description = schema.get("description")
    if isinstance(description, str) and description.startswith(f"{getattr(cls, '__name__', '')}("):
        del schema["description"]
    return schema
