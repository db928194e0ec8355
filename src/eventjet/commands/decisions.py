"""Decisions on aggregates: planned, taken, recorded, and taken again after a lost race; and where they are in the log.

A lost race is run again by a command, by a transaction and by an import alike.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from eventjet.commands.cache import Cache
from eventjet.commands.claims import claimed
from eventjet.commands.repeated import all_repeated, check_ids
from eventjet.commands.rivals import CONFIRMED_ABOVE_IN_BATCH, Rivals
from eventjet.domain.decision import Committed
from eventjet.domain.history import FoldedState
from eventjet.domain.recorded import NO_METADATA, Metadata, current_metadata
from eventjet.errors import ConcurrencyConflict, Refused, UsageError
from eventjet.log.store import Append, EventStore
from eventjet.observability.spans import APPEND_SECONDS
from eventjet.observability.tracing import active

if TYPE_CHECKING:
    from eventjet.commands.repository import Repository
    from eventjet.observability.command_span import CommandSpan

S = TypeVar("S")
E = TypeVar("E")
T = TypeVar("T")
_Attempt: TypeAlias = Callable[
    [bool, dict[str, Any] | None], Awaitable[tuple[Committed[Any, Any], ...] | ConcurrencyConflict]
]

Place: TypeAlias = tuple[str, Cache[Any], str]
"""An aggregate that is written to: its subject, what is remembered of its type, its id."""
CONFLICTS_MAX = 100
"""Races lost in a row before the conflict is raised."""
UNSEEN_MAX = 3
"""Of those in a row after which the log had no event of another writer, each of which takes two seconds."""
_TOKEN = re.compile(r"([a-z][a-z0-9_]{0,62}):(0|[1-9][0-9]{0,18})(?:@([A-Za-z0-9_-]{1,64}))?", re.ASCII)
_POSITION_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Planned(Generic[S, E]):
    """What `Repository.decide` returns and `Jet.transact` takes."""

    repository: Repository[S, E]
    aggregate_id: str
    decide: Callable[[S], E | Sequence[E] | None]
    command_id: str | None = None
    metadata: Metadata = NO_METADATA
    request: str | None = None
    """What is asked for, where there is a command id."""
    since: int | None = None
    """A position that the command cannot have been recorded before, where one is known: its cause's."""
    called: Any = None
    """The decision itself, which traces name."""
    only_at: int | None = None
    """The position of the one state that it is made on; on another nothing follows. None for any state."""


@dataclass(frozen=True, slots=True)
class Decided(Generic[S, E]):
    """A decision that was taken on a state."""

    plan: Planned[S, E]
    held: FoldedState[S]
    append: Append | None
    """What follows from it; None for nothing."""
    state: S
    """After its events."""


async def retried(attempt: Callable[[bool], Awaitable[T | ConcurrencyConflict]], places: Sequence[Place] = ()) -> T:
    """`attempt` until it returns something other than a conflict; the argument says whether it is a try after one.

    Writers of the same `places` make room for each other (see `rivals`): before the first try, and after a lost race.
    Raises the last conflict after `CONFLICTS_MAX` lost races, or `UNSEEN_MAX` in a row whose winner nobody sees.
    """
    now = asyncio.get_running_loop().time
    if (crowd := _known(places)) and (pause_s := max(rivals.room_s(now()) for rivals in crowd)):
        await asyncio.sleep(pause_s)
    lost, unseen, others = 0, 0, Rivals()
    while True:
        began = now()
        outcome = await attempt(lost > 0)
        if not isinstance(outcome, ConcurrencyConflict):
            if lost or crowd:
                ended = now()
                for rivals in _known(places):
                    rivals.won(ended - began, ended, random.random())  # noqa: S311  no secret
            return outcome
        lost += 1
        unseen = unseen + 1 if outcome.is_unseen else 0
        if lost == CONFLICTS_MAX or unseen == UNSEEN_MAX:
            raise ConcurrencyConflict(outcome.subject, outcome.expected, races=lost, is_unseen=unseen == UNSEEN_MAX)
        where = (cache.rivals(aggregate_id) for subject, cache, aggregate_id in places if subject == outcome.subject)
        if pause_s := next(where, others).lost(lost - 1, random.random()):  # noqa: S311  no secret
            await asyncio.sleep(pause_s)


def _known(places: Sequence[Place]) -> list[Rivals]:
    return [rivals for _, cache, aggregate_id in places if (rivals := cache.known_rivals(aggregate_id)) is not None]


async def recorded(
    store: EventStore, decided: Sequence[Decided[Any, Any]], told: dict[str, Any] | None = None
) -> tuple[Committed[Any, Any], ...] | ConcurrencyConflict:
    """Append what was decided with the claims it moves, all of it or nothing; how long that took is put into `told`.

    Raises what `EventStore.append` raises, but for a conflict; `NotUnique` and `UniqueNotBuilt`.
    """
    claims = await claimed(decided)
    if isinstance(claims, ConcurrencyConflict):
        return claims
    # Claims first: what a torn batch leaves of them refuses a value, and lets no two have it.
    decided = [*claims, *decided]
    appends = [one.append for one in decided if one.append is not None]
    assert len(appends) == len(decided), "what records nothing is not appended"
    relied_upon = [one.plan.repository.cache.take(one.plan.aggregate_id) for one in decided]
    began = time.perf_counter()
    try:
        position = await store.append(appends) - sum(len(append.events) for append in appends)
    except ConcurrencyConflict as conflict:
        for one, is_guess in zip(decided, relied_upon, strict=True):
            repository, aggregate_id = one.plan.repository, one.plan.aggregate_id
            if is_guess and conflict.subject == repository.subject(aggregate_id):
                repository.cache.learn(aggregate_id, is_old=True)
            repository.lost(one, conflict)
        return conflict
    if told is not None:
        told[APPEND_SECONDS] = time.perf_counter() - began
    done: list[Committed[Any, Any]] = []
    for one, append, is_guess in zip(decided, appends, relied_upon, strict=True):
        position += len(append.events)
        if is_guess:
            one.plan.repository.cache.learn(one.plan.aggregate_id, is_old=False)
        done.append(one.plan.repository.committed(one, append, position))
    return tuple(done[len(claims) :])


