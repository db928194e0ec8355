"""Encode and decode the body of an event, in a JSON profile that is readable without eventjet.

Decimal as string, datetime as RFC 3339 in UTC, UUID and date as string, bytes as base64, integers beyond 2^53 as
string, sets in the order of their items' JSON, NaN and infinities refused, unknown fields ignored on reading. Every
encoded body is decoded again and compared, by type as well as by value, so that an event that cannot be read back is
never sent.

pydantic is laxer than a ledger may be (a JSON number becomes a Decimal), so bodies have their own validator and
serializer, built from the class's core schema with the leaves replaced by those of `codec.leaves`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias, cast
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import BaseModel
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic_core import (
    PydanticSerializationError,
    SchemaError,
    SchemaSerializer,
    SchemaValidator,
    TzInfo,
    ValidationError,
    core_schema,
    to_jsonable_python,
)

from eventjet.codec.json import check_numbers, dump_json
from eventjet.codec.leaves import (
    LEAVES,
    Node,
    datetime_to_json,
    decimal_outside_unions,
    in_utc,
    of_datetime,
    of_enum,
    of_literal,
    of_time,
)
from eventjet.codec.reasons import faults_of
from eventjet.domain.aggregate import complete, is_event
from eventjet.domain.personal import field_hint, is_private
from eventjet.errors import DefinitionError, UnencodableEvent
from eventjet.text import cut, listed, shown


class BodyCodec:
    """Encodes and decodes the fields of one class: of an event, or of another class with a given core schema."""

    __slots__ = ("_serializer", "decode", "schema")

    def __init__(self, event_type: type, core: core_schema.CoreSchema | None = None) -> None:
        """Build the codec; raises `DefinitionError` for a class with an annotation that cannot be resolved."""
        self.schema = reading_schema(event_type, core)
        """pydantic's core schema of the class, without the leaves of the wire."""
        schema = _wire_schema(self.schema)
        self.decode: Callable[[bytes], Any] = SchemaValidator(schema, _use_prebuilt=False).validate_json
        """Returns the object of a body; raises `ValueError` (pydantic's `ValidationError` is one)."""
        self._serializer = SchemaSerializer(schema, _use_prebuilt=False)

    def read_back(self, value: Any, *, exact: bool = False) -> tuple[bytes, Any]:
        """Return the body of a value, and the object read from the body, with the same values of the same types.

        A datetime is read back as the same instant in UTC, and not as a subclass; with `exact` it has to keep its zone
        and class as well. Raises `UnencodableEvent`, which names the field that would be read back differently.
        """
        try:
            body = self._serializer.to_json(value, warnings=False)
            read_value = self.decode(body)
            fault = _difference(value, read_value, exact)
        except (PydanticSerializationError, ValidationError, UnicodeEncodeError, ValueError, RecursionError) as error:
            raise UnencodableEvent(value, self._reason(value, error)) from None
        if fault is not None:
            path, reason, read_part = fault
            hidden = is_private(cast("type[Any]", type(value)))
            part_text = f"another {type(read_part).__name__}" if hidden else shown(read_part)
            message = reason or f"it would be read back as {part_text}"
            raise UnencodableEvent(value, f"{path.removeprefix('.')}: {message}" if path else message)
        return body, read_value

    def written(self, value: Any) -> bytes:
        """Return the body of a value without checking that it can be read back; raises `UnencodableEvent`."""
        try:
            return self._serializer.to_json(value, warnings=False)
        except (PydanticSerializationError, UnicodeEncodeError, ValueError, RecursionError):
            return self.read_back(value)[0]  # which raises the error in words

    def _reason(self, value: Any, error: Exception) -> str:
        """Return why a value cannot be stored; without what code of the application says of a personal field."""
        cls = cast("type[Any]", type(value))
        if isinstance(error, ValidationError):
            names = {next(iter(detail["loc"]), "") for detail in error.errors(include_url=False, include_input=False)}
        else:
            names = {self._field_without_json(value)}
        if is_private(cls) and ("" in names or any(is_private(field_hint(cls, str(name))) for name in names)):
            reason = f"{type(error).__name__}, and what it says is not shown, since it may be personal"
            return f"{listed(map(str, filter(None, names)))}: {reason}" if names != {""} else reason
        reason = cut(faults_of(error)) or type(error).__name__
        if not isinstance(error, PydanticSerializationError):
            return reason
        (name,) = names
        return f"{name}: {_WRAPPED.sub('', reason)}" if name else _WRAPPED.sub("", reason)

    def _field_without_json(self, value: Any) -> str:
        """Return the first field that cannot be written; empty if it is not known."""
        for name in _names(cast("Any", type(value))) if is_dataclass(value) else ():
            try:
                self._serializer.to_json(value, include={name}, warnings=False)
            except PydanticSerializationError:
                return name
        return ""


