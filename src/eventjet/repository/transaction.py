"""Several aggregates in one atomic append: all decisions are made again on conflict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from eventjet.errors import ConcurrencyConflict, Refused, UsageError
from eventjet.repository.conflicts import retried
from eventjet.repository.planned import Committed, Decided, Planned
from eventjet.repository.repository import recorded
from eventjet.store.store import EventStore


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

    async def attempt(again: bool) -> tuple[Committed[Any, Any], ...] | ConcurrencyConflict:
        decided: list[Decided[Any, Any]] = []
        for plan in plans:
            repository = plan.repository
            taken = await repository.decided(plan, await repository.known(plan.aggregate_id, again))
            if isinstance(taken, ConcurrencyConflict):
                return taken
            if taken.append is None:
                raise Refused(
                    f"A transaction with {repository.info.name} {plan.aggregate_id!r}",
                    "its decision records nothing, so nothing would fence it",
                    "Record an event there, or leave it out.",
                )
            decided.append(taken)
        return await recorded(store, decided)

    async with AsyncExitStack() as stack:
        for _, plan in sorted(zip(subjects, plans, strict=True), key=lambda pair: pair[0]):
            # In one order everywhere, so that two transactions never wait for each other.
            await stack.enter_async_context(plan.repository.cache.alone(plan.aggregate_id))
        return await retried(attempt)
