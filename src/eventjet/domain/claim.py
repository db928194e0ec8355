"""`Claim`, eventjet's own aggregate that records who has a unique value; its events are in the log like all others.

The same class serves as the register of a constraint, which records whether every value in use is claimed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from eventjet.domain.aggregate import aggregate, event
from eventjet.domain.unique import CLAIMS


class AlreadyClaimed(Exception):
    """Raised when another aggregate already has the value."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


@event("eventjet.unique_taken")
class Taken:
    """The event that an aggregate has a value from now on."""

    aggregate: str
    constraint: str
    holder: str
    """The id of the aggregate that has the value."""


@event("eventjet.unique_released")
class Released:
    """The event that an aggregate no longer has a value."""

    aggregate: str
    constraint: str
    holder: str
    """The id of the aggregate that had the value."""


@event("eventjet.unique_built")
class Built:
    """The event that every value in use is claimed: from now on the constraint is enforced."""

    aggregate: str
    constraint: str


@event("eventjet.unique_unbuilt")
class Unbuilt:
    """The event that values in use may be unclaimed, because an import began."""

    aggregate: str
    constraint: str


ClaimEvent = Taken | Released | Built | Unbuilt
CLAIM_EVENTS: tuple[type, ...] = (Taken, Released, Built, Unbuilt)


@aggregate(CLAIMS)
class Claim:
    """The state of one unique value, or of the register of one constraint."""

    holders: frozenset[str] = frozenset()
    """Ids of the aggregates that have the value; more than one only if they had it before the constraint was built."""
    is_built: bool | None = None
    """For a register, whether all values in use are claimed; None when that was never recorded."""

    def move(self, aggregate: str, constraint: str, released: Collection[str], taker: str | None) -> list[ClaimEvent]:
        """Release the value for the ids in `released` and claim it for `taker`; raises `AlreadyClaimed`.

        Each change is recorded even if the claim already says so. A save that changes a value always appends to its
        claim, so a comparison of claims with states can tell that nothing was recorded in between.
        """
        events: list[ClaimEvent] = [*(self.release(aggregate, constraint, holder) for holder in released)]
        if taker is not None:
            other_holders = self.holders.difference(released, [taker])
            if other_holders:
                raise AlreadyClaimed(min(other_holders))
            events.append(self.take(aggregate, constraint, taker))
        return events

    def take(self, aggregate: str, constraint: str, holder: str) -> Taken:
        """Claim the value for an aggregate, without checking whether another has it."""
        return Taken(aggregate=aggregate, constraint=constraint, holder=holder)

    def release(self, aggregate: str, constraint: str, holder: str) -> Released:
        """Release the claim of an aggregate that does not have the value."""
        return Released(aggregate=aggregate, constraint=constraint, holder=holder)

    def build(self, aggregate: str, constraint: str) -> Built | None:
        return None if self.is_built else Built(aggregate=aggregate, constraint=constraint)

    def unbuild(self, aggregate: str, constraint: str) -> Unbuilt | None:
        return None if self.is_built is False else Unbuilt(aggregate=aggregate, constraint=constraint)

    def evolve(self, event: ClaimEvent) -> Claim:
        match event:
            case Taken(holder=holder):
                return replace(self, holders=self.holders | {holder})
            case Released(holder=holder):
                return replace(self, holders=self.holders - {holder})
            case Built():
                return replace(self, is_built=True)
            case Unbuilt():
                return replace(self, is_built=False)
