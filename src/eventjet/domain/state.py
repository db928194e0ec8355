"""What a state may hold: nothing that can be changed under those who share it.

One folded state serves many decisions, of many tasks. Its class is frozen, and so must be what its fields hold.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import fields, is_dataclass
from typing import Any, cast

from eventjet.domain.aggregate import field_faults

_INSTEAD: tuple[tuple[type, str], ...] = (
    (bytearray, "bytes"),
    (memoryview, "bytes"),
    (MutableSequence, "tuple[…, ...]"),
    (MutableSet, "frozenset[…]"),
    (MutableMapping, "Mapping[…, …] of collections.abc, and make a new dict for each change"),
)
"""Kinds that can be changed, and the one to take; the first that fits."""


def state_faults(state: Any) -> list[str]:
    """Fields of a state, and of what they hold, that can be changed in place; each as a sentence."""
    return [*field_faults(state), *_faults(state, state.__qualname__, frozenset({state}))]


def _faults(cls: Any, path: str, above: frozenset[Any]) -> Iterator[str]:
    try:
        hints = typing.get_type_hints(cls)
    except Exception as error:  # noqa: BLE001 - an annotation is any expression
        reason = f"cannot be resolved ({error}); import what they name for real (not under TYPE_CHECKING)"
        yield f"the annotations of {cls.__qualname__}'s fields {reason} and at module level"
        return
    for name in _field_names(cls):
        for kind in dict.fromkeys(_classes(hints.get(name))):
            where = f"{path}.{name}"
            instead = next((instead for changeable, instead in _INSTEAD if issubclass(kind, changeable)), None)
            if instead is None and not _is_frozen(kind):
                instead = f"{kind.__qualname__} declared with frozen=True"
            if instead is not None:
                yield f"{where} holds a {kind.__qualname__}, which can be changed under who shares it; take {instead}"
            elif kind not in above:
                yield from _faults(kind, where, above | {kind}) if _field_names(kind) else ()


def _classes(hint: Any) -> Iterator[type]:
    """Every class in an annotation: of a union, of a container and of what is in it."""
    if typing.get_origin(hint) is typing.Literal:
        return
    inner = hint.__supertype__ if isinstance(hint, typing.NewType) else typing.get_origin(hint)
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    elif inner is not None:
        yield from _classes(inner)
    for part in typing.get_args(hint):
        yield from _classes(part)


def _field_names(cls: Any) -> list[str]:
    """Of a dataclass, a NamedTuple or a pydantic model; none for other classes."""
    if is_dataclass(cls):
        return [one.name for one in fields(cls)]
    return list(getattr(cls, "_fields", None) or getattr(cls, "model_fields", None) or ())


def _is_frozen(cls: Any) -> bool:
    """False for a dataclass or a pydantic model whose fields can be set; of other classes nothing is known."""
    if is_dataclass(cls):
        return bool(cast("Any", cls).__dataclass_params__.frozen)
    return not hasattr(cls, "model_fields") or bool(cls.model_config.get("frozen"))
