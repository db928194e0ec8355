"""`Personal`, the mark of a field with personal data, and the functions that hide such values. PURE.

eventjet shows no such value: not in listings, logs, spans, metrics or errors of its own. A class that contains such a
field at any depth is private, and so is the message of an exception raised by application code that handles it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, cast
from uuid import UUID

from typing_extensions import is_typeddict

from eventjet.domain.state import field_names
from eventjet.domain.subscription import annotation, raw_annotations

T = TypeVar("T")

_VARIABLES = (Generic, typing.Protocol)
"""Bases of a class that only list its type variables."""
_SCALARS = frozenset({str, int, float, bool, bytes, Decimal, date, datetime, time, timedelta, UUID, types.NoneType})

MASK = "<personal>"
"""The text shown in place of a personal value."""


class _Mark:
    __slots__ = ()

    def __repr__(self) -> str:
        return "personal"


_MARK = _Mark()

Personal: TypeAlias = Annotated[T, _MARK]
"""Marks a field of an event, a state or a row, or a parameter of a decision: `email: Personal[str]`."""


@lru_cache(maxsize=10_000)
def is_private(hint: Any) -> bool:
    """Return whether a class or an annotation contains something personal, at any depth."""
    return _is_private(hint, set())


def masked(value: Any, *hints: Any) -> Any:
    """Return the JSON of a value with its personal parts hidden, and with those hidden that a private class omits."""
    if not any(map(is_private, hints)):
        return value
    kinds = [kind for hint in hints for kind in _kinds(hint)]
    if _MARK in kinds:
        return MASK
    if isinstance(value, list):
        # A NamedTuple is a list in JSON.
        inner = [hint for kind in kinds for hint in (*_items(kind), *_fields(kind).values())]
        return [masked(item, *inner) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        if any(_is_mapping(kind) and is_private(typing.get_args(kind)[0]) for kind in kinds):
            return MASK
        return {name: _masked_field(name, item, kinds) for name, item in cast("dict[str, Any]", value).items()}
    # What no type accounts for that is not private may be the text of one that is.
    return value if any(kind is not type(None) and not _is_private(kind, set()) for kind in kinds) else MASK


def masked_undeclared(value: Any, *hints: Any, is_same_schema: bool = True) -> Any:
    """Return JSON with the values hidden, at any depth, of fields that no class declares; `masked` hides the others.

    Such a field was declared once, or is declared by a newer release, and may be personal there. At another schema, a
    value of another form than its type's is hidden, too: it may be what the type has replaced.
    """
    forms = _forms(hints, is_same_schema)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        inner = forms.items
        return [masked_undeclared(item, *inner, is_same_schema=is_same_schema) for item in items] if inner else MASK
    if not isinstance(value, dict):
        return value if forms.is_scalar or value is None else MASK
    shown: dict[str, Any] = {}
    for name, item in cast("dict[str, Any]", value).items():
        inner = forms.fields.get(name, forms.other_fields)
        if not inner:
            shown[name] = MASK
        elif is_same_schema and not isinstance(item, dict | list):
            shown[name] = item
        else:
            shown[name] = masked_undeclared(item, *inner, is_same_schema=is_same_schema)
    return shown


def masked_whole(value: Any) -> Any:
    """Return the names of a JSON object without its values, or the mask for other JSON, if no type is known."""
    if isinstance(value, dict):
        return dict.fromkeys(cast("dict[str, Any]", value), MASK)
    return MASK


def masked_row(row: Any) -> Any:
    """Return the fields of a row by name, with those hidden that are personal or contain something so."""
    kind = cast("type[Any]", type(row))
    return {name: MASK if is_private(field_hint(kind, name)) else getattr(row, name) for name in field_names(kind)}


def field_hint(cls: type, name: str) -> Any:
    """Return the annotation of a field; `Any` if the class has no such field."""
    return _fields(cls).get(name, Any)


def decisions_are_private(cls: type) -> bool:
    """Return whether a method of a class, inherited or its own, has a parameter that is personal, or may be."""
    return any(takes_personal(function) for _, function in inspect.getmembers(cls, inspect.isfunction))


def takes_personal(function: Any) -> bool:
    """Return whether a function has a parameter that is personal, or may be."""
    return any(is_private(parameter_hint(function, name)) for name in raw_annotations(function) if name != "return")


def parameter_hint(function: Any, name: str) -> Any:
    """Return the annotation of a parameter: personal if it cannot be resolved, `Any` if there is none.

    The mark may be behind an alias, so the text of an unresolved annotation does not show whether it is personal.
    """
    raw_hints = raw_annotations(function)
    if name not in raw_hints:
        return Any
    try:
        return annotation(function, name, raw_hints[name], include_extras=True)
    except Exception:  # noqa: BLE001 - an annotation is any expression
        return Personal[Any]  # better hidden than shown


def argument_hints(function: Any, args: tuple[Any, ...], kwargs: Iterable[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the annotations of a decision's arguments after the state: positional as a list, the rest by name."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = {parameter.name for parameter in parameters}
    variadic = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), "")
    by_place = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    ]
    # Further positional arguments belong to the last positional parameter, a `*names`.
    placed = [by_place[min(index, len(by_place) - 1)] if by_place else "" for index in range(len(args))]
    return (
        [parameter_hint(function, name) for name in placed],
        {name: parameter_hint(function, name if name in names else variadic) for name in kwargs},
    )


def _masked_field(name: str, value: Any, kinds: list[Any]) -> Any:
    hints = _hints_of_field(name, kinds)
    return masked(value, *hints) if hints else MASK


def _hints_of_field(name: str, kinds: list[Any]) -> list[Any]:
    hints: list[Any] = []
    for kind in kinds:
        if _is_mapping(kind):
            hints.append(typing.get_args(kind)[1])
        elif name in (by_name := _fields(kind)):
            hints.append(by_name[name])
    return hints


@dataclass(frozen=True, slots=True)
class _Forms:
    """The forms that JSON of some annotations may have."""

    items: tuple[Any, ...]
    """The annotations of a list's items; empty if it cannot be a list."""
    fields: Mapping[str, tuple[Any, ...]]
    """The annotations of an object's fields by name."""
    other_fields: tuple[Any, ...]
    """The annotations of fields of other names; empty if there are none."""
    is_scalar: bool
    """Whether it may be text, a number or a bool."""