def reading_schema(cls: Any, core: core_schema.CoreSchema | None = None) -> Any:
    """Return the core schema of a class, or `core`, changed to ignore unknown fields of events.

    The constructor of an event still refuses them, and so does a class that is not an event and forbids them itself.
    Raises `DefinitionError` for a class with an annotation that cannot be resolved.
    """
    schema = core or _core_of(cls)
    config: Mapping[str, Any] = getattr(cls, "__pydantic_config__", {})
    return schema if config.get("extra") == "forbid" and not is_event(cls) else _taking_unknown_fields(schema)


def _taking_unknown_fields(node: Any, forbids: bool = False) -> Any:
    """Return the schema with classes opened to unknown fields, except where the application forbids them.

    `forbids` says that an enclosing class forbids them itself; a class without options takes those of the enclosing.
    """
    if isinstance(node, list):
        return [_taking_unknown_fields(item, forbids) for item in cast("list[Any]", node)]
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
    return {key: value if key in _OPAQUE else _taking_unknown_fields(value, forbids) for key, value in schema.items()}


_CLASSES = ("dataclass", "model", "typed-dict")


def _core_of(event_type: Any) -> core_schema.CoreSchema:
    """Return pydantic's schema of a class, completed now if its annotations name classes declared after it."""
    try:
        if not getattr(event_type, "__pydantic_complete__", True):
            complete(event_type)
    except PydanticUndefinedAnnotation as error:
        fault = (
            f"an annotation of {event_type.__qualname__} names {error.name!r}, which cannot be found where the class "
            "is declared; import it for real (not under TYPE_CHECKING) and at module level"
        )
        raise DefinitionError([fault]) from None
    return event_type.__pydantic_core_schema__


_Fault: TypeAlias = tuple[str, str, Any]
"""(path as `.lines[2].price`; why the value is read back differently, empty if it is only unequal; that value)."""
_ATOMS = frozenset({str, int, bool, type(None), bytes, UUID, timedelta})
"""Types whose equal values are indistinguishable."""
_WRAPPED = re.compile(
    r"^Error serializing to JSON: |PydanticSerializationError: |Error calling function `\w+`: |ValueError: "
)
"""The prefix that pydantic puts before the reason why a value cannot be written."""
_TIME_KINDS = (date, time)
_UNDECLARED = "a dataclass stores no field that it does not declare; declare it, or make the class a pydantic model"
_ZONE_LOST = "its time zone would be lost; give one of a fixed offset, or keep the zone's name in a field of its own"


def _difference(value: Any, read_value: Any, exact: bool) -> _Fault | None:
    """Return the first difference between a value and the value read back; None if there is none."""
    kind = cast("type[Any]", type(value))
    if kind is not type(read_value) and not (isinstance(value, _TIME_KINDS) and isinstance(read_value, _TIME_KINDS)):
        return "", _other_type(value, read_value), read_value
    return _comparison(kind)(value, read_value, exact)


@lru_cache(maxsize=10_000)
def _comparison(kind: type[Any]) -> Callable[[Any, Any, bool], _Fault | None]:
    """Return the function that compares two values of a type."""
    if issubclass(kind, _TIME_KINDS):
        return _difference_of_times
    if kind in (float, Decimal):  # 0.0 equals -0.0, and 1.0 equals 1.00
        return lambda left, right, _: None if left == right and str(left) == str(right) else ("", "", right)
    if issubclass(kind, dict):
        return _difference_of_mappings
    if issubclass(kind, list | tuple | deque):
        return _difference_of_items
    if issubclass(kind, set | frozenset):
        return _difference_of_sets
    if is_dataclass(kind) or issubclass(kind, BaseModel):
        return _comparison_of_fields(kind)
    return lambda left, right, _: None if left == right else ("", "", right)


def _first_difference(left: Iterable[Any], right: Iterable[Any], exact: bool) -> tuple[int, _Fault] | None:
    """Return the index of the first pair that differs, and its fault; both sides have the same length."""
    for index, (left_item, right_item) in enumerate(zip(left, right, strict=True)):
        kind = type(left_item)  # pyright: ignore[reportUnknownVariableType]
        if left_item is right_item or (
            kind is type(right_item)
            and left_item == right_item
            and (kind in _ATOMS or (kind is Decimal and str(left_item) == str(right_item)))
        ):
            continue
        if fault := _difference(left_item, right_item, exact):
            return index, fault
    return None


