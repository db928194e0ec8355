"""Unique values: claim and release them by events in the batch of a save, and check the claims against the states.

The log checks the expected position of a claim like any other, so of two saves that claim the same value only one is
stored, whatever crashes meanwhile. Commands that change no unique value cost nothing. See ADR 0032.

`check_claims` compares the claims with the states of the aggregates, and may correct them. It goes through every claim
of a constraint and every aggregate of its type. Every change of a value also writes an event to its claim (see
`Claim.move`). So if a claim did not change while the state was read, the comparison is right even during writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import VERSION, number_of
from eventjet.codec.subjects import entity_of
from eventjet.commands.execute import Conflict, Decision, Executor, Planned, append, execute, retry
from eventjet.domain.claim import CLAIM_EVENTS, AlreadyClaimed, Claim, ClaimEvent
from eventjet.domain.history import FoldedState
from eventjet.domain.unique import CLAIMS, Unique, changed_claims, claims_of, register_id
from eventjet.errors import (
    CodecError,
    HistoryBroken,
    LogIncomplete,
    NotUnique,
    Refused,
    StoreUnavailable,
    UniqueNotBuilt,
    UsageError,
)
from eventjet.log.store import LAG_PAUSES_S

AT_ONCE = 64
"""Aggregates that are checked concurrently."""
EXAMPLES_MAX = 20
"""Mismatches of each kind that are listed; further mismatches are only counted."""


class UniqueValues:
    """The claims of one aggregate type on one connection."""

    def __init__(self, aggregates: Executor[Any, Any]) -> None:
        catalog = Catalog(dict.fromkeys(CLAIM_EVENTS, CLAIMS))
        catalog.skipped = aggregates.catalog.skipped  # both executors share the skip markers that either reads
        self.claims: Executor[Claim, ClaimEvent] = Executor(aggregates.app, aggregates.store, catalog, Claim)
        self.aggregates = aggregates
        self.aggregate = aggregates.info.name
        self.constraints = {constraint.name: constraint for constraint in aggregates.info.unique}
        self._built_constraints: set[str] = set()
        aggregates.claims = self.claims_of_save

    def forget(self) -> None:
        """Drop cached claims and registers, because the stream may have another history now."""
        self.claims.cache.clear()
        self._built_constraints.clear()

    def constraint(self, name: str) -> Unique[Any]:
        """Return the constraint with this name; raises `UsageError` if there is none."""
        if name not in self.constraints:
            names = ", ".join(map(repr, self.constraints))
            raise UsageError(f"{self.aggregate!r} has no constraint {name!r}. It has {names}.")
        return self.constraints[name]

    async def is_built(self, constraint: str) -> bool:
        """Return whether every value in use is claimed: the register says so, or the log has no such aggregate."""
        register = await self.claims.newest(register_id(self.aggregate, constraint))
        return await self._has_no_aggregates() if register.state.is_built is None else register.state.is_built

    async def build(self, constraint: str) -> None:
        """Record in the register of a constraint that every value in use is claimed."""
        await execute(
            self.claims.store, (self._plan(register_id(self.aggregate, constraint), self._build(constraint)),)
        )

    async def unbuild(self) -> None:
        """Record that an import will add unclaimed values; raises `Refused` if the values are claimed already."""
        for name in self.constraints:

            def unbuild(register: Claim, name: str = name) -> ClaimEvent | None:
                if register.is_built:
                    raise Refused(
                        f"An import into {self.aggregate!r}",
                        f"its {name} is unique, and an import claims no values",
                        "Record them by commands. Before the first command, an import is taken; "
                        "`eventjet unique build` claims its values then.",
                    )
                return register.unbuild(self.aggregate, name)

            await execute(self.claims.store, (self._plan(register_id(self.aggregate, name), unbuild),))

    async def claims_of_save(self, decisions: list[Decision[Any, Any]]) -> list[Decision[Any, Any]] | Conflict:
        """Decide which claims these decisions need; raises `NotUnique` and `UniqueNotBuilt`, on the newest claims."""
        moves: dict[str, _Move] = {}
        gains: dict[str, bool] = {}
        """Constraints whose register must be read, and whether the save gains a value of them."""
        for decision in decisions:
            for constraint in self.constraints.values():
                before = decision.before
                lost, gained = changed_claims(self.aggregate, constraint, before.state, decision.state)
                if gained or before.version == 0:
                    gains[constraint.name] = gains.get(constraint.name, False) or bool(gained)
                for claim in sorted(lost | gained):
                    move = moves.setdefault(claim, _Move(self.aggregate, constraint.name, decision))
                    (move.takers if claim in gained else move.released).append(decision.plan.aggregate_id)
        recorded: list[Decision[Any, Any]] = []
        for name, is_gain in gains.items():
            register = await self._decide_register(name, is_gain=is_gain)
            if isinstance(register, Conflict):
                return register
            recorded += [register] if register is not None else []
        for outcome in await asyncio.gather(*(self._move_claim(claim, move) for claim, move in moves.items())):
            if isinstance(outcome, Conflict):
                return outcome
            recorded.append(outcome)
        return recorded

    async def _decide_register(
        self, constraint: str, *, is_gain: bool
    ) -> Decision[Claim, ClaimEvent] | Conflict | None:
        """Decide what the register records with the type's first event; raises `UniqueNotBuilt` for a gain."""
        if constraint in self._built_constraints:
            return None
        register = register_id(self.aggregate, constraint)
        before = await self.claims.newest(register)
        if before.state.is_built:
            self._built_constraints.add(constraint)
            return None
        if before.state.is_built is None and await self._has_no_aggregates():
            return await self.claims.decide(self._plan(register, self._build(constraint)), before)
        if conflict := await self.claims.outdated(register, before):
            return conflict
        if is_gain:
            raise UniqueNotBuilt(self.aggregate, constraint)
        return None

    async def _move_claim(self, claim: str, move: _Move) -> Decision[Claim, ClaimEvent] | Conflict:
        plan = Planned(self.claims, claim, move.decide, metadata=move.decision.plan.metadata)
        try:
            return await self.claims.decide(plan, await self.claims.newest(claim))
        except AlreadyClaimed as error:
            # `Executor.decide` has confirmed that this is the newest state of the claim.
            raise NotUnique(self.aggregate, move.constraint, move.takers[-1], error.holder) from None

    async def _has_no_aggregates(self) -> bool:
        return await self.claims.store.ends(self.aggregate) == (0, 0)

    def _build(self, constraint: str) -> Callable[[Claim], ClaimEvent | None]:
        return lambda register: register.build(self.aggregate, constraint)

    def _plan(self, claim: str, decide: Callable[[Claim], Any]) -> Planned[Claim, ClaimEvent]:
        return Planned(self.claims, claim, decide)


