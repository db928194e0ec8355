"""Protect shared values from changes in place: refuse mutable types in declarations, copy values of unknown types.

One folded state serves many decisions, one row many events, and one event many functions, and none of them may see a
change that another made. The classes of states and rows have to be frozen, and so do the values of their fields, as
far as annotations show (`state_faults`, `value_faults`). `Mapping`, `Sequence`, `Any`, unknown classes and the lists in
events do not show it, so such values are passed on as copies (`own_copy`, ADR 0049). PURE.
"""

from __future__ import annotations

import copyreg
import re
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from operator import is_
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar, cast
from uuid import UUID
from zoneinfo import ZoneInfo

from eventjet.errors import DefinitionError

T = TypeVar("T")
_Copy: TypeAlias = Callable[[Any, bool], Any]
"""(value, whether the copy is to be complete) → the copy, or the value itself if nothing in it can be changed."""

_REPLACEMENTS: tuple[tuple[type, str], ...] = (
    (bytearray, "bytes"),
    (memoryview, "bytes"),
    (MutableSequence, "tuple[…, ...]"),
    (MutableSet, "frozenset[…]"),
    (MutableMapping, "Mapping[…, …] of collections.abc, and make a new dict for each change"),
)
"""(mutable type, the type to use instead); the first match counts."""


def state_faults(state: Any) -> list[str]:
    """Return the fields of a state that can be changed in place, at any depth, each as a sentence."""
    return list(_faults(state, state.__qualname__, frozenset({state})))


def value_faults(hint: Any, where: str) -> list[str]:
    """Return the parts of an annotation that can be changed in place, each as a sentence that names `where`."""
    return list(_hint_faults(hint, where, frozenset()))


def _faults(cls: Any, path: str, enclosing: frozenset[Any]) -> Iterator[str]:
    try:
        hints = typing.get_type_hints(cls)
    except Exception as error:  # noqa: BLE001 - an annotation is any expression
        reason = f"cannot be resolved ({error}); import what they name for real (not under TYPE_CHECKING)"
        yield f"the annotations of {cls.__qualname__}'s fields {reason} and at module level"
        return
    for name in field_names(cls):
        yield from _hint_faults(hints.get(name), f"{path}.{name}", enclosing)


def _hint_faults(hint: Any, where: str, enclosing: frozenset[Any]) -> Iterator[str]:
    for kind in dict.fromkeys(_classes(hint)):
        instead = next((instead for changeable, instead in _REPLACEMENTS if issubclass(kind, changeable)), None)
        if instead is None and not is_frozen(kind):
            instead = f"{kind.__qualname__} declared with frozen=True"
        if instead is not None:
            yield f"{where} holds a {kind.__qualname__}, which can be changed under who shares it; take {instead}"
        elif kind not in enclosing:
            yield from _faults(kind, where, enclosing | {kind}) if field_names(kind) else ()


def _classes(hint: Any) -> Iterator[type]:
    """Yield every class in an annotation: members of unions, containers and their items."""
    if typing.get_origin(hint) is typing.Literal:
        return
    inner = hint.__supertype__ if isinstance(hint, typing.NewType) else typing.get_origin(hint)
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    elif inner is not None:
        yield from _classes(inner)
    for part in typing.get_args(hint):
        yield from _classes(part)


def field_names(cls: Any) -> list[str]:
    """Return the fields of a dataclass, a NamedTuple or a pydantic model; empty for other classes."""
    if is_dataclass(cls):
        return [field.name for field in fields(cls)]
    return list(getattr(cls, "_fields", None) or getattr(cls, "model_fields", None) or ())


def is_frozen(cls: Any) -> bool:
    """Return False for a dataclass or a pydantic model whose fields can be set, and True for all other classes."""
    if is_dataclass(cls):
        return bool(cast("Any", cls).__dataclass_params__.frozen)
    return not hasattr(cls, "model_fields") or bool(cls.model_config.get("frozen"))


