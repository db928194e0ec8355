"""What a caller is told of an error, over NATS or HTTP. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eventjet.errors import (
    CommandReused,
    ConcurrencyConflict,
    NotUnique,
    OutcomeUnknown,
    Refused,
    StoreUnavailable,
    UsageError,
)

_DETAIL_MAX = 500
DOMAIN, INVALID, CONFLICT, UNAVAILABLE, UNKNOWN, INTERNAL = 422, 400, 409, 503, 504, 500

REUSED = ("command_id", "where", "version", "recorded", "asked")
"""What a `CommandReused` says, and is made of again."""
TAKEN = ("aggregate", "constraint", "aggregate_id")
"""What a caller is told of a `NotUnique`: not who has the value."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One error, as others may know it (RFC 9457 has the same fields)."""

    status: int
    type: str
    detail: str
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its facts, by name: members beside these (RFC 9457, section 3.2)."""


def problem(error: BaseException, errors: Sequence[type[Exception]] = ()) -> Problem:
    """Status, type and detail; `errors` are those of the domain that a caller may know, and of others nothing is told.

    For any framework: `raise HTTPException(problem(error).status, problem(error).detail)`.
    """
    if isinstance(error, NotUnique):
        facts = {name: getattr(error, name) for name in TAKEN}
        return Problem(CONFLICT, NotUnique.__name__, str(NotUnique(**facts, holder=None))[:_DETAIL_MAX], facts)
    kind = next((kind for kind in errors if isinstance(error, kind)), None)
    if kind is not None:
        return Problem(DOMAIN, kind.__name__, str(error)[:_DETAIL_MAX])
    if isinstance(error, CommandReused):
        facts = {name: getattr(error, name) for name in REUSED}
        return Problem(INVALID, CommandReused.__name__, str(error)[:_DETAIL_MAX], facts)
    if isinstance(error, Refused | UsageError):
        return Problem(INVALID, "Refused", str(error)[:_DETAIL_MAX])
    if isinstance(error, OutcomeUnknown):
        return Problem(UNKNOWN, "OutcomeUnknown", "It may be stored. Send it again with the same id.")
    if isinstance(error, ConcurrencyConflict):
        return Problem(CONFLICT, "ConcurrencyConflict", "Others were quicker, a hundred times. Try again.")
    if isinstance(error, StoreUnavailable):
        return Problem(UNAVAILABLE, "StoreUnavailable", "The log does not answer. Try again.")
    return Problem(INTERNAL, "Internal", "The service's log says what went wrong.")