@dataclass(slots=True)
class _Move:
    """The change of one value in one save: which aggregates release it, and which take it."""

    aggregate: str
    constraint: str
    decision: Decision[Any, Any]
    """The first decision that changes the value."""
    released: list[str] = field(default_factory=list[str])
    takers: list[str] = field(default_factory=list[str])

    def decide(self, claim: Claim) -> list[ClaimEvent]:
        """Return the events of the claim; raises `AlreadyClaimed` if it has a holder or two takers."""
        if len(self.takers) > 1:
            raise AlreadyClaimed(self.takers[0])
        return claim.move(self.aggregate, self.constraint, self.released, self.takers[0] if self.takers else None)


@dataclass(slots=True)
class Mismatches:
    """Mismatches of one kind between claims and states."""

    count: int = 0
    examples: list[str] = field(default_factory=list[str])
    """The first `EXAMPLES_MAX` as text, with ids of aggregates and without values."""

    def add(self, mismatch: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(mismatch)


@dataclass(slots=True)
class ClaimReport:
    """The result of a check; with repairs, the missing and the stale claims are correct now."""

    aggregate: str
    constraint: str
    aggregates: int = 0
    values: int = 0
    """Values that aggregates have; a value that two aggregates have counts twice."""
    missing: Mismatches = field(default_factory=Mismatches)
    """Values that an aggregate has and has not claimed."""
    stale: Mismatches = field(default_factory=Mismatches)
    """Claims of aggregates that do not have the value."""
    shared: Mismatches = field(default_factory=Mismatches)
    """Values that several aggregates have."""
    unreadable: Mismatches = field(default_factory=Mismatches)
    """Aggregates and claims whose history cannot be folded."""
    built: bool = False
    """True if the constraint is enforced from now on."""

    @property
    def sound(self) -> bool:
        """True if all claims matched the states, before any repair, and the constraint is enforced."""
        return self.built and not (self.missing.count or self.stale.count or self.ambiguous)

    @property
    def ambiguous(self) -> bool:
        """True if shared values or unreadable histories prevent that the constraint is enforced."""
        return bool(self.shared.count or self.unreadable.count)


async def check_claims(
    unique: UniqueValues,
    constraint: str,
    progress: Callable[[int], object] | None = None,
    *,
    repairs: bool = False,
    keep_shared: bool = False,
) -> ClaimReport:
    """Compare claims and states; `progress` is called with the number of aggregates checked.

    With `repairs`, claim values that are not claimed, release claims without a value, and record that the constraint is
    enforced. This is not recorded if two aggregates have the same value, unless `keep_shared`: then no third aggregate
    may take it, and each holder releases it for itself. A second run checks everything again and stores only what is
    missing. Raises `UsageError` for a constraint that is not declared, `LogIncomplete`, and what reading raises.
    """
    declared, store, name = unique.constraint(constraint), unique.aggregates.store, unique.aggregate
    if store.missing_range:
        raise LogIncomplete(f"The log of {name!r}", store.missing_range)
    report = ClaimReport(name, constraint)
    check = _Check(unique, declared, progress, repairs, report)
    prefix = f"{register_id(name, constraint)}-"
    await check.for_each(CLAIMS, lambda claim: check.check_claim(claim) if claim.startswith(prefix) else None)
    await check.for_each(name, check.check_aggregate)
    if repairs and not report.unreadable.count and (keep_shared or not report.shared.count):
        await unique.build(constraint)
    report.built = await unique.is_built(constraint)
    return report


class _Check:
    def __init__(
        self,
        unique: UniqueValues,
        constraint: Unique[Any],
        progress: Callable[[int], object] | None,
        repairs: bool,
        report: ClaimReport,
    ) -> None:
        self._constraint = constraint
        self._name = unique.aggregate
        self._aggregates, self._claims = unique.aggregates, unique.claims
        self._store = unique.aggregates.store
        self._progress = progress
        self._repairs = repairs
        self._report = report
        self._shared: set[str] = set()

    async def for_each(self, aggregate: str, check: Callable[[str], Awaitable[None] | None]) -> None:
        """Call `check` for every aggregate of a type, at least once each, and await `AT_ONCE` results together."""
        waiting: list[Awaitable[None]] = []
        async for aggregate_id in self._ids(aggregate):
            checked = check(aggregate_id)
            if checked is None:
                continue
            waiting.append(checked)
            if len(waiting) == AT_ONCE:
                await asyncio.gather(*waiting)
                waiting.clear()
                if self._progress is not None:
                    self._progress(self._report.aggregates)
        await asyncio.gather(*waiting)

    async def _ids(self, aggregate: str) -> AsyncIterator[str]:
        """Yield the ids of all aggregates of a type, from the subjects of the events of version 1."""
        _, last = await self._store.ends(aggregate)
        position = 0
        for pause_s in LAG_PAUSES_S:
            async for page in self._store.pages_of(aggregate, after=position):
                for record in page:
                    position = record[0]
                    if number_of(record[3], VERSION) == 1:
                        with suppress(ValueError):  # a subject without a valid id, which an audit reports
                            yield entity_of(record[2])[1]
            if position >= last:
                return
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(f"The events of {aggregate!r}", "the replica that was asked lags behind")

    async def check_claim(self, claim: str) -> None:
        """Check that the holders of a claim have the value."""
        try:
            folded_claim = await _newest_confirmed(self._claims, claim)
            for holder in folded_claim.state.holders:
                if not await self._has_value(holder, claim):
                    await self._mismatch(claim, holder, has=False)
        except (HistoryBroken, CodecError) as error:
            self._report.unreadable.add(f"{claim}: {error}")

    async def check_aggregate(self, aggregate_id: str) -> None:
        """Check that an aggregate has claimed its values."""
        report = self._report
        report.aggregates += 1
        try:
            state = (await _newest_confirmed(self._aggregates, aggregate_id)).state
            for claim in sorted(claims_of(self._name, self._constraint, state)):
                report.values += 1
                folded_claim = await self._claims.newest(claim)
                if aggregate_id not in folded_claim.state.holders:
                    folded_claim = await self._mismatch(claim, aggregate_id, has=True)
                holders = folded_claim.state.holders | {aggregate_id}
                if len(holders) > 1 and claim not in self._shared:
                    self._shared.add(claim)
                    report.shared.add(", ".join(sorted(holders)[:5]) + (", …" if len(holders) > 5 else ""))
        except (HistoryBroken, CodecError) as error:
            report.unreadable.add(f"{self._name} {aggregate_id!r}: {error}")

    async def _has_value(self, aggregate_id: str, claim: str) -> bool:
        state = (await _newest_confirmed(self._aggregates, aggregate_id)).state
        return claim in claims_of(self._name, self._constraint, state)

    async def _mismatch(self, claim: str, aggregate_id: str, *, has: bool) -> FoldedState[Claim]:
        """Report that a claim contradicts an aggregate, and in a build repair the claim; return its newest state.

        `has` is whether the aggregate has the value. Claim and aggregate are read again first: they may match by now.
        """
        claims, name = self._claims, self._constraint.name

        def repair(state: Claim) -> ClaimEvent:
            return state.take(self._name, name, aggregate_id) if has else state.release(self._name, name, aggregate_id)

        async def attempt(_lost_races: int) -> tuple[bool, FoldedState[Claim]] | Conflict:
            """Return whether claim and state differ, with a claim that did not change while the state was read."""
            folded_claim = await _newest_confirmed(claims, claim)
            if (aggregate_id in folded_claim.state.holders) == has or await self._has_value(aggregate_id, claim) != has:
                return False, folded_claim
            if not self._repairs:
                return await claims.outdated(claim, folded_claim) or (True, folded_claim)
            decision = await claims.decide(Planned(claims, claim, repair), folded_claim)
            if isinstance(decision, Conflict):
                return decision
            saved = await append(self._store, [decision])
            return saved if isinstance(saved, Conflict) else (True, await claims.newest(claim))

        differ, folded_claim = await retry(attempt)
        if differ:
            (self._report.missing if has else self._report.stale).add(f"{self._name} {aggregate_id!r}")
        return folded_claim


async def _newest_confirmed(executor: Executor[Any, Any], aggregate_id: str) -> FoldedState[Any]:
    """Return the newest state, confirmed by the leader; raises `StoreUnavailable` if a replica lags behind."""
    for pause_s in LAG_PAUSES_S:
        state = await executor.newest(aggregate_id)
        if await executor.outdated(aggregate_id, state) is None:
            return state
        await asyncio.sleep(pause_s)
    raise StoreUnavailable(executor.subject(aggregate_id), "a replica lags behind, or others write to it all the time")
