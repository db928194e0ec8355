"""Decisions, which are functions of a state: how they are called, their result, and `served`. PURE."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from eventjet.domain.aggregate import AggregateType
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import UsageError

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


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


def decided_on(decide: Callable[..., Any], state: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what a decision returns for a state and copies of the arguments, which a conflict may need again."""
    return decide(state, *own_copy(args, copies_unknown=False), **own_copy(dict(kwargs), copies_unknown=False))


def check_decision(decide: Any, aggregate: Any) -> None:
    """Raise `UsageError` for what is no decision function: a method of one state, a result, a name, a class."""
    members: dict[str, Any] = {**vars(aggregate)}
    methods = [name for name, value in members.items() if isfunction(value) and name[0] != "_" and name != "evolve"]
    name = methods[0] if methods else "decide"
    if isinstance(getattr(decide, "__self__", None), aggregate):
        name = decide.__name__
        description = f"`{name}` of one {aggregate.__name__}, whose state may be old"
    elif isinstance(decide, type) or not callable(decide):
        if isinstance(decide, str) and decide in methods:
            name, description = decide, "its name"
        else:
            description = (
                f"the class {shown_name(decide)}" if isinstance(decide, type) else f"a {type(decide).__name__}"
            )
    else:
        return
    raise UsageError(
        f"A decision is given as a function, which is called with the newest state, and this is {description}. "
        f"Write `execute(id, {aggregate.__name__}.{name}, …)`: the function of the class, then its arguments."
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A decision that callers may ask for, and the domain errors that are reported to them."""

    aggregate: Any
    decide: Callable[..., Any]
    errors: tuple[type[Exception], ...]
    name: str
    ignoring: Collection[str] = ()
    """Arguments that may be others when a command comes again under its id."""


def served(
    aggregate: AggregateType[S, E],
    decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
    /,
    *errors: type[Exception],
    name: str | None = None,
    ignoring: Collection[str] = (),
) -> Served:
    """Serve one decision to callers.

    Domain errors listed in `errors` are reported to callers by their class names; of other errors they learn nothing.
    `name` is the name of the decision for callers, by default that of the function. `ignoring` names arguments that may
    be others when a command comes again under its id, as in `Repository.command`.

    ```python
    withdrawing = served(Account, Account.withdraw, InsufficientFunds)
    assert withdrawing.name == "withdraw"
    ```
    """
    return Served(aggregate, decide, errors, name or str(getattr(decide, "__name__", decide)), ignoring)
