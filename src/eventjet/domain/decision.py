"""What is handed over as a decision: a function of the state, checked before it is called. PURE."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from eventjet.domain.aggregate import aggregate_info, is_event
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import DefinitionError, UsageError
from eventjet.shown import shown
from eventjet.spelling import listed, meant

_NO_DECISIONS = {"evolve", "step", "deadline"}
"""Methods of aggregates and processes that have a place of their own."""


def check_decision(aggregate: Any, decide: Any, aggregate_id: object = "") -> None:
    """Raise `UsageError` for what cannot be a decision of an aggregate: a name, an event, a bound method."""
    if type(decide) is types.FunctionType:
        return
    if isinstance(aggregate_id, types.FunctionType):
        name = shown_name(aggregate_id)
        raise UsageError(f'The decision {name} stands where the id belongs. Give the id first: ("a-1", {name}, …).')
    owner = shown_name(aggregate)
    members: dict[str, Any] = dict(aggregate.__dict__)
    known = [
        each
        for each, value in members.items()
        if isinstance(value, types.FunctionType) and not each.startswith("_") and each not in _NO_DECISIONS
    ]
    named = listed(f"{owner}.{one}" for one in known)
    remedy = f"Hand over the function itself, uncalled, and its arguments after it: {named}."
    if isinstance(decide, str):
        name = decide.rpartition(".")[2]
        is_known = name in known
        remedy = f"Hand over the function itself: {owner}.{name}." if is_known else f"{meant(name, known)}{remedy}"
        raise UsageError(f"The decision is given as the text {shown(decide, 60)}. {remedy}")
    if isinstance(decide, types.MethodType) and type(decide.__self__) is aggregate:
        raise UsageError(
            f"The decision {decide.__name__!r} is bound to one state of {owner}, and it is called with the newest "
            f"state. Hand over the function: {owner}.{decide.__name__}."
        )
    if is_event(decide) or is_event(type(decide)):
        kind = decide if isinstance(decide, type) else type(decide)
        raise UsageError(f"The event {shown_name(kind)} stands where the decision that returns it belongs. {remedy}")
    if not callable(decide):
        what = "None" if decide is None else f"a value of {shown_name(type(decide))}"
        raise UsageError(f"The decision is given as {what}, which cannot be called. {remedy}")


def decided_on(aggregate: Any, decide: Callable[..., Any], state: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a decision says on a state; raises what it raises, and `UsageError` where it cannot be called so."""
    try:
        # Made again after a lost race, it is given what it was given first.
        return decide(state, *own_copy(args, whole=False), **own_copy(dict(kwargs), whole=False))
    except (TypeError, AttributeError) as error:
        trace = error.__traceback__
        if isinstance(error, TypeError) and trace is not None and trace.tb_next is None:
            raise UsageError(_misfit(decide, error)) from None
        other = _owner(decide)
        if other is not None and other is not aggregate:
            mine, theirs = shown_name(aggregate), shown_name(other)
            raise UsageError(
                f"{shown_name(decide)} decides on {theirs}, and was given the state of {mine}. Hand over a decision of "
                f"{mine}, or take `repository({theirs})`."
            ) from error
        raise


def _misfit(decide: Callable[..., Any], error: TypeError) -> str:
    """It was not even entered: what it was given does not fit its parameters."""
    names = list(inspect.signature(decide).parameters)
    if not names:
        return f"{shown_name(decide)} takes no state. Write the state as its first parameter, `self` in a method."
    return (
        f"{shown_name(decide)} cannot be called so: {error}, counting the state, which it is given as `{names[0]}`. "
        "Give the arguments after the decision as the rest of its parameters asks for them."
    )


def _owner(decide: Any) -> Any:
    """The aggregate that a function is a method of, where it is defined at the top of its module."""
    name = getattr(decide, "__qualname__", "").rpartition(".")[0]
    found = getattr(decide, "__globals__", {}).get(name)
    try:
        aggregate_info(found)
    except DefinitionError:
        return None
    return found