def _difference_of_mappings(value: dict[Any, Any], read_value: dict[Any, Any], exact: bool) -> _Fault | None:
    """Compare two mappings with their order, since a state's methods may depend on it."""
    if len(value) != len(read_value):
        return "", "", read_value
    if isinstance(value, defaultdict) and value.default_factory is not cast("Any", read_value).default_factory:
        return "", "it would be read back with the default_factory of its annotation; give that one", read_value
    difference = _first_difference(value, read_value, exact) or _first_difference(
        value.values(), read_value.values(), exact
    )
    return difference and (f"[…]{difference[1][0]}", *difference[1][1:])  # a key may be personal


def _difference_of_items(value: Sequence[Any], read_value: Sequence[Any], exact: bool) -> _Fault | None:
    if len(value) != len(read_value):
        return "", "", read_value
    if isinstance(value, deque) and value.maxlen != cast("Any", read_value).maxlen:
        return "", f"its maxlen {value.maxlen} would be lost; give a deque without one", read_value
    difference = _first_difference(value, read_value, exact)
    return difference and (f"[{difference[0]}]{difference[1][0]}", *difference[1][1:])


def _difference_of_sets(value: AbstractSet[Any], read_value: AbstractSet[Any], exact: bool) -> _Fault | None:
    unmatched = {item: item for item in read_value}
    pairs = [(item, unmatched.pop(item)) for item in value if item in unmatched]
    for item in value - read_value if len(pairs) < len(value) else ():
        # A time in a zone's gap or repeated hour equals no time in another zone (PEP 495): compare such times in UTC.
        match = next((candidate for candidate in unmatched if _difference(item, candidate, exact) is None), None)
        if match is None:
            return "[…]", "", read_value
        pairs.append((item, unmatched.pop(match)))
    if unmatched:
        return "", "", read_value
    difference = _first_difference([left for left, _ in pairs], [right for _, right in pairs], exact)
    return difference and (f"[…]{difference[1][0]}", *difference[1][1:])


def _comparison_of_fields(kind: type[Any]) -> Callable[[Any, Any, bool], _Fault | None]:
    names = _names(kind)
    many = attrgetter(*names) if len(names) > 1 and is_dataclass(kind) else None
    values = many or (lambda value: [getattr(value, name, None) for name in names])
    config: Mapping[str, Any] = getattr(kind, "__pydantic_config__", {})
    takes_undeclared = is_dataclass(kind) and config.get("extra") == "allow"
    known = {*names, *dir(kind)}

    def difference_of_fields(value: Any, read_value: Any, exact: bool) -> _Fault | None:
        undeclared = getattr(value, "__dict__", {}).keys() - known if takes_undeclared else ()
        if undeclared:
            return f".{min(undeclared)}", _UNDECLARED, None
        difference = _first_difference(values(value), values(read_value), exact)
        return difference and (f".{names[difference[0]]}{difference[1][0]}", *difference[1][1:])

    return difference_of_fields