_VALUES: tuple[type, ...] = (
    int, str, float, complex, bool, bytes, type(None), Decimal, Fraction, UUID, date, time, timedelta, tzinfo, Enum,
    range, PurePath, IPv4Address, IPv6Address, IPv4Network, IPv6Network, re.Pattern, type, types.FunctionType,
    types.BuiltinFunctionType,
)  # fmt: skip
_EXACT = frozenset(_VALUES) | {datetime, ZoneInfo, timezone}
_CHANGEABLE = tuple(kind for kind, _ in _REPLACEMENTS)
_CONTAINERS = (Mapping, AbstractSet, Sequence, Collection, Iterable)


def is_fixed(hint: Any) -> bool:
    """Return whether types prove that no value of this annotation can be changed in place."""
    try:
        return _is_known_fixed(hint)
    except TypeError:  # the annotation is unhashable, such as a Literal of a list
        return False


def own_copy(value: T, *, copies_unknown: bool = True) -> T:
    """Return the value, or a copy that shares with it nothing that can be changed in place.

    A value that its type proves immutable is returned as it is, and so is an object without attributes, which may be
    compared by identity (a sentinel). Objects of unknown classes go through `copy.deepcopy`, or are returned as they
    are if `copies_unknown` is False. Raises `DefinitionError` for a value that cannot be copied.
    """
    copy = _copier(cast("Any", type(value)))
    if copy is None:
        return value
    try:
        return cast("T", copy(value, copies_unknown))
    except DefinitionError:
        raise
    except Exception as error:
        raise _uncopied(f"a {type(value).__qualname__}", error) from error


def _uncopied(what: str, error: Exception) -> DefinitionError:
    reason = f"cannot be copied ({type(error).__name__}: {error}), so whoever is given it could change it for all"
    return DefinitionError([f"{what} {reason}; take a frozen dataclass, or other plain data"])


@lru_cache(maxsize=10_000)
def _is_known_fixed(hint: Any) -> bool:
    return _is_fixed(hint, frozenset())


def _is_fixed(hint: Any, enclosing: frozenset[Any]) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or origin is typing.Literal:
        return True
    if origin in (typing.Union, types.UnionType):
        return all(_is_fixed(part, enclosing) for part in parts)
    if origin in (typing.Annotated, typing.Final):
        return _is_fixed(parts[0], enclosing)
    if isinstance(hint, typing.NewType):
        return _is_fixed(hint.__supertype__, enclosing)
    if type(hint).__name__ == "TypeAliasType":
        return _is_fixed(hint.__value__, enclosing)
    cls: Any = origin or hint
    if not isinstance(cls, type) or issubclass(cls, _CHANGEABLE):
        return False
    if cls in (tuple, frozenset):
        return bool(parts) and all(part is Ellipsis or _is_fixed(part, enclosing) for part in parts)
    if issubclass(cls, _VALUES) or cls in enclosing:
        return True
    return cls is not object and _is_frozen_class(cls) and not _open_fields(cls, enclosing | {cls})


def _is_frozen_class(cls: Any) -> bool:
    """Return whether a class has nothing but fields, and none of them can be set."""
    if hasattr(cls, "model_fields"):
        return is_frozen(cls) and cls.model_config.get("extra") != "allow" and not cls.__private_attributes__
    if hasattr(cls, "__dataclass_fields__"):
        return is_frozen(cls)
    return tuple in cls.__mro__ and hasattr(cls, "_fields")


def _open_fields(cls: Any, enclosing: frozenset[Any]) -> list[str]:
    """Return the fields whose values are not proved immutable by their annotations."""
    names = field_names(cls)
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # noqa: BLE001 - an annotation is any expression
        return names
    return [name for name in names if name not in hints or not _is_fixed(hints[name], enclosing)]


def _copy_of(value: Any, copies_unknown: bool) -> Any:
    copy = _copier(cast("Any", type(value)))
    return value if copy is None else copy(value, copies_unknown)


@lru_cache(maxsize=10_000)
def _copier(kind: type[Any]) -> _Copy | None:
    """Return the function that copies values of exactly this class; None if they need no copy."""
    if kind in _EXACT or kind is frozenset or _is_known_fixed(kind):
        return None
    if kind in _OF_KIND:
        return _OF_KIND[kind]
    copiers = _copiers(kind)
    return _copy_of_unknown if copiers is None else _object_copier(kind, copiers)


