"""The JSON profile of an event's body, readable without eventjet.

Decimal as string, datetime as RFC 3339 in UTC, UUID and date as string, bytes as base64, integers beyond 2^53 as
string, NaN and infinities refused, unknown fields ignored on reading. What was encoded is decoded again and compared,
so that an event that cannot be read back is never sent.

pydantic is laxer than a ledger may be (a JSON number becomes a Decimal), so the wire has a validator and a serializer
of its own, built from the class's core schema with the leaves replaced.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, cast

from pydantic_core import PydanticSerializationError, SchemaSerializer, SchemaValidator, ValidationError, core_schema

from eventjet.codec.faults import faults_of
from eventjet.codec.quick import quick_decoder
from eventjet.domain.aggregate import complete, is_event
from eventjet.domain.personal import is_private
from eventjet.errors import UnencodableEvent
from eventjet.shown import cut, shown

SAFE_INTEGER = 2**53
"""Beyond it a JSON number loses digits in many languages (RFC 8259, section 6)."""


class BodyCodec:
    """Encodes and decodes the fields of one class: an event's, or a state's by its own core schema."""

    __slots__ = ("_serializer", "decode", "validate")

    def __init__(self, event_type: type, core: core_schema.CoreSchema | None = None) -> None:
        told = readable(event_type, core)
        schema = _wired(told)
        self.validate: Callable[[bytes], Any] = SchemaValidator(schema, _use_prebuilt=False).validate_json
        """As `decode`, by pydantic alone."""
        self.decode: Callable[[bytes], Any] = quick_decoder(told, self.validate, _bytes_from_json)
        """The object of a body; raises `ValueError` (pydantic's `ValidationError` is one)."""
        self._serializer = SchemaSerializer(schema, _use_prebuilt=False)

    def read_back(self, event: Any) -> tuple[bytes, Any]:
        """The body, and the object read from it; raises `UnencodableEvent` when that is not equal."""
        try:
            body = self._serializer.to_json(event)
            again = self.decode(body)
        except (PydanticSerializationError, ValidationError, UnicodeEncodeError, ValueError, RecursionError) as error:
            raise UnencodableEvent(event, cut(faults_of(error)) or type(error).__name__) from None
        if again != event and not _equal(again, event):
            raise UnencodableEvent(event, f"it would be read back as {_shown(again)}")
        return body, again

    def text(self, value: Any) -> str:
        """A value as JSON in the profile's form, not checked."""
        return self._serializer.to_json(value).decode()


def readable(cls: Any, core: core_schema.CoreSchema | None = None) -> Any:
    """The core schema of a class, its own or the one given, by which unknown fields of events are passed over.

    What makes an event refuses them. A class that is no event, and forbids them itself, goes on to do so.
    """
    if core is None and is_event(cls) and not cls.__pydantic_complete__:
        complete(cls)
    told = core or cls.__pydantic_core_schema__
    own: Mapping[str, Any] = getattr(cls, "__pydantic_config__", {})
    return told if own.get("extra") == "forbid" and not is_event(cls) else _opened(told)


def _opened(node: Any, forbids: bool = False) -> Any:
    """`forbids`: within a class of the application that says so itself; classes without options have those around."""
    if isinstance(node, list):
        return [_opened(one, forbids) for one in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    schema = cast("dict[str, Any]", node)
    cls = schema.get("cls")
    if isinstance(cls, type) and schema.get("type") in _CLASSES:
        config = cast("dict[str, Any]", schema.get("config") or {})
        is_forbidden = config.get("extra_fields_behavior") == "forbid"
        if is_event(cls):
            forbids = False
        elif schema["type"] == "model" or hasattr(cls, "__pydantic_config__"):
            forbids = is_forbidden
        if is_forbidden and not forbids:
            config = {key: value for key, value in config.items() if key != "extra_fields_behavior"}
            schema = {key: value for key, value in schema.items() if key != "extra_behavior"} | {"config": config}
    return {key: value if key in _OPAQUE else _opened(value, forbids) for key, value in schema.items()}


_CLASSES = ("dataclass", "model", "typed-dict")


def _shown(value: Any) -> str:
    kind = cast("type[Any]", type(value))
    return f"another {kind.__name__}" if is_private(kind) else shown(value)


def _equal(one: Any, other: Any) -> bool:
    """As `==`, but a time that its zone has twice or never equals itself in UTC, which Python denies (PEP 495)."""
    if isinstance(one, datetime) and isinstance(other, datetime):
        return one.astimezone(UTC) == other.astimezone(UTC)
    if type(one) is not type(other):
        return bool(one == other)
    if is_dataclass(one):
        return all(_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(one) if each.compare)
    if isinstance(one, list | tuple):
        left, right = cast("Sequence[Any]", one), cast("Sequence[Any]", other)
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(one, dict):
        known, given = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
        return known.keys() == given.keys() and all(_equal(known[key], given[key]) for key in known)
    return bool(one == other)


def _wired(node: Any) -> Any:
    """The core schema with its leaves replaced by the wire profile's."""
    if isinstance(node, list):
        return [_wired(item) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    schema = cast("dict[str, Any]", node)
    copied = {key: value if key in _OPAQUE else _wired(value) for key, value in schema.items()}
    keys = schema.get("keys_schema")
    if isinstance(keys, dict) and cast("dict[str, Any]", keys).get("type") == "datetime":
        copied["keys_schema"] = _datetime(cast("dict[str, Any]", keys))
    leaf = _LEAVES.get(schema.get("type", "")) if isinstance(schema.get("type"), str) else None
    return leaf(copied) if leaf is not None else copied


_OPAQUE = frozenset({"default", "metadata", "expected", "serialization", "keys_schema", "cls", "config", "members"})


def _decimal(schema: dict[str, Any]) -> Any:
    return core_schema.no_info_before_validator_function(_only_text, {**schema, "strict": False})  # type: ignore[typeddict-item]  of any kind


def _converted(read: Callable[[Any], Any], write: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """A leaf that `read` takes from JSON before it is validated, and `write` turns into JSON."""
    serialization = core_schema.plain_serializer_function_ser_schema(write, when_used="json")
    return lambda schema: core_schema.no_info_before_validator_function(
        read, cast("core_schema.AnySchema", schema), serialization=serialization
    )


def _datetime(schema: dict[str, Any]) -> Any:
    serialization = core_schema.plain_serializer_function_ser_schema(_datetime_to_json, when_used="json")
    return {"serialization": serialization, **schema, "tz_constraint": "aware"}


def _only_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("a Decimal travels as a string")
    return value


def _integer_from_json(value: Any) -> Any:
    if isinstance(value, str):
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 4_000 and abs(int(value)) > SAFE_INTEGER):
            raise ValueError("an integer travels as a string only beyond 2^53")
        return int(value)
    return value


def _integer_to_json(value: Any) -> Any:
    if not isinstance(value, int):
        return value  # the other side of a union
    return value if -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)


def _datetime_to_json(value: datetime) -> str:
    if value.tzinfo is None:
        raise ValueError("a datetime needs a time zone")
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _bytes_from_json(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("bytes travel as base64")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"bytes travel as base64: {error}") from None


_LEAVES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "decimal": _decimal,
    "int": _converted(_integer_from_json, _integer_to_json),
    "float": lambda schema: {**schema, "allow_inf_nan": False},
    "datetime": _datetime,
    "bytes": _converted(_bytes_from_json, lambda value: base64.b64encode(value).decode()),
}