@lru_cache(maxsize=10_000)
def _forms(hints: tuple[Any, ...], is_same_schema: bool) -> _Forms:
    kinds = [kind for hint in hints for kind in _kinds(hint)]
    anything = (Any,) if any(_is_open(kind, is_same_schema) for kind in kinds) else ()
    items = tuple(hint for kind in kinds for hint in (*_items(kind), *_fields(kind).values()))
    values = tuple(typing.get_args(kind)[1] for kind in kinds if _is_mapping(kind))
    computed = {name: (Any,) for kind in kinds for name in _computed(kind)}
    declared = {name: tuple(_hints_of_field(name, kinds)) for kind in kinds for name in _fields(kind)}
    of_values = [kind for kind in kinds if kind is not types.NoneType]
    is_scalar = is_same_schema or not of_values or not all(map(_has_fields, of_values))
    return _Forms(items or anything, {**computed, **declared}, values or anything, is_scalar)


def _is_open(kind: Any, is_same_schema: bool) -> bool:
    """Return whether a type may stand for any list or object; at another schema, one of text or numbers does not."""
    if kind is types.NoneType or _is_mapping(kind):
        return False
    if _has_fields(kind):
        config: Any = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
        decorators = getattr(kind, "__pydantic_decorators__", None)
        is_written_by_app = decorators is not None and bool(decorators.model_serializers)
        return is_same_schema and (config.get("extra") == "allow" or is_written_by_app)
    is_scalar = isinstance(kind, type) and (kind in _SCALARS or issubclass(kind, Enum))
    return is_same_schema or not (is_scalar or typing.get_args(kind))


def _computed(kind: Any) -> Iterable[str]:
    """Return the names of a class's computed fields, by which they are in JSON."""
    decorators = getattr(kind, "__pydantic_decorators__", None)
    fields: Mapping[str, Any] = {} if decorators is None else decorators.computed_fields
    return {alias for name, computed in fields.items() for alias in (name, computed.info.alias)}


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping) and len(typing.get_args(kind)) == 2


def _is_private(hint: Any, visited: set[Any]) -> bool:
    for kind in _kinds(hint):
        if kind is _MARK:
            return True
        try:
            if kind in visited:
                continue
            visited.add(kind)
        except TypeError:  # of a Literal with something that has no hash
            continue
        inner = [*_items(kind), *_fields(kind).values(), *_undeclared(kind)]
        if any(_is_private(part, visited) for part in inner):
            return True
    return False


def _undeclared(kind: Any) -> Iterator[Any]:
    """Yield the annotation of the fields that a pydantic model keeps though it does not declare them."""
    for cls in getattr(kind, "__mro__", ()) if hasattr(kind, "model_fields") else ():
        if cls.__module__ != "pydantic.main" and "__pydantic_extra__" in raw_annotations(cls):
            try:
                yield typing.get_type_hints(cls, include_extras=True)["__pydantic_extra__"]
            except Exception:  # noqa: BLE001 - an annotation is any expression
                yield Personal[Any]  # better hidden than shown


