"""Decisions, which are functions of a state: how they are checked and called, their result, and `served`. PURE."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.domain.aggregate import AggregateType, aggregate_info, is_event
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import DefinitionError, UsageError
from eventjet.text import listed, shown

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")

_NO_DECISIONS = {"evolve", "step", "deadline"}
"""Methods of aggregates and processes that are never decisions."""


@dataclass(frozen=True, slots=True)
class Committed(Generic[S, E]):
    """The result of a decision, returned by `Repository.execute` and `Jet.transact`."""

    state: S
    """The state after its events."""
    events: tuple[E, ...]
    """The recorded events; empty when the decision returned none."""
    position: int
    """Position of the aggregate's last event; hand it to `caught_up` to read your write."""
    version: int
    """Version of the aggregate's last event."""
    app: str = field(repr=False)
    """The name of the app whose log was written."""
    log: str = field(default="", repr=False)
    """The stream identity of the log; empty where these credentials may not read the stream's info."""
    confirmed: bool = True
    """Whether a majority of the log's replicas stored an event for this result.

    False when nothing was recorded: then only the stream's leader said that the state is the newest, and a leader
    that is cut off from its replicas does not know that there is another.
    """

    @property
    def token(self) -> str:
        """Return app, position and log as text for an HTTP header; `caught_up` takes it in another process.

        For instance `bank:1234@0b6f3c1e-5d2a-4f0e-9a64-2f6a1c8e7d11`.
        """
        return f"{self.app}:{self.position}{self.log and '@'}{self.log}"


def check_decision(aggregate: Any, decide: Any, aggregate_id: object = "") -> None:
    """Raise `UsageError` for a value that cannot be a decision of an aggregate: a name, an event, a bound method."""
    if type(decide) is types.FunctionType:
        return
    if isinstance(aggregate_id, types.FunctionType):
        name = shown_name(aggregate_id)
        raise UsageError(f'The decision {name} stands where the id belongs. Give the id first: ("a-1", {name}, …).')
    is_bound = isinstance(decide, types.MethodType) and type(decide.__self__) is aggregate
    if callable(decide) and not is_bound and not is_event(decide):
        return
    owner, members = shown_name(aggregate), cast("dict[str, Any]", vars(aggregate))
    decisions = [
        f"{owner}.{name}"
        for name, value in members.items()
        if isinstance(value, types.FunctionType) and not name.startswith("_") and name not in _NO_DECISIONS
    ]
    what = shown(decide, 60) if isinstance(decide, str) else shown_name(decide if is_event(decide) else type(decide))
    raise UsageError(
        f"{what} is no decision of {owner}. Hand over the function itself, uncalled and bound to no state, and its "
        f"arguments after it: {listed(decisions)}."
    )


def decided_on(aggregate: Any, decide: Callable[..., Any], state: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what a decision returns for a state; raises what it raises, and `UsageError` for unfit arguments."""
    try:
        # Copies: after a conflict the decision runs again and must get the arguments it got the first time.
        return decide(state, *own_copy(args, whole=False), **own_copy(dict(kwargs), whole=False))
    except (TypeError, AttributeError) as error:
        trace = error.__traceback__
        if isinstance(error, TypeError) and trace is not None and trace.tb_next is None:
            raise UsageError(_misfit(decide, error)) from None
        owner = _owner(decide)
        if owner is not None and owner is not aggregate:
            aggregate_name, owner_name = shown_name(aggregate), shown_name(owner)
            raise UsageError(
                f"{shown_name(decide)} decides on {owner_name}, and was given the state of {aggregate_name}. Hand over "
                f"a decision of {aggregate_name}, or take `repository({owner_name})`."
            ) from error
        raise


def _misfit(decide: Callable[..., Any], error: TypeError) -> str:
    """Return the message for a decision that could not be called because its arguments do not fit its parameters."""
    names = list(inspect.signature(decide).parameters)
    if not names:
        return f"{shown_name(decide)} takes no state. Write the state as its first parameter, `self` in a method."
    return (
        f"{shown_name(decide)} cannot be called so: {error}, counting the state, which it is given as `{names[0]}`. "
        "Give the arguments after the decision as the rest of its parameters asks for them."
    )


def _owner(decide: Any) -> Any:
    """Return the aggregate that a function is a method of, if the aggregate is defined at the top of its module."""
    name = getattr(decide, "__qualname__", "").rpartition(".")[0]
    owner = getattr(decide, "__globals__", {}).get(name)
    try:
        aggregate_info(owner)
    except DefinitionError:
        return None
    return owner


@dataclass(frozen=True, slots=True)
class Served:
    """A decision that callers may ask for, and the domain errors that are reported to them."""

    aggregate: Any
    decide: Callable[..., Any]
    errors: tuple[type[Exception], ...]
    name: str


def served(
    aggregate: AggregateType[S, E],
    decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
    /,
    *errors: type[Exception],
    name: str | None = None,
) -> Served:
    """Serve one decision to callers.

    Domain errors listed in `errors` are reported to callers by their class names; of other errors they learn nothing.
    `name` is the name of the decision for callers, by default that of the function. Raises `UsageError` for a value
    that is not a decision.

    ```python
    withdrawing = served(Account, Account.withdraw, InsufficientFunds)
    assert withdrawing.name == "withdraw"
    ```
    """
    check_decision(aggregate, decide)
    return Served(aggregate, decide, errors, name or str(getattr(decide, "__name__", decide)))
