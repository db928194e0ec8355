"""Encode the arguments of commands, and identify what a command asked for. PURE.

`Arguments` encodes the arguments of a served decision as an object by parameter name, in the JSON profile of events. A
*request* identifies a command in few bytes, by its decision's name and a digest of its arguments, as `deposit:6f1c…`.
It is recorded with the events of a command that has an id, so that a reuse of the id for another request is noticed. It
is the same in every process and release, as long as decision and parameters keep their names and the arguments their
types.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import combinations, islice, product
from pathlib import PurePath
from typing import Any, NamedTuple, cast
from urllib.parse import unquote
from uuid import UUID
from weakref import WeakKeyDictionary

from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.errors import PydanticUserError

from eventjet.codec.bodies import BodyCodec
from eventjet.codec.headers import REQUEST, header
from eventjet.codec.shape import shape_of
from eventjet.codec.unions import union_faults
from eventjet.domain.blob import blobs_in, holds_blobs, source_of
from eventjet.domain.moment import in_utc
from eventjet.domain.state import field_names
from eventjet.domain.subscription import resolved_hint, shown_name
from eventjet.errors import DefinitionError, UsageError
from eventjet.text import listed

_UNNAMED = {
    inspect.Parameter.POSITIONAL_ONLY: "{}, /",
    inspect.Parameter.VAR_POSITIONAL: "*{}",
    inspect.Parameter.VAR_KEYWORD: "**{}",
}
"""Parameters that cannot be given by their name, each as it is written."""
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Context in which `Decimal.normalize` removes trailing zeros and rounds nothing."""
_sorted_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_signatures: WeakKeyDictionary[Callable[..., Any], inspect.Signature] = WeakKeyDictionary()
"""A cache of signatures, since reading a signature takes longer than all the rest of `request_of`."""


class Arguments:
    """The codec of a decision's arguments, strict both ways: values of other types and unknown names are refused."""

    def __init__(self, decide: Callable[..., Any]) -> None:
        """Build the codec; raises `DefinitionError` for a decision whose parameters cannot be encoded."""
        self._signature = inspect.signature(decide)
        _, *parameters = self._signature.parameters.values()
        bare: dict[str, Any] = {"__annotations__": {}, "__module__": decide.__module__}
        for parameter in parameters:
            if parameter.kind in _UNNAMED:
                reason = (
                    "cannot be served, since arguments travel by name: take a parameter with a name, such as a tuple"
                )
                raise DefinitionError(
                    [f"{shown_name(decide)} takes {_UNNAMED[parameter.kind].format(parameter.name)}, which {reason}"]
                )
            bare["__annotations__"][parameter.name] = resolved_hint(decide, parameter.name, include_extras=True)
            if parameter.default is not parameter.empty:
                bare[parameter.name] = parameter.default
        decorate = pydantic_dataclass(
            frozen=True, kw_only=True, config={"strict": True, "extra": "forbid", "hide_input_in_errors": True}
        )
        try:
            self._type: Any = decorate(type(str(getattr(decide, "__name__", "arguments")), (), bare))
            self._codec = BodyCodec(self._type)
        except (PydanticUserError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DefinitionError([f"{shown_name(decide)} cannot be served: {reason}"]) from None
        if faults := union_faults(self._codec.schema, shown_name(decide)):
            raise DefinitionError(faults)
        self._has_blobs = holds_blobs(self._codec.schema)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Encode a call's arguments; raises `TypeError`, `ValueError` or `UnencodableEvent` if they do not fit.

        A `Blob` with its content does not fit: only the reference travels.
        """
        bound = self._signature.bind(None, *args, **kwargs).arguments
        by_name = dict(list(bound.items())[1:])
        if self._has_blobs:
            with_content = (
                path
                for name, value in by_name.items()
                for path, blob in blobs_in(value, name)
                if source_of(blob) is not None
            )
            if (path := next(with_content, None)) is not None:
                raise ValueError(
                    f"the content of {path} does not travel with a request. Store it first over a connection of the "
                    "app, with `await jet.blobs.put(content)`, and give the `Blob` that it returns"
                )
        return self._codec.read_back(self._type(**by_name))[0]

    def decode(self, body: bytes) -> dict[str, Any]:
        """Return the arguments by name; raises `ValueError` for a body that does not fit, or repeats a name."""
        json.loads(body or b"{}", object_pairs_hook=_check_names)
        arguments = self._codec.decode(body or b"{}")
        return {field.name: getattr(arguments, field.name) for field in fields(arguments)}

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments, with the profile's leaves: a Decimal is a string."""
        return shape_of(self._type)


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """Raise `ValueError` for a repeated name: parsers disagree which value counts (RFC 8259, section 4)."""
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"the name {name[:100]!r} comes twice")
        names.add(name)