def _kinds(hint: Any) -> Iterator[Any]:
    """Yield the members of an annotation, and the mark itself for a personal member."""
    origin = typing.get_origin(hint)
    if isinstance(hint, str | typing.ForwardRef):
        yield _MARK  # an unresolved name: better hidden than shown
    elif origin is Annotated:
        if any(isinstance(entry, _Mark) for entry in hint.__metadata__):
            yield _MARK
        yield from _kinds(hint.__origin__)
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _kinds(member)
    elif isinstance(hint, typing.NewType):
        yield from _kinds(hint.__supertype__)
    elif type(hint).__name__ == "TypeAliasType":
        yield from _kinds(hint.__value__)
    elif type(origin).__name__ == "TypeAliasType":  # one of type variables, with types for them
        yield from _kinds(Personal[Any] if any(map(is_private, typing.get_args(hint))) else origin.__value__)
    elif origin in (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar):
        yield from _kinds(typing.get_args(hint)[0])
    elif getattr(hint, "__pydantic_root_model__", False) and "root" in hint.model_fields:
        yield from _kinds(_hints(hint)["root"])
    else:
        yield hint


def _items(kind: Any) -> tuple[Any, ...]:
    """Return the annotations of a container's items."""
    if typing.get_origin(kind) is typing.Literal:
        return ()
    return tuple(argument for argument in typing.get_args(kind) if argument is not Ellipsis)


@lru_cache(maxsize=10_000)
def _hints(cls: type) -> Mapping[str, Any]:
    declared: Any = getattr(cls, "__pydantic_fields__", None)
    field_infos = cast("dict[str, Any]", declared if isinstance(declared, dict) else {})
    if field_infos and cast("Any", cls).__pydantic_complete__:
        by_name = {name: _of_pydantic(field_info) for name, field_info in field_infos.items()}
    else:  # the annotations of an incomplete class name classes that were declared after it
        try:
            by_name = typing.get_type_hints(cls, include_extras=True)
        except Exception:  # noqa: BLE001 - an annotation is any expression
            names = [name for base in cls.__mro__ for name in raw_annotations(base)]
            by_name = dict.fromkeys(names, Personal[Any])  # better hidden than shown
        by_name = {name: by_name[name] for name in field_infos} or by_name
    by_name |= {alias: by_name[name] for name in field_infos for alias in _aliases(field_infos[name])}
    bases = (parent.__dict__.get("__orig_bases__", ()) for parent in cls.__mro__)
    return _with_arguments(by_name, chain.from_iterable(bases))


def _aliases(field_info: Any) -> Iterator[str]:
    """Yield the names other than its own that a field may have in JSON."""
    validation = field_info.validation_alias
    for alias in (field_info.alias, field_info.serialization_alias, *getattr(validation, "choices", (validation,))):
        first = getattr(alias, "path", (alias,))[0]
        if isinstance(first, str):
            yield first


def _of_pydantic(field_info: Any) -> Any:
    is_personal = any(isinstance(entry, _Mark) for entry in field_info.metadata)
    return Personal[field_info.annotation] if is_personal else field_info.annotation


def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the annotations of a class's fields by name; empty for a class without fields."""
    if not _has_fields(kind):
        return {}
    return _with_arguments(_hints(typing.get_origin(kind) or kind), [kind])


def _with_arguments(hints: Mapping[str, Any], generics: Iterable[Any]) -> Mapping[str, Any]:
    """Return the annotations of fields with the type arguments of these generic classes for their type variables."""
    arguments = [
        argument
        for generic in generics
        for argument in (() if typing.get_origin(generic) in _VARIABLES else typing.get_args(generic))
        if not isinstance(argument, list | tuple | types.EllipsisType | typing.ParamSpec)
    ]
    return {name: _without_variables(hint, arguments) for name, hint in hints.items()} if arguments else hints


def _without_variables(hint: Any, arguments: Sequence[Any]) -> Any:
    """Return the annotation of a generic class's field, with all type arguments for each of its type variables."""
    any_argument: Any = typing.Union[tuple(arguments)]  # noqa: UP007
    if isinstance(hint, TypeVar):
        return any_argument
    variables = getattr(hint, "__parameters__", ())
    if not variables or isinstance(hint, type):
        return hint
    try:
        return hint[(any_argument,) * len(variables)]
    except TypeError:  # a ParamSpec takes a list of types
        return Personal[Any]  # better hidden than shown


def _has_fields(kind: Any) -> bool:
    """Return whether a type is a class that declares fields, or none."""
    cls: Any = typing.get_origin(kind) or kind
    if not isinstance(cls, type):
        return False
    cls = cast("Any", cls)
    return is_dataclass(cls) or hasattr(cls, "model_fields") or is_typeddict(cls) or hasattr(cls, "_fields")
