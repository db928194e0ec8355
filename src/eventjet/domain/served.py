"""Which decisions are served as commands over the wire. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from eventjet.domain.aggregate import AggregateType
from eventjet.domain.decision import check_decision

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Served:
    """One decision, and the errors of the domain that callers are told."""

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
    """Serve one decision. These errors of the domain are told to callers by their names; of others nothing is told.

    Raises `UsageError` for what is no decision.

    ```python
    withdrawing = served(Account, Account.withdraw, InsufficientFunds)
    assert withdrawing.name == "withdraw"
    ```
    """
    check_decision(aggregate, decide)
    return Served(aggregate, decide, errors, name or str(getattr(decide, "__name__", decide)))