@lru_cache(maxsize=1_000)
def arguments_of(decide: Callable[..., Any]) -> Arguments:
    """Return the codec of a decision's arguments, built once for each decision; raises `DefinitionError`."""
    return Arguments(decide)


class Request(NamedTuple):
    """What a command asks for: a decision with its arguments."""

    text: str
    """The decision's name and a digest of its arguments; only the name if an argument has no canonical form."""
    decide: Callable[..., Any]
    arguments: Mapping[str, Any] | None
    """The arguments by name in canonical form, without those that equal their defaults; None where one has no form."""
    whose: str
    former: str = ""
    """What an earlier release recorded, if that is another text: it left undeclared values of models out."""


class _Undeclared(list[Any]):
    """The canonical form of a model that keeps values which it does not declare: they are its last item."""


def request_of(
    decide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    whose: str,
    ignoring: Collection[str] = (),
) -> Request:
    """Return the request of a decision with its arguments; only its name if an argument has no canonical form.

    `whose` is the ids of the command and of its aggregate, a salt of the digest: equal arguments of two commands have
    different digests, so nobody can see that they are equal, or find short secrets in a precomputed table. A reader of
    the log who knows all but a few digits of the arguments can still try them, as with any digest. An argument that
    equals its parameter's default counts as not given, and it does not matter whether it is passed by name. Arguments
    in `ignoring` count as not given. Raises `UsageError` for a name in `ignoring` that the decision does not have.
    """
    while isinstance(decide, partial):
        decide, args, kwargs = decide.func, (*decide.args, *args), {**decide.keywords, **kwargs}
    name = str(getattr(decide, "__name__", type(decide).__name__))
    if ignoring:
        ignoring = checked_names(decide, ignoring)
    try:
        arguments = _arguments(decide, args, kwargs, ignoring)
        declared = _without_undeclared(arguments)
        former = "" if declared == arguments else f"{name}:{_digest(whose, declared)}"
        return Request(f"{name}:{_digest(whose, arguments)}", decide, arguments, whose, former)
    except Exception:  # noqa: BLE001 - reading a value of the application may raise anything
        return Request(name, decide, None, whose)