async def transact(store: EventStore, plans: Sequence[Planned[Any, Any]]) -> tuple[Committed[Any, Any], ...]:
    """Take all decisions and record everything that follows, or nothing.

    Every member must record something, since one that records nothing would not be fenced. Where all of them are
    commands that were recorded before, it returns what came of them then. Raises `Refused` for a member that records
    nothing, for an aggregate named twice and for commands of which only some were recorded, `UsageError` for a decision
    of another connection and where only some have an id, what a decision raises, and `ConcurrencyConflict` after 100
    lost races.
    """
    for number, plan in enumerate(plans, 1):
        _check_planned(number, plan)
    subjects = [plan.repository.subject(plan.aggregate_id) for plan in plans]
    if not plans:
        raise Refused("A transaction", "it has no members", "Give it at least one decision.")
    if any(plan.repository.histories.store is not store for plan in plans):
        raise UsageError("A transaction names a decision of another connection. Make all of them on one, then take it.")
    if len(set(subjects)) < len(subjects):
        raise Refused("A transaction", "it names one aggregate twice", "Put both steps into one decision.")
    check_ids(plans)

    async def attempt(
        again: bool, told: dict[str, Any] | None = None
    ) -> tuple[Committed[Any, Any], ...] | ConcurrencyConflict:
        held = [await plan.repository.known(plan.aggregate_id, again, CONFIRMED_ABOVE_IN_BATCH) for plan in plans]
        before = await all_repeated(plans, held)
        if before is not None:
            return before
        decided: list[Decided[Any, Any]] = []
        for plan, known in zip(plans, held, strict=True):
            repository = plan.repository
            taken = await repository.decided(plan, known)
            if isinstance(taken, ConcurrencyConflict):
                return taken
            if taken.append is None:
                raise Refused(
                    f"A transaction with {repository.info.name} {plan.aggregate_id!r}",
                    "its decision records nothing, so nothing would fence it",
                    "Record an event there, or leave it out.",
                )
            decided.append(taken)
        return await recorded(store, decided, told)

    async with AsyncExitStack() as stack:
        for _, plan in sorted(zip(subjects, plans, strict=True), key=lambda pair: pair[0]):
            # In one order everywhere, so that two transactions never wait for each other.
            await stack.enter_async_context(plan.repository.cache.lock(plan.aggregate_id))
        telemetry = active()
        parent = current_metadata().traceparent
        span = None if telemetry is None else telemetry.command("several", "transact", parent, "transact")
        places = [
            (subject, one.repository.cache, one.aggregate_id) for subject, one in zip(subjects, plans, strict=True)
        ]
        return await (retried(attempt, places) if span is None else _observed(attempt, places, span))


async def _observed(attempt: _Attempt, places: Sequence[Place], span: CommandSpan) -> tuple[Committed[Any, Any], ...]:
    """A transaction with a span."""
    try:
        done = await retried(lambda again: attempt(span.again(again), span.more), places)
    except BaseException as error:
        span.ended(0, error)
        raise
    span.more["eventjet.position"] = done[-1].position
    span.ended(sum(len(one.events) for one in done))
    return done


def _check_planned(number: int, plan: object) -> None:
    if isinstance(plan, Planned):
        return
    if asyncio.iscoroutine(plan):
        plan.close()  # it will never be awaited, and Python would say so as well
    raise UsageError(
        f"Member {number} of the transaction is a {type(plan).__name__}. Give `transact` what `repository.decide(…)` "
        "returns, one after the other: not a list, and nothing that `execute` returns."
    )


def recorded_events(result: Any) -> tuple[Any, ...]:
    """What a decision returned, as a tuple; raises `UsageError` for a coroutine or an iterator."""
    if result is None:
        return ()
    if isinstance(result, list | tuple):
        return tuple(cast("Sequence[Any]", result))
    if hasattr(result, "__await__") or hasattr(result, "__next__"):
        if hasattr(result, "close"):
            result.close()
        name = getattr(result, "__qualname__", "")
        raise UsageError(
            f"A decision{f', {name},' if name else ''} returned a coroutine or an iterator. Write it as a plain `def` "
            "that returns one event, a list of them, or None."
        )
    return (result,)


def position_in(token: str, app: str) -> tuple[int, str]:
    """The position that a token names, and its log, empty where that is not told.

    Raises `UsageError` for what is no token, or one of another app.
    """
    if not isinstance(token, str):  # pyright: ignore[reportUnnecessaryIsInstance]  what has the token is easily given
        raise UsageError(f"The token is given as {type(token).__name__}. Hand on `Committed.token`, which is text.")
    found = _TOKEN.fullmatch(token.strip(" \t"))
    if found is None or int(found[2]) > _POSITION_MAX:
        raise UsageError(
            f"{token[:80]!r} is not a token. Hand on `Committed.token` as it is, for instance {app}:1234@…."
        )
    if found[1] != app:
        raise UsageError(
            f"The token {found[0]!r} is of the app {found[1]!r}, and this connection is of {app!r}. "
            "Hand it to a process of the app that made it."
        )
    return int(found[2]), found[3] or ""
