"""Read which events a function takes from the annotations in its signature: the annotation is the subscription."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import PurePath
from typing import Any

from eventjet.domain.recorded import Recorded
from eventjet.errors import DefinitionError


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, flattened, in order, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(dict.fromkeys(member for part in typing.get_args(hint) for member in union_members(part)))
    return () if hint is type(None) else (hint,)


def events_of(function: Any, parameter: str = "event") -> tuple[type, ...]:
    """Return the event classes in the annotation of `parameter`, without `Recorded[…]`; raises `DefinitionError`."""
    hint = resolved_hint(function, parameter)
    if typing.get_origin(hint) is Recorded:
        (hint,) = typing.get_args(hint)
    elif hint is Recorded:
        raise DefinitionError(
            [f"{shown_name(function)}: write the events it takes, as in `{parameter}: Recorded[Opened]`"]
        )
    return union_members(hint)


def recorded_events_of(function: Any, parameter: str = "") -> tuple[type, ...]:
    """Return the event classes in a parameter's `Recorded[…]` annotation; raises `DefinitionError` without one."""
    parameter = parameter or next(iter(inspect.signature(function).parameters), "event")
    events = events_of(function, parameter)
    if typing.get_origin(resolved_hint(function, parameter)) is not Recorded:
        names = " | ".join(shown_name(event) for event in events)
        raise DefinitionError([f"{shown_name(function)} is given a `Recorded`: write `{parameter}: Recorded[{names}]`"])
    return events


def folded_events(aggregate: Any) -> tuple[type, ...]:
    """Return the event classes that an aggregate's `evolve` takes as its second parameter; raises `DefinitionError`."""
    names = list(inspect.signature(aggregate.evolve).parameters)
    return events_of(aggregate.evolve, names[1] if len(names) > 1 else "event")


def resolved_hint(function: Any, parameter: str, *, include_extras: bool = False) -> Any:
    """Return an annotation as an object (`return` for the result); raises `DefinitionError` if it is unresolvable.

    `include_extras` keeps what `Annotated` adds, such as limits.
    """
    raw = raw_annotations(function)
    if parameter not in raw:
        fault = f"its parameter `{parameter}` has no annotation; name what it takes"
        if parameter == "return":
            fault = "its return annotation is missing; say what it returns, as in `-> Balance | None:`"
        raise DefinitionError([f"{shown_name(function)}: {fault}{_place(function)}"])
    try:
        return annotation(function, parameter, raw[parameter], include_extras=include_extras)
    except NameError as error:
        which = "the return annotation" if parameter == "return" else f"the annotation of `{parameter}`"
        fault = (
            f"{shown_name(function)}{_place(function)}: {which} names {error.name!r}, which cannot be found "
            "where the function is defined; import it for real (not under TYPE_CHECKING) and at module level"
        )
        raise DefinitionError([fault]) from None


def raw_annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function, or of a class without its bases, as they are before they are resolved."""
    if sys.version_info >= (3, 14):
        import annotationlib

        # Evaluated only now; a name that cannot be found becomes a forward reference, as it is in a text.
        return dict(annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF))
    return inspect.get_annotations(owner) if callable(owner) else {}


def annotation(function: Any, parameter: str, raw: Any, *, include_extras: bool = False) -> Any:
    """Return `raw` as an object, resolved in the function's scope; raises whatever its expression raises.

    A wrapper made with `functools.wraps` has the annotations of the function that it wraps, so that one's scope counts.
    """
    function = inspect.unwrap(function) if callable(function) else function
    probe = types.SimpleNamespace(__annotations__={parameter: raw})
    scope = getattr(function, "__globals__", {})
    hints = typing.get_type_hints(probe, globalns=scope, localns=_closure(function), include_extras=include_extras)
    return hints[parameter]


def is_plain(function: Any) -> bool:
    """Return whether a call of a function returns its result: it is not async and no generator."""
    return not any(
        is_other(function)
        for is_other in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    )


def is_called_with(function: Any, count: int) -> bool:
    """Return whether a function has this many parameters, all of which may be given by position."""
    parameters = inspect.signature(function).parameters.values()
    return len(parameters) == count and all(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def _place(function: Any) -> str:
    """Return where a function is defined, as ` (bank.py, line 54)`; empty if that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, types.CodeType):
        return ""
    return f" ({PurePath(code.co_filename).name}, line {code.co_firstlineno})"


def _closure(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False) if _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is how one finds out
    except ValueError:
        return False
    return True


def shown_name(thing: Any) -> str:
    """Return the name of a function or a class for messages."""
    return str(getattr(thing, "__qualname__", thing))
