"""`Claims`: what a save takes and gives up of the values that are unique, as events in the same batch.

A claim's expected position is checked by the log as any other is, so of two saves that take one value only one lands,
whatever crashes between. What has no unique values, or changes none, costs nothing. See ADR 0032.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eventjet.codec.catalog import Catalog
from eventjet.domain.claim import CLAIM_EVENTS, Claim, ClaimEvent, Held
from eventjet.domain.unique import CLAIMS, Unique, changed_claims, register_id
from eventjet.errors import ConcurrencyConflict, NotUnique, Refused, UniqueNotBuilt, UsageError

if TYPE_CHECKING:
    from eventjet.commands.decisions import Decided
    from eventjet.commands.repository import Repository


def claim_catalog(catalog: Catalog) -> Catalog:
    """The events of claims, for readers who learn with those of `catalog` what the log declares void."""
    own = Catalog(dict.fromkeys(CLAIM_EVENTS, CLAIMS))
    own.voids = catalog.voids
    return own


class Claims:
    """The claims of one aggregate type on one connection."""

    def __init__(
        self, repository: Repository[Claim, ClaimEvent], aggregate: str, constraints: Sequence[Unique[Any]]
    ) -> None:
        self.repository = repository
        """Of the claims themselves."""
        self.aggregate = aggregate
        self.constraints = {one.name: one for one in constraints}
        self._built: set[str] = set()

    def forget(self) -> None:
        """Drop what is remembered: the stream may hold another past."""
        self.repository.cache.clear()
        self._built.clear()

    def named(self, constraint: str) -> Unique[Any]:
        """The constraint of a name; raises `UsageError`."""
        if constraint not in self.constraints:
            known = ", ".join(map(repr, self.constraints))
            raise UsageError(f"{self.aggregate!r} has no constraint {constraint!r}. It has {known}.")
        return self.constraints[constraint]

    async def is_built(self, constraint: str) -> bool:
        """Whether every value in use is claimed: the log says so, or has no aggregate of the type yet."""
        held = await self.repository.fresh(register_id(self.aggregate, constraint))
        if held.state.is_built is None:
            return await self.repository.histories.store.ends(self.aggregate) == (0, 0)
        return held.state.is_built

    async def build(self, constraint: str) -> None:
        """Say that every value in use is claimed."""
        await self.repository.execute(register_id(self.aggregate, constraint), Claim.build, self.aggregate, constraint)

    async def unbuild(self) -> None:
        """Say that aggregates are about to come whose values nobody claims; raises `Refused` where that is too late."""
        for constraint in self.constraints:

            def unbuild(register: Claim, constraint: str = constraint) -> ClaimEvent | None:
                if register.is_built:
                    raise Refused(
                        f"An import into {self.aggregate!r}",
                        f"its {constraint} is unique, and an import claims no values",
                        "Record them by commands. Before the first command, an import is taken; "
                        "`eventjet unique build` claims its values then.",
                    )
                return register.unbuild(self.aggregate, constraint)

            await self.repository.execute(register_id(self.aggregate, constraint), unbuild)

    async def opened(self, constraint: str, *, gains: bool) -> Decided[Claim, ClaimEvent] | ConcurrencyConflict | None:
        """What has to be recorded with the first event of the type; None for nothing.

        Raises `UniqueNotBuilt` where a save `gains` a value and not all of those in use are claimed.
        """
        if constraint in self._built:
            return None
        repository, register = self.repository, register_id(self.aggregate, constraint)
        held = await repository.fresh(register)
        if held.state.is_built:
            self._built.add(constraint)
            return None
        if held.state.is_built is None and await repository.histories.store.ends(self.aggregate) == (0, 0):
            plan = repository.decide(register, Claim.build, self.aggregate, constraint)
            return await repository.decided(plan, held)
        if conflict := await repository.outdated(register, held):
            return conflict
        if gains:
            raise UniqueNotBuilt(self.aggregate, constraint)
        return None


@dataclass(slots=True)
class _Move:
    """What becomes of one value in one save."""

    claims: Claims
    constraint: str
    by: Decided[Any, Any]
    released: list[str] = field(default_factory=list[str])
    takers: list[str] = field(default_factory=list[str])

    def decide(self, claim: Claim) -> list[ClaimEvent]:
        """Raises `Held`."""
        if len(self.takers) > 1:
            raise Held(self.takers[0])
        taker = self.takers[0] if self.takers else None
        return claim.move(self.claims.aggregate, self.constraint, self.released, taker)


async def claimed(decided: Sequence[Decided[Any, Any]]) -> list[Decided[Any, Any]] | ConcurrencyConflict:
    """What has to be recorded beside these decisions so that what is unique stays so; nothing for most.

    Raises `NotUnique` and `UniqueNotBuilt`, on the newest states.
    """
    with_claims = [one for one in decided if one.plan.repository.claims is not None]
    if not with_claims:
        return []
    try:
        return await _claimed(with_claims)
    except (NotUnique, UniqueNotBuilt):
        # It is true of these states; whether they are the newest, nothing has checked.
        for one in decided:
            if conflict := await one.plan.repository.outdated(one.plan.aggregate_id, one.held):
                return conflict
        raise


async def _claimed(decided: Sequence[Decided[Any, Any]]) -> list[Decided[Any, Any]] | ConcurrencyConflict:
    moves, touched = _moves(decided)
    found: list[Decided[Any, Any]] = []
    for (_, constraint), (claims, gains) in touched.items():
        opened = await claims.opened(constraint, gains=gains)
        if isinstance(opened, ConcurrencyConflict):
            return opened
        found += [opened] if opened is not None else []
    for moved in await asyncio.gather(*(_moved(one, move) for one, move in moves.items())):
        if isinstance(moved, ConcurrencyConflict):
            return moved
        found.append(moved)
    return found


def _moves(
    decided: Sequence[Decided[Any, Any]],
) -> tuple[Mapping[str, _Move], Mapping[tuple[str, str], tuple[Claims, bool]]]:
    """By id of the claim what becomes of it; by aggregate and constraint whether a value is gained."""
    moves: dict[str, _Move] = {}
    touched: dict[tuple[str, str], tuple[Claims, bool]] = {}
    for one in decided:
        claims = one.plan.repository.claims
        for constraint in () if claims is None else claims.constraints.values():
            assert claims is not None
            lost, gained = changed_claims(claims.aggregate, constraint, one.held.state, one.state)
            key = claims.aggregate, constraint.name
            if gained or one.held.version == 0:
                touched[key] = claims, bool(gained) or touched.get(key, (claims, False))[1]
            for claim in sorted(lost | gained):
                move = moves.setdefault(claim, _Move(claims, constraint.name, one))
                (move.takers if claim in gained else move.released).append(one.plan.aggregate_id)
    return moves, touched


async def _moved(claim: str, move: _Move) -> Decided[Claim, ClaimEvent] | ConcurrencyConflict:
    claims, repository = move.claims, move.claims.repository
    plan = replace(repository.decide(claim, move.decide), metadata=move.by.plan.metadata)
    try:
        return await repository.decided(plan, await repository.fresh(claim))
    except Held as held:
        # `decided` has made sure that the claim is the newest.
        raise NotUnique(claims.aggregate, move.constraint, move.takers[-1], held.holder) from None
