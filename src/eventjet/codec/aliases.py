"""The names by which fields of classes inside a body are stored: their own, or an alias where the class says so. PURE.

pydantic writes a field by its own name unless the class has `serialize_by_alias`, and reads it by its alias unless the
class has `validate_by_name` (`populate_by_name`). Events themselves have no aliases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

Node: TypeAlias = Mapping[str, Any]
"""A part of pydantic's core schema."""

_CLASSES = ("dataclass", "model", "typed-dict")
_FIELDS = ("dataclass-args", "model-fields", "typed-dict")
_CODE = ("function-before", "function-wrap", "function-plain")
_OPAQUE = frozenset({"default", "metadata", "expected", "serialization", "cls", "config", "members", "computed_fields"})


def written_name(name: str, field: Node, config: Node) -> str:
    """Return the name by which a field of a class with this configuration is stored."""
    alias = field.get("serialization_alias")
    return alias if isinstance(alias, str) and config.get("serialize_by_alias") else name


def with_written_names(schema: Any) -> Any:
    """Return a core schema whose fields are read by the names by which they are stored.

    A field that is not read by this name keeps the alias by which it is read.
    """
    return _renamed(schema, {})


def alias_faults(schema: Any) -> list[str]:
    """Return, as sentences, the fields of a core schema that are stored by a name by which they are not read."""
    return list(dict.fromkeys(_faults(schema, {}, "", is_code=False)))


def fields_of(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield (name, field) of a node that has fields: the arguments of a dataclass, the fields of a model."""
    fields = node["fields"]
    if isinstance(fields, dict):
        yield from cast("dict[str, Any]", fields).items()
    else:
        yield from ((field["name"], field) for field in cast("list[Any]", fields))


def _renamed(node: Any, config: Node) -> Any:
    if isinstance(node, list):
        return [_renamed(item, config) for item in cast("list[Any]", node)]
    if isinstance(node, tuple):
        return tuple(_renamed(item, config) for item in cast("tuple[Any, ...]", node))
    if not isinstance(node, dict):
        return node
    schema = cast("dict[str, Any]", node)
    if schema.get("type") in _CLASSES:
        config = schema.get("config") or {}
    copied = {key: value if key in _OPAQUE else _renamed(value, config) for key, value in schema.items()}
    if schema.get("type") in _FIELDS:
        fields = {name: _read_as_written(name, field, config) for name, field in fields_of(copied)}
        copied["fields"] = fields if isinstance(schema["fields"], dict) else list(fields.values())
    return copied


def _read_as_written(name: str, field: Node, config: Node) -> Node:
    written = written_name(name, field, config)
    if "validation_alias" not in field or not _is_read(written, name, field, config):
        return field
    return {**field, "validation_alias": written}


def _is_read(written: str, name: str, field: Node, config: Node) -> bool:
    alias = field.get("validation_alias")
    if alias is None or (written == name and config.get("validate_by_name")):
        return alias is not None or written == name
    return bool(config.get("validate_by_alias", True)) and (alias == written or [written] in (alias, *alias))


def _faults(node: Any, config: Node, class_name: str, *, is_code: bool) -> Iterator[str]:
    if isinstance(node, list | tuple):
        for item in cast("list[Any]", node):
            yield from _faults(item, config, class_name, is_code=is_code)
    if not isinstance(node, dict):
        return
    schema = cast("dict[str, Any]", node)
    kind = schema.get("type")
    if kind in _CLASSES:
        config, class_name = schema.get("config") or {}, getattr(schema.get("cls"), "__qualname__", class_name)
        is_code = is_code or "serialization" in schema
    if kind in _FIELDS and not is_code:
        for name, field in fields_of(schema):
            written = written_name(name, field, config)
            if not field.get("serialization_exclude") and not _is_read(written, name, field, config):
                yield (
                    f"{class_name}.{name} would be stored as {written!r} and is read by another name, so its value "
                    f"would be lost; give {class_name} validate_by_name=True or serialize_by_alias=True, or leave the "
                    "alias out"
                )
    for key, value in schema.items():
        if key not in _OPAQUE:
            # Application code before a class may read any name.
            yield from _faults(value, config, class_name, is_code=kind in _CODE)
