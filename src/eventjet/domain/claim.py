"""`Claim`: who has a unique value, as an aggregate of eventjet's own; its events stand in the log as any others do.

The same state serves the register of a constraint, which says whether every value in use is claimed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from eventjet.domain.aggregate import aggregate, event
from eventjet.domain.unique import CLAIMS


class Held(Exception):
    """Another aggregate has the value."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


@event("eventjet.unique_taken")
class Taken:
    """An aggregate has a value from here on."""

    aggregate: str
    constraint: str
    holder: str
    """Its id."""


@event("eventjet.unique_released")
class Released:
    """An aggregate has a value no longer."""

    aggregate: str
    constraint: str
    holder: str
    """Its id."""


@event("eventjet.unique_built")
class Built:
    """Every value in use is claimed: from here on the constraint is kept."""

    aggregate: str
    constraint: str


@event("eventjet.unique_unbuilt")
class Unbuilt:
    """There may be values in use that nobody has claimed: an import was begun."""

    aggregate: str
    constraint: str


ClaimEvent = Taken | Released | Built | Unbuilt
CLAIM_EVENTS: tuple[type, ...] = (Taken, Released, Built, Unbuilt)


@aggregate(CLAIMS)
class Claim:
    """One value, or the register of one constraint."""

    holders: frozenset[str] = frozenset()
    """Ids of those who have the value: one, or none; several that had it before the constraint was built."""
    is_built: bool | None = None
    """Of a register: whether all values in use are claimed; None where nobody said."""

    def move(self, aggregate: str, constraint: str, released: Collection[str], taker: str | None) -> list[ClaimEvent]:
        """Some give the value up and one takes it; raises `Held`.

        Each is recorded, whether or not the claim says so already: what changes a value moves its claim, so that
        whoever compares claims with states can tell that nothing came in between.
        """
        events: list[ClaimEvent] = [*(self.release(aggregate, constraint, one) for one in released)]
        if taker is not None:
            others = self.holders.difference(released, [taker])
            if others:
                raise Held(min(others))
            events.append(self.take(aggregate, constraint, taker))
        return events

    def take(self, aggregate: str, constraint: str, holder: str) -> Taken:
        """One has the value that had it before it was claimed, whoever has it as well."""
        return Taken(aggregate=aggregate, constraint=constraint, holder=holder)

    def release(self, aggregate: str, constraint: str, holder: str) -> Released:
        """One claims the value and does not have it."""
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
