"""Claims held against the states they are of: `check_claims` tells what does not fit, `build_claims` puts it right.

Both go through every claim of a constraint and every aggregate of its type, a bounded number at a time. What changes a
value always moves its claim (see `Claim.move`), so a claim that stood still while its state was read is compared with
the truth, whoever writes meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.headers import VERSION, number_of
from eventjet.codec.subjects import entity_of
from eventjet.commands.claims import Claims
from eventjet.commands.decisions import recorded, retried
from eventjet.commands.histories import LAG_PAUSES_S
from eventjet.commands.repository import Repository
from eventjet.domain.claim import Claim, ClaimEvent
from eventjet.domain.history import FoldedState
from eventjet.domain.unique import CLAIMS, claims_of, register_id
from eventjet.errors import CodecError, ConcurrencyConflict, HistoryBroken, LogIncomplete, StoreUnavailable, UsageError

AT_ONCE = 64
"""Aggregates looked at together."""
TOLD_MAX = 20
"""Findings of each kind that are kept; the others are counted."""


@dataclass(slots=True)
class Mismatches:
    """What does not fit, of one kind."""

    count: int = 0
    examples: list[str] = field(default_factory=list[str])
    """The first ones, as text; ids of aggregates, and no values."""

    def add(self, what: str) -> None:
        self.count += 1
        if len(self.examples) < TOLD_MAX:
            self.examples.append(what)


@dataclass(slots=True)
class ClaimReport:
    """What was found, and for a build what was done about it."""

    aggregate: str
    constraint: str
    aggregates: int = 0
    values: int = 0
    """That aggregates have; one that two have counts twice."""
    missing: Mismatches = field(default_factory=Mismatches)
    """Values that an aggregate has and did not claim."""
    stale: Mismatches = field(default_factory=Mismatches)
    """Claims of aggregates that do not have the value."""
    shared: Mismatches = field(default_factory=Mismatches)
    """Values that more than one aggregate has."""
    unreadable: Mismatches = field(default_factory=Mismatches)
    """Aggregates and claims whose history cannot be folded."""
    built: bool = False
    """Whether the constraint is kept from here on."""

    @property
    def sound(self) -> bool:
        """Whether claims and states fit, as they were found."""
        return self.built and not (self.missing.count or self.stale.count or self.ambiguous)

    @property
    def ambiguous(self) -> bool:
        """Whether something stands against saying that the constraint is kept."""
        return bool(self.shared.count or self.unreadable.count)


async def check_claims(
    repository: Repository[Any, Any], constraint: str, progress: Callable[[int], object] | None = None
) -> ClaimReport:
    """Compare, and change nothing; `progress` is told how many aggregates were looked at.

    Raises `UsageError` for a constraint that is not declared, `LogIncomplete`, and what reading raises.
    """
    return await _Pass(repository, constraint, progress, mends=False).run(keep_shared=False)


async def build_claims(
    repository: Repository[Any, Any],
    constraint: str,
    progress: Callable[[int], object] | None = None,
    *,
    keep_shared: bool = False,
) -> ClaimReport:
    """Claim what is not claimed, release what nobody has, and have the log say that the constraint is kept.

    It does not say so where two aggregates have one value, unless `keep_shared`: then no third may take it, and each
    that gives it up gives it up for itself. Run again, it goes through all of it and stores only what is missing.
    """
    return await _Pass(repository, constraint, progress, mends=True).run(keep_shared=keep_shared)


class _Pass:
    def __init__(
        self,
        repository: Repository[Any, Any],
        constraint: str,
        progress: Callable[[int], object] | None,
        *,
        mends: bool,
    ) -> None:
        self._claims = _claims_of(repository)
        self._constraint = self._claims.named(constraint)
        self._repository = repository
        self._name = repository.info.name
        self._store = repository.histories.store
        self._progress = progress
        self._mends = mends
        self._report = ClaimReport(self._name, constraint)
        self._shared: set[str] = set()

    async def run(self, *, keep_shared: bool) -> ClaimReport:
        report, name = self._report, self._constraint.name
        if self._store.loss:
            raise LogIncomplete(f"The log of {self._name!r}", self._store.loss)
        prefix = f"{register_id(self._name, name)}-"
        await self._each(CLAIMS, lambda claim: self._claim(claim) if claim.startswith(prefix) else None)
        await self._each(self._name, self._aggregate)
        if self._mends and not report.unreadable.count and (keep_shared or not report.shared.count):
            await self._claims.build(name)
        report.built = await self._claims.is_built(name)
        return report

    async def _each(self, aggregate: str, look: Callable[[str], Awaitable[None] | None]) -> None:
        """`look` at every aggregate of a type, once or more, some at a time."""
        waiting: list[Awaitable[None]] = []
        async for aggregate_id in self._ids(aggregate):
            looked = look(aggregate_id)
            if looked is None:
                continue
            waiting.append(looked)
            if len(waiting) == AT_ONCE:
                await asyncio.gather(*waiting)
                waiting.clear()
                if self._progress is not None:
                    self._progress(self._report.aggregates)
        await asyncio.gather(*waiting)

    async def _ids(self, aggregate: str) -> AsyncIterator[str]:
        """Of all aggregates of a type: each begins with version 1."""
        _, last = await self._store.ends(aggregate)
        position = 0
        for pause_s in LAG_PAUSES_S:
            async for page in self._store.pages_of(aggregate, after=position):
                for record in page:
                    position = record[0]
                    if number_of(record[3], VERSION) == 1:
                        with suppress(ValueError):  # a subject that names nobody, which an audit tells
                            yield entity_of(record[2])[1]
            if position >= last:
                return
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(f"The events of {aggregate!r}", "the replica that was asked lags behind")

    async def _claim(self, claim: str) -> None:
        """Whether those who claim a value have it."""
        try:
            held = await _newest(self._claims.repository, claim)
            for holder in held.state.holders:
                if not await self._has(holder, claim):
                    await self._differs(claim, holder, has=False)
        except (HistoryBroken, CodecError) as error:
            self._report.unreadable.add(f"{claim}: {error}")

    async def _aggregate(self, aggregate_id: str) -> None:
        """Whether an aggregate has claimed what it has."""
        report = self._report
        report.aggregates += 1
        try:
            state = (await _newest(self._repository, aggregate_id)).state
            for claim in sorted(claims_of(self._name, self._constraint, state)):
                report.values += 1
                held = await self._claims.repository.fresh(claim)
                if aggregate_id not in held.state.holders:
                    held = await self._differs(claim, aggregate_id, has=True)
                self._tell_shared(claim, held.state.holders | {aggregate_id})
        except (HistoryBroken, CodecError) as error:
            report.unreadable.add(f"{self._name} {aggregate_id!r}: {error}")

    def _tell_shared(self, claim: str, holders: frozenset[str]) -> None:
        if len(holders) > 1 and claim not in self._shared:
            self._shared.add(claim)
            self._report.shared.add(", ".join(sorted(holders)[:5]) + (", …" if len(holders) > 5 else ""))

    async def _has(self, aggregate_id: str, claim: str) -> bool:
        state = (await _newest(self._repository, aggregate_id)).state
        return claim in claims_of(self._name, self._constraint, state)

    async def _differs(self, claim: str, aggregate_id: str, *, has: bool) -> FoldedState[Claim]:
        """Note, and put right, that a claim does not say whether an aggregate has a value; the claim then."""
        claims, name = self._claims.repository, self._constraint.name

        def mend(state: Claim) -> ClaimEvent:
            return state.take(self._name, name, aggregate_id) if has else state.release(self._name, name, aggregate_id)

        async def attempt(_again: bool) -> tuple[bool, FoldedState[Claim]] | ConcurrencyConflict:
            """Whether they differ, the claim having stood still while the state was read."""
            held = await _newest(claims, claim)
            if (aggregate_id in held.state.holders) == has or await self._has(aggregate_id, claim) != has:
                return False, held
            if not self._mends:
                return await claims.outdated(claim, held) or (True, held)
            decided = await claims.decided(claims.decide(claim, mend), held)
            if isinstance(decided, ConcurrencyConflict):
                return decided
            saved = await recorded(self._store, [decided])
            return saved if isinstance(saved, ConcurrencyConflict) else (True, await claims.fresh(claim))

        differ, held = await retried(attempt)
        if differ:
            (self._report.missing if has else self._report.stale).add(f"{self._name} {aggregate_id!r}")
        return held


def _claims_of(repository: Repository[Any, Any]) -> Claims:
    if repository.claims is None:
        name = repository.info.name
        raise UsageError(
            f"{name!r} declares no values that are unique. Name an aggregate with a method that is `@unique(…)`."
        )
    return repository.claims


async def _newest(repository: Repository[Any, Any], aggregate_id: str) -> FoldedState[Any]:
    """The state as the leader knows it; raises `StoreUnavailable` where a replica lags behind."""
    for pause_s in LAG_PAUSES_S:
        held = await repository.fresh(aggregate_id)
        if await repository.outdated(aggregate_id, held) is None:
            return held
        await asyncio.sleep(pause_s)
    raise StoreUnavailable(
        repository.subject(aggregate_id), "a replica lags behind, or others write to it all the time"
    )