@lru_cache(maxsize=10_000)
def _names(cls: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass or a model."""
    if issubclass(cls, BaseModel):
        return (*cls.model_fields, "__pydantic_extra__", "__pydantic_private__")
    return tuple(field.name for field in fields(cls))


def _other_type(value: Any, read_value: Any) -> str:
    return f"it is {type(value).__qualname__}, and would be read back as {type(read_value).__qualname__}"


def _difference_of_times(value: date | time, read_value: date | time, exact: bool) -> _Fault | None:
    if _is_same_time(value, read_value, exact):
        return None
    if not isinstance(value, type(read_value)):
        return "", _other_type(value, read_value), read_value
    return "", _ZONE_LOST if isinstance(value, datetime | time) and value.tzinfo is not None else "", read_value


def _is_same_time(value: date | time, read_value: date | time, exact: bool) -> bool:
    if type(value) is not type(read_value) and (exact or not isinstance(value, type(read_value))):
        return False
    if isinstance(value, datetime) and isinstance(read_value, datetime):
        if not exact and value.tzinfo is not None:
            return value.astimezone(UTC) == read_value
    elif not isinstance(value, time) or not isinstance(read_value, time):
        return type(read_value) is date and value == read_value
    is_same_clock = value.replace(tzinfo=None) == read_value.replace(tzinfo=None) and value.fold == read_value.fold
    return is_same_clock and _is_same_zone(value.tzinfo, read_value.tzinfo, exact)


def _is_same_zone(zone: tzinfo | None, read_zone: tzinfo | None, exact: bool) -> bool:
    """Return whether two zones are known to have the same offset at any instant; False for unknown zone classes."""
    if zone is read_zone or type(zone) is type(read_zone) is timezone:
        return zone is read_zone or (str(zone) == str(read_zone) and zone == read_zone)
    if exact or read_zone is None:
        return False
    if type(zone) is TzInfo:  # pydantic's, of a fixed offset
        return zone.utcoffset(None) == read_zone.utcoffset(None)
    return type(zone) is ZoneInfo and zone.key == "UTC" and read_zone is UTC


_WRITTEN_KEYS = frozenset(
    {kind for kind, leaf in LEAVES.items() if leaf.is_key_rewritten} | {"enum", "nullable", "union"}
)
_INNER = {
    "list": ("items_schema",),
    "set": ("items_schema",),
    "frozenset": ("items_schema",),
    "dict": ("values_schema",),
}
"""The schemas inside a container, which are `any` if the core schema omits them."""
_OPAQUE = frozenset({"default", "metadata", "expected", "serialization", "keys_schema", "cls", "config", "members"})
_TIMES: Mapping[str, Callable[[Node], Any]] = {"datetime": of_datetime, "time": of_time}
"""Wire schemas that read every text form that pydantic takes."""


def _wire_schema(node: Any, in_union: bool = False) -> Any:
    """Return the core schema with its leaves replaced by those of the wire."""
    if isinstance(node, list):
        return [_wire_schema(item, in_union) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    schema = cast("Node", node)
    kind = schema.get("type")
    in_union = in_union or kind in ("union", "tagged-union", "definitions")
    copied = {key: value if key in _OPAQUE else _wire_schema(value, in_union) for key, value in schema.items()}
    if not isinstance(kind, str):
        return copied
    if kind == "union":
        is_text = any(
            cast("Any", choice).get("type") == "str" for choice in schema["choices"] if isinstance(choice, dict)
        )
        if is_text:
            copied["choices"] = list(map(_wire_schema_of_choice, schema["choices"]))
    for inner in _INNER.get(kind, ()):
        copied.setdefault(inner, _wire_schema(core_schema.any_schema()))
    if "keys_schema" in schema:
        copied["keys_schema"] = _wire_schema_of_key(schema["keys_schema"])
    wire = _WIRES.get(kind) or (LEAVES[kind].wire if kind in LEAVES else None)
    if kind == "decimal" and not in_union:
        wire = decimal_outside_unions
    if wire is None:
        return copied
    ref = {"ref": copied.pop("ref")} if "ref" in copied else {}
    return {**wire(copied), **ref}


def _wire_schema_of_choice(node: Any) -> Any:
    """Return the wire schema of a choice in a union with `str`, where a check of the text would change the choice."""
    kind = str(cast("Node", node).get("type")) if isinstance(node, dict) else ""
    if kind in _TIMES:
        return _TIMES[kind](cast("Node", node))
    return cast("Any", node) if kind in ("date", "uuid") else _wire_schema(node, True)


def _wire_schema_of_key(node: Node) -> Any:
    """Return the wire schema of JSON object keys, read only in the form they are written in, so no two become one."""
    kind: str = node["type"]
    read_key = LEAVES[kind].key if kind in LEAVES else None
    if read_key is not None:
        return core_schema.no_info_before_validator_function(read_key, cast("core_schema.AnySchema", node))
    if kind not in _WRITTEN_KEYS or "serialization" in node:
        return node
    try:
        read = SchemaValidator(core_schema.dict_schema(cast("core_schema.AnySchema", node))).validate_json
    except SchemaError:
        return node  # the schema refers to a definition outside it

    def as_written(text: str) -> Any:
        (key,) = read(dump_json({text: None}))
        written = datetime_to_json(in_utc(key)) if kind == "datetime" else next(iter(to_jsonable_python({key: None})))
        if written != text:
            raise ValueError("a key is read only as it is written")
        return key

    leaf = cast("core_schema.AnySchema", _TIMES[kind](node) if kind in _TIMES else node)
    return core_schema.no_info_before_validator_function(as_written, leaf)


def _anything(schema: Node) -> Any:
    def check(value: Any) -> Any:
        check_numbers(value)
        return value

    return core_schema.no_info_after_validator_function(check, cast("core_schema.AnySchema", schema))


def _set(schema: Node) -> Any:
    serialization = core_schema.wrap_serializer_function_ser_schema(_in_order, when_used="json")
    return {"serialization": serialization, **schema}


def _in_order(value: Any, serialize: Callable[[Any], Any]) -> Any:
    """Return the items of a set in an order that is the same for equal sets, whatever the hashes."""
    items = serialize(value)
    if not isinstance(items, list):
        return items
    listed = cast("list[Any]", items)
    return sorted(listed, key=None if set(map(type, listed)) in ({str}, {int}) else dump_json)


_WIRES: Mapping[str, Callable[[Node], Any]] = {
    "enum": of_enum,
    "literal": of_literal,
    "any": _anything,
    "set": _set,
    "frozenset": _set,
}
"""Wire schemas of parts that are not leaves."""