def checked_names(decide: Callable[..., Any], ignoring: Collection[str]) -> Collection[str]:
    """Return names of arguments to leave out of a request; raises `UsageError` for one that the decision lacks."""
    ignoring = (ignoring,) if isinstance(ignoring, str) else ignoring
    parameters = list(_signature(decide).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if len(names) == len(parameters):
        for name in ignoring:
            if name not in names:
                remedy = f"Its arguments are {listed(names)}." if names else "It has no arguments."
                raise UsageError(f"{shown_name(decide)} has no argument {name!r} that could be ignored. {remedy}")
    return ignoring


def _digest(whose: str, arguments: Mapping[str, Any]) -> str:
    text = f"{whose}{_sorted_json(arguments)}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def request_in(block: bytes) -> str | None:
    """Return the request of the command that recorded an event, from its headers; None if it was not recorded."""
    quoted = header(block, REQUEST)
    return None if quoted is None else unquote(quoted)


def is_same_request(first: str, second: str) -> bool:
    """Return whether two requests are the same; without a digest on both sides, only the names are compared."""
    (name, _, digest), (other_name, _, other_digest) = first.partition(":"), second.partition(":")
    return name == other_name and (digest == other_digest or not digest or not other_digest)


def differing_arguments(request: Request, recorded: str, events: Iterable[Any]) -> Sequence[str]:
    """Return the names of the arguments in which a request differs from a recorded one, as far as that can be proved.

    The recorded digest says only that some argument differs. But most arguments are recorded in the command's events.
    So values of these events take the places of arguments until the digest is the recorded one, which proves it. Empty
    if nothing is proved, and for another decision.
    """
    name, _, digest = recorded.partition(":")
    if request.arguments is None or not digest or name != request.text.partition(":")[0]:
        return ()
    names = list(dict.fromkeys([*list(_signature(request.decide).parameters)[1:], *request.arguments]))
    candidates = [_NOT_GIVEN, None, True, False, *islice(_forms_in(events), _FORMS_MAX)]
    substitutions = (
        (changed, values)
        for count in range(1, len(names) + 1)
        for changed in combinations(names, count)
        for values in product(candidates, repeat=count)
    )
    size = len(_sorted_json(request.arguments))
    for changed, values in islice(substitutions, min(_TRIES_MAX, _ENCODED_MAX // size)):
        changes = zip(changed, values, strict=True)
        arguments = {
            name: value for name, value in {**request.arguments, **dict(changes)}.items() if value is not _NOT_GIVEN
        }
        if _digest(request.whose, arguments) == digest:
            return changed
    return names if len(names) == 1 else ()


_NOT_GIVEN = object()
_FORMS_MAX = 100
_TRIES_MAX = 5_000
"""Digests computed to find the arguments that differ, at most: some hundredths of a second."""
_ENCODED_MAX = 2_000_000
"""Characters encoded for these digests, at most: large arguments get fewer of them."""


def _forms_in(events: Iterable[Any]) -> Iterable[Any]:
    """Yield the values in events in canonical form, from the outside in."""
    forms: list[Any] = []
    for event in events:
        with suppress(TypeError, ValueError, RecursionError):
            forms.append(canonical(event)[1])
    for form in forms:
        yield form
        if isinstance(form, dict):
            forms += cast("dict[str, Any]", form).values()
        elif isinstance(form, list):
            forms += cast("list[Any]", form)


def _arguments(
    decide: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], ignoring: Collection[str] = ()
) -> dict[str, Any]:
    """Return the arguments by the names of their parameters, in canonical form, without ignored ones."""
    bound = _signature(decide).bind(None, *args, **kwargs)
    by_name: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        if name in ignoring:
            continue
        parameter = bound.signature.parameters[name]
        default = parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            for key, item in cast("dict[str, Any]", value).items():
                if key not in ignoring:
                    # A positional-only parameter may have the same name.
                    by_name[f"**{key}" if key in by_name else key] = canonical(item)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            by_name[name] = canonical(value if index else value[1:])
        elif index and value is not default:  # the first is the state
            form = canonical(value)
            if type(value) is not type(default) or form != canonical(default):
                by_name[name] = form
    return by_name


def _signature(decide: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = _signatures.get(decide)
        if signature is None:
            signature = _signatures[decide] = inspect.signature(decide)
    except TypeError:  # the function has no hash, or no weak references
        return inspect.signature(decide)
    return signature


def canonical(value: Any) -> Any:
    """Return a value as JSON data, equal for equal values; raises `TypeError` for a value without such a form."""
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
        case UUID() | PurePath() | Fraction() | IPv4Address() | IPv6Address() | IPv4Network() | IPv6Network():
            return str(value)
        case bytes() | bytearray():
            return b64encode(value).decode()
        case Mapping():
            return _in_order(
                [canonical(key), canonical(item)] for key, item in cast("Mapping[Any, Any]", value).items()
            )
        case AbstractSet():
            return _in_order(map(canonical, cast("AbstractSet[Any]", value)))
        case list() | tuple() | deque():
            return [canonical(item) for item in cast("list[Any]", value)]
        case _:
            return _fields(value)


def _fields(value: Any) -> Any:
    kind = cast("Any", type(value))
    if not (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "model_fields")):
        raise TypeError(kind)
    form = [kind.__name__, {name: canonical(getattr(value, name)) for name in field_names(kind)}]
    undeclared = getattr(value, "__pydantic_extra__", None)
    return _Undeclared([*form, canonical(undeclared)]) if undeclared else form


def _without_undeclared(form: Any) -> Any:
    """Return a canonical form without the undeclared values of models."""
    if isinstance(form, dict):
        return {name: _without_undeclared(item) for name, item in cast("dict[str, Any]", form).items()}
    if not isinstance(form, list):
        return form
    items = cast("list[Any]", form)
    return list(map(_without_undeclared, items[:-1] if isinstance(form, _Undeclared) else items))


def _in_order(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: json.dumps(value, sort_keys=True))
