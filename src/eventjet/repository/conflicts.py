"""Appending what was decided; a lost race is run again by a command, by a transaction and by an import alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from eventjet.errors import ConcurrencyConflict, Refused, UsageError
from eventjet.repository.planned import Committed, Decided, Planned
from eventjet.store.store import EventStore

T = TypeVar("T")

CONFLICTS_MAX = 100
"""Races lost in a row before the conflict is raised."""


async def retried(attempt: Callable[[bool], Awaitable[T | ConcurrencyConflict]]) -> T:
    """`attempt` until it returns something other than a conflict; the argument says whether to read again first.

    Raises the last conflict after `CONFLICTS_MAX` lost races.
    """
    lost = 0
    while True:
        outcome = await attempt(lost > 0)
        if not isinstance(outcome, ConcurrencyConflict):
            return outcome
        lost += 1
        if lost == CONFLICTS_MAX:
            raise outcome
        # Between processes nobody queues: spread the rivals out, further with each lost race.
        spread = random.random()  # noqa: S311  no secret
        await asyncio.sleep(spread * min(0.2, 0.002 * 2 ** min(lost, 7)))


async def recorded(
    store: EventStore, decided: Sequence[Decided[Any, Any]]
) -> tuple[Committed[Any, Any], ...] | ConcurrencyConflict:
    """Append what was decided, all of it or nothing; raises what `EventStore.append` raises, but for a conflict."""
    appends = [one.append for one in decided if one.append is not None]
    assert len(appends) == len(decided), "what records nothing is not appended"
    for one in decided:
        one.plan.repository.cache.drop(one.plan.aggregate_id)
    try:
        position = await store.append(appends) - sum(len(append.events) for append in appends)
    except ConcurrencyConflict as conflict:
        for one in decided:
            one.plan.repository.cache.put(one.plan.aggregate_id, one.held)  # what follows it is all there is to read
        return conflict
    done: list[Committed[Any, Any]] = []
    for one, append in zip(decided, appends, strict=True):
        position += len(append.events)
        done.append(one.plan.repository.committed(one, append, position))
    return tuple(done)


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
            await stack.enter_async_context(plan.repository.cache.lock(plan.aggregate_id))
        return await retried(attempt)