def _copy_of_tuple(value: tuple[Any, ...], copies_unknown: bool) -> tuple[Any, ...]:
    items = tuple([_copy_of(item, copies_unknown) for item in value])
    return value if all(map(is_, items, value)) else items


def _copy_of_unknown(value: Any, copies_unknown: bool) -> Any:
    return deepcopy(value) if copies_unknown and not _is_bare(value) else value


_OF_KIND: Mapping[Any, _Copy] = {
    dict: lambda value, copies_unknown: {key: _copy_of(item, copies_unknown) for key, item in value.items()},
    list: lambda value, copies_unknown: [_copy_of(item, copies_unknown) for item in value],
    tuple: _copy_of_tuple,
    set: lambda value, _: value.copy(),
    bytearray: lambda value, _: value.copy(),
    types.MappingProxyType: lambda value, copies_unknown: types.MappingProxyType(_copy_of(dict(value), copies_unknown)),
}


def _object_copier(kind: Any, copiers: Mapping[str, _Copy]) -> _Copy:
    is_model, is_set_once = hasattr(kind, "model_fields"), is_frozen(kind)
    fixed_names = [name for name in field_names(kind) if name not in copiers]
    has_dict = not is_model and bool(kind.__dictoffset__)

    def copy(value: Any, copies_unknown: bool) -> Any:
        copies: dict[str, Any] = {}
        is_changed = not is_set_once
        for name, copier in copiers.items():
            original = getattr(value, name)
            try:
                copies[name] = copied = copier(original, copies_unknown)
            except DefinitionError:
                raise
            except Exception as error:
                raise _uncopied(
                    f"{kind.__qualname__}.{name} holds a {type(original).__qualname__}, which", error
                ) from error
            is_changed = is_changed or copied is not original
        if not is_changed:
            return value
        if is_model:
            clone = value.model_copy()
            cast("dict[str, Any]", vars(clone)).update(copies)
            return clone
        clone = object.__new__(kind)
        if has_dict:
            cast("dict[str, Any]", vars(clone)).update(cast("dict[str, Any]", vars(value)))
        for name in fixed_names:
            _set(clone, name, getattr(value, name))
        for name, copied in copies.items():
            _set(clone, name, copied)
        return clone

    return copy


_set = object.__setattr__
"""Sets a field of a frozen class, too."""


def _copiers(cls: Any) -> Mapping[str, _Copy] | None:
    """Return the copiers of the fields that are not proved immutable; None if copying the fields is not enough."""
    if hasattr(cls, "model_fields"):
        is_plain = cls.model_config.get("extra") != "allow" and not cls.__private_attributes__
    else:
        is_plain = hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__deepcopy__")
        is_plain = is_plain and cls.__new__ is object.__new__
    if not is_plain or (cls.__base__ is not object and issubclass(cls, (BaseException, *_CHANGEABLE))):
        return None
    names = _open_fields(cls, frozenset({cls}))
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # noqa: BLE001 - an annotation is any expression
        hints = dict[str, Any]()
    return {name: _shallow if _is_flat(hints.get(name, Any)) else _copy_of for name in names}


def _is_flat(hint: Any) -> bool:
    """Return whether an annotation is a container, or a union of containers, of items that are proved immutable."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(is_fixed(part) or _is_flat(part) for part in parts)
    origin = typing.get_origin(hint)
    is_container = isinstance(origin, type) and issubclass(origin, _CONTAINERS)
    return is_container and all(part is Ellipsis or is_fixed(part) for part in parts)


def _shallow(value: Any, copies_unknown: bool) -> Any:
    kind: Any = cast("Any", type(value))
    if kind is dict or kind is list or kind is set:
        return value.copy()
    if kind is tuple or kind is frozenset or kind in _EXACT:
        return value
    return _copy_of(value, copies_unknown)


def _is_bare(value: Any) -> bool:
    """Return whether a value has no attributes and no items, such as a sentinel; raises if it cannot be copied."""
    if hasattr(value, "__deepcopy__"):
        return False
    reduced = value.__reduce_ex__(4)
    return reduced[0] is copyreg.__newobj__ and len(reduced[1]) == 1 and all(part is None for part in reduced[2:])  # type: ignore[attr-defined]
