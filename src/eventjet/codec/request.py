"""What a command asked for, in few bytes: its decision's name and a digest of its arguments, as `deposit:6f1c…`.

Recorded beside the events of a command that has an id, so that the id is not taken for another request. The same in
every process and release, as long as decision and parameters keep their names and the arguments their types.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, cast
from urllib.parse import unquote
from uuid import UUID
from weakref import WeakKeyDictionary

from eventjet.codec.envelope import REQUEST, header
from eventjet.domain.moment import in_utc

_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Takes the zeros off a Decimal's end and rounds nothing."""
_signatures: WeakKeyDictionary[Callable[..., Any], inspect.Signature] = WeakKeyDictionary()
"""Reading one takes longer than all the rest."""


def request_of(decide: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, whose: str) -> str:
    """The request that a decision with its arguments is; only its name where an argument has no canonical form.

    `whose` is the command's own id and its aggregate's: the same arguments of another command look different, so
    nobody sees who said the same, or finds short secrets in a table made in advance. Whoever reads the log and knows
    all but a few digits of the arguments can still try them, as with any digest.
    An argument that equals its parameter's default counts as not given, and names do not depend on how it was passed.
    """
    while isinstance(decide, partial):
        decide, args, kwargs = decide.func, (*decide.args, *args), {**decide.keywords, **kwargs}
    name = str(getattr(decide, "__name__", type(decide).__name__))
    try:
        told = json.dumps(_arguments(decide, args, kwargs), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return name
    digest = hashlib.blake2b(f"{whose}{told}".encode("utf-8", "surrogatepass"), digest_size=8)
    return f"{name}:{digest.hexdigest()}"


def request_in(block: bytes) -> str | None:
    """What the command of an event asked for, by its headers; None where that was not recorded."""
    told = header(block, REQUEST)
    return None if told is None else unquote(told)


def is_same_request(one: str, other: str) -> bool:
    """Whether two requests are the same, as far as both say what they were."""
    (name, _, digest), (other_name, _, other_digest) = one.partition(":"), other.partition(":")
    return name == other_name and (digest == other_digest or not digest or not other_digest)


def _arguments(decide: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of their parameters, in canonical form."""
    bound = _signature(decide).bind(None, *args, **kwargs)
    named: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        parameter = bound.signature.parameters[name]
        default = parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= {each: canonical(given) for each, given in cast("dict[str, Any]", value).items()}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            named[name] = canonical(value if index else value[1:])
        elif index and value is not default:  # the first is the state
            told = canonical(value)
            if type(value) is not type(default) or told != canonical(default):
                named[name] = told
    return named


def _signature(decide: Callable[..., Any]) -> inspect.Signature:
    try:
        known = _signatures.get(decide)
        if known is None:
            known = _signatures[decide] = inspect.signature(decide)
    except TypeError:  # it is neither hashed nor referred to weakly
        return inspect.signature(decide)
    return known


def canonical(value: Any) -> Any:
    """A value as JSON can tell it, equal for values that are; raises `TypeError` for what has no such form."""
    match value:
        case Enum():
            return canonical(value.value)
        case None | str() | bool() | int() | float():
            return value
        case Decimal():
            return str(value.normalize(_EXACT))
        case datetime() if value.tzinfo is not None:
            return in_utc(value).isoformat()
        case time() if value.tzinfo is not None and value.utcoffset() is None:
            return [value.isoformat(), str(value.tzinfo)]
        case date() | time():
            return value.isoformat()
        case timedelta():
            return [value.days, value.seconds, value.microseconds]
        case UUID() | PurePath():
            return str(value)
        case bytes() | bytearray():
            return b64encode(value).decode()
        case Mapping():
            return _in_order(
                [canonical(key), canonical(each)] for key, each in cast("Mapping[Any, Any]", value).items()
            )
        case AbstractSet():
            return _in_order(map(canonical, cast("AbstractSet[Any]", value)))
        case list() | tuple():
            return [canonical(each) for each in cast("list[Any]", value)]
        case _:
            return _fields(value)


def _fields(value: Any) -> Any:
    kind = cast("Any", type(value))
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value)]
    elif isinstance(getattr(kind, "model_fields", None), dict):
        names = list(cast("dict[str, Any]", kind.model_fields))
    else:
        raise TypeError(kind)
    return [kind.__name__, {name: canonical(getattr(value, name)) for name in names}]


def _in_order(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda told: json.dumps(told, sort_keys=True))
