"""Several aggregates in one atomic append: all decisions are made again on conflict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from eventjet.domain.history import FoldedState
from eventjet.domain.recorded import NO_METADATA
from eventjet.errors import ConcurrencyConflict, Refused, UsageError
from eventjet.repository.planned import Committed, Planned, recorded_events
from eventjet.repository.repository import CONFLICTS_MAX, between_conflicts
from eventjet.store.store import Append, EventStore


@dataclass(frozen=True, slots=True)
class _Decided:
    plan: Planned[Any, Any]
    held: FoldedState[Any]
    append: Append
    state: Any
    """After its events."""


async def transact(store: EventStore, plans: Sequence[Planned[Any, Any]]) -> tuple[Committed[Any, Any], ...]:
    """Take all decisions and record everything that follows, or nothing.

    Every member must record something, since one that records nothing would not be fenced. Raises `Refused` for that
    and for an aggregate named twice, `UsageError` for a decision of another connection, what a decision raises, and
    `ConcurrencyConflict` after 100 lost races.
    """
    subjects = [plan.repository.subject(plan.aggregate_id) for plan in plans]
    if not plans:
        raise Refused("A transaction", "it has no members", "Give it at least one decision.")
    if any(plan.repository.histories.store is not store for plan in plans):
        raise UsageError("A transaction names a decision of another connection. Make all of them on one, then take it.")
    if len(set(subjects)) < len(subjects):
        raise Refused("A transaction", "it names one aggregate twice", "Put both steps into one decision.")
    async with AsyncExitStack() as stack:
        for _, plan in sorted(zip(subjects, plans, strict=True), key=lambda pair: pair[0]):
            # In one order everywhere, so that two transactions never wait for each other.
            await stack.enter_async_context(plan.repository.cache.alone(plan.aggregate_id))
        lost: ConcurrencyConflict | None = None
        for attempt in range(CONFLICTS_MAX):
            if attempt:
                await between_conflicts(attempt)
            decided = await _decide(plans, again=attempt > 0)
            if decided is None:
                continue
            for plan in plans:
                plan.repository.cache.drop(plan.aggregate_id)
            try:
                last = await store.append([one.append for one in decided])
            except ConcurrencyConflict as error:
                lost = error
                for one in decided:
                    one.plan.repository.cache.put(one.plan.aggregate_id, one.held)
                continue
            return _committed(decided, last)
        raise lost or ConcurrencyConflict(subjects[0], 0)


async def _decide(plans: Sequence[Planned[Any, Any]], *, again: bool) -> list[_Decided] | None:
    """All decisions on the states known, or read `again`; None when one of these turned out stale."""
    decided: list[_Decided] = []
    for plan in plans:
        repository = plan.repository
        known = None if again else repository.cache.get(plan.aggregate_id)
        held = known or await repository.fresh(plan.aggregate_id)
        try:
            events = recorded_events(plan.decide(held.state))
            if not events:
                raise Refused(
                    f"A transaction with {repository.info.name} {plan.aggregate_id!r}",
                    "its decision records nothing, so nothing would fence it",
                    "Record an event there, or leave it out.",
                )
        except Exception:
            if await repository.is_current(plan.aggregate_id, held):
                raise
            return None
        append = repository.append_of(plan.aggregate_id, held, events, None, NO_METADATA)
        decided.append(_Decided(plan, held, append, repository.state_after(held.state, append)))
    return decided


def _committed(decided: Sequence[_Decided], last: int) -> tuple[Committed[Any, Any], ...]:
    position = last - sum(len(one.append.events) for one in decided)
    done: list[Committed[Any, Any]] = []
    for one in decided:
        position += len(one.append.events)
        repository = one.plan.repository
        done.append(repository.committed(one.plan.aggregate_id, one.held, one.append, one.state, position))
    return tuple(done)
