"""Execute commands: load the state, decide, append the events, and start again when another writer was first.

1. **load** the state of each aggregate: from the cache where it is likely the newest, else from the log
2. if the same command ids were **recorded earlier**, return what came of them then
3. **decide**; a decision that records nothing, or raises, has its state confirmed by the leader first
4. **append** the events of all decisions in one atomic save, each aggregate at the position its state was read at;
   the content of their blobs is stored before
5. **retry** from 1 after a conflict, with a pause that makes room for other writers

A cached state is safe to decide on, since the log checks the expected position. One command and a transaction of
several run through the same code. A lost race is a value, `Conflict`; only `retry` turns it into an exception.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.commands import Request, differing_arguments, is_same_request
from eventjet.codec.headers import TRACEPARENT, RawRecord, context_headers, event_id_of, header_lines
from eventjet.codec.subjects import subject_of
from eventjet.commands.blobs import store_blobs
from eventjet.commands.cache import NEWEST, OLD, Cache
from eventjet.commands.contention import STALENESS_MAX, STALENESS_MAX_IN_TRANSACTION, ContentionBackoff
from eventjet.commands.loading import FirstOutcome, Histories, Snapshots
from eventjet.domain.aggregate import event_info
from eventjet.domain.blob import Blob, blobs_in
from eventjet.domain.decision import Committed
from eventjet.domain.history import FoldedState, evolved
from eventjet.domain.identity import new_event_id
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded, current_metadata, merge
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import folded_events, shown_name
from eventjet.errors import (
    CommandReused,
    ConcurrencyConflict,
    LogIncomplete,
    NotUnique,
    Refused,
    StoreUnavailable,
    UnexpectedExit,
    UniqueNotBuilt,
    UsageError,
)
from eventjet.log.store import BATCH_MAX, LAG_PAUSES_S, Append, EventStore, NewEvent, check_save, command_deadline
from eventjet.observability import spans, tracing
from eventjet.observability.spans import APPEND_SECONDS
from eventjet.observability.tracing import active, current_traceparent
from eventjet.text import listed

S = TypeVar("S")
E = TypeVar("E")
T = TypeVar("T")

CONFLICTS_MAX = 100
"""Races lost in a row before the conflict is raised."""
UNSEEN_MAX = 3
"""Lost races in a row for which the log has no event of another writer; each takes two seconds."""

Target: TypeAlias = tuple[str, Cache[Any], str]
"""An aggregate that is written to: its subject, the cache of its type, its id."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A lost race: another writer's event follows the expected position, so nothing of this save is stored."""

    subject: str
    expected: int
    rival: RawRecord | None = None
    """The other writer's record, if it was the aggregate's last record then; None if that is not known."""
    is_unseen: bool = False
    """The log has no event of another writer: the server compares the save with something else."""


@dataclass(frozen=True, slots=True)
class Planned(Generic[S, E]):
    """A planned decision on one aggregate: `Repository.decide` returns it, `Jet.transact` executes several together."""

    executor: Executor[S, E]
    aggregate_id: str
    decide: Callable[[S], E | Sequence[E] | None]
    command_id: str | None = None
    metadata: Metadata = NO_METADATA
    request: Request | None = None
    """Decision and arguments with their digest, if there is a command id."""
    since: int | None = None
    """A position before which the command cannot have been recorded, such as that of its cause; None if not known."""
    causations: tuple[str, ...] = ()
    """What the command records as causation; an event of its id with another one is of another cause. Empty for any."""
    former: Planned[S, E] | None = None
    """The same command under the id by which former releases recorded it; None if there is none."""
    called: Any = None
    """The decision method itself, for the names in traces and errors."""
    only_at: int | None = None
    """Position of the only state that the decision is made on; on another state it records nothing. None for any."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[S, E]):
    """The result of a decision on a state."""

    plan: Planned[S, E]
    before: FoldedState[S]
    append: Append | None
    """The events to store; None if there are none."""
    state: S
    """The state after its events."""
    blobs: Sequence[tuple[str, Blob]] = ()
    """The blobs in the events as the decision returned them, each with the field that refers to it."""
    log: str = ""
    """The identity of the log when the decision was made; empty where it was not read yet."""


async def execute(
    store: EventStore, plans: Sequence[Planned[Any, Any]], *, is_transaction: bool = False
) -> tuple[Committed[Any, Any], ...]:
    """Execute one command, or several as a transaction, which records all of them or nothing.

    Raises what a decision raises, once its state is confirmed; `ConcurrencyConflict` after 100 lost races; what
    `recorded_earlier`, `Executor.decide` and `EventStore.append` raise; and `Refused` for a member of a transaction
    that records nothing, because the log could not check its expected position.
    """
    staleness_max = STALENESS_MAX_IN_TRANSACTION if is_transaction else STALENESS_MAX
    span = None

    async def attempt(lost_races: int) -> tuple[Committed[Any, Any], ...] | Conflict:
        attributes = None
        if span is not None:
            span.conflicts, attributes = lost_races, span.attributes
        # 1. load
        log = ""
        states: list[FoldedState[Any]] = []
        for plan in plans:
            state = await plan.executor.load(plan.aggregate_id, lost_races > 0, staleness_max)
            if states and log != store.identity:  # the states before are of a log that was replaced
                return Conflict(plan.executor.subject(plan.aggregate_id), state.position)
            log = store.identity
            states.append(state)
        # 2. recorded earlier?
        if plans[0].command_id is not None:
            earlier = await recorded_earlier(plans, states)
            if earlier is not None:
                return earlier
        # 3. decide
        decisions: list[Decision[Any, Any]] = []
        for plan, state in zip(plans, states, strict=True):
            decision = await plan.executor.decide(plan, state)
            if isinstance(decision, Conflict):
                return decision
            if decision.append is None and not is_transaction:
                return (replace(plan.executor.answer(state, ()), confirmed=False),)
            decisions.append(decision)
        # All decisions were made, so a domain error of any member came first.
        empty = next((decision for decision in decisions if decision.append is None), None)
        if empty is not None:
            raise Refused(
                f"A transaction with {_label(empty.plan)}",
                "its decision records nothing, so nothing would fence it",
                "Record an event there, or leave it out.",
            )
        # 4. append
        return await append(store, decisions, attributes)

    first = plans[0]
    targets = [(plan.executor.subject(plan.aggregate_id), plan.executor.cache, plan.aggregate_id) for plan in plans]
    telemetry = active()
    if telemetry is not None:
        if is_transaction:
            span = telemetry.command("several", "transact", current_metadata().traceparent, "transact")
        else:
            parent = first.metadata.traceparent or current_metadata().traceparent
            span = telemetry.command(first.executor.info.name, getattr(first.called, "__name__", "decide"), parent)
    # 5. retry
    if span is None:
        return await retry(attempt, targets, store.save_timeout_s)
    try:
        results = await retry(attempt, targets, store.save_timeout_s)
    except BaseException as error:
        if not is_transaction:
            span.attributes["eventjet.aggregate_id"] = first.aggregate_id
        span.ended(0, error)
        raise
    if not is_transaction:
        span.attributes["eventjet.aggregate_id"] = first.aggregate_id
    span.attributes["eventjet.position"] = results[-1].position
    span.ended(sum([len(result.events) for result in results]))
    return results


async def transact(store: EventStore, plans: Sequence[Planned[Any, Any]]) -> tuple[Committed[Any, Any], ...]:
    """Execute several commands as one transaction.

    If all of them were recorded before, return what came of them then. Raises as `execute`; `Refused` for an aggregate
    named twice; and `UsageError` for a decision of another connection, and if only some members have a command id.
    """
    for number, plan in enumerate(plans, 1):
        if isinstance(plan, Planned):  # pyright: ignore[reportUnnecessaryIsInstance]  `execute` returns coroutines
            continue
        if asyncio.iscoroutine(plan):
            plan.close()  # it will never be awaited, and Python would say so as well
        raise UsageError(
            f"Member {number} of the transaction is a {type(plan).__name__}. Give `transact` what "
            "`repository.decide(…)` returns, one after the other: not a list, and nothing that `execute` returns."
        )
    if not plans:
        raise Refused("A transaction", "it has no members", "Give it at least one decision.")
    if any(plan.executor.store is not store for plan in plans):
        raise UsageError("A transaction names a decision of another connection. Make all of them on one, then take it.")
    if len({plan.executor.subject(plan.aggregate_id) for plan in plans}) < len(plans):
        raise Refused("A transaction", "it names one aggregate twice", "Put both steps into one decision.")
    without_id = [plan for plan in plans if plan.command_id is None]
    if without_id and len(without_id) < len(plans):
        raise UsageError(
            f"A transaction has a member without a command id, {_label(without_id[0])}, and others with one, so a "
            "repeated call could not find its outcome. Give all of its members an id, or none."
        )
    return await execute(store, plans, is_transaction=True)


async def retry(
    attempt: Callable[[int], Awaitable[T | Conflict]], targets: Sequence[Target] = (), timeout_s: float = math.inf
) -> T:
    """Call `attempt` with the number of races lost so far, until it returns something other than a `Conflict`.

    Tasks of this process take turns at the same `targets`. Before the first attempt, and after a lost race, there may
    be a pause that makes room for writers elsewhere (see `contention`). `timeout_s` counts from the call: it includes
    waiting for a turn, and is the `command_deadline` of what `attempt` reads and saves. Raises `StoreUnavailable` if
    the turn does not come in that time, and `ConcurrencyConflict` for a race lost after it, after `CONFLICTS_MAX` lost
    races, or after `UNSEEN_MAX` in a row for which the log has no event of another writer.
    """
    deadline, outer_deadline = time.monotonic() + timeout_s, command_deadline.get()
    command_deadline.set(deadline)
    # All tasks take locks in the same order, so that two transactions never wait for each other.
    ordered = targets if len(targets) < 2 else sorted(targets, key=lambda target: target[0])
    locked: list[asyncio.Lock] = []
    try:
        for subject, cache, aggregate_id in ordered:
            lock, is_shared = cache.lock(aggregate_id)
            if is_shared and timeout_s < math.inf:
                await _acquire(lock, subject, timeout_s, deadline)
            else:
                await lock.acquire()
            locked.append(lock)
        now = asyncio.get_running_loop().time
        contended = _contention(targets)
        if contended and (pause_s := max([contention.delay_s(now()) for contention in contended])):
            await asyncio.sleep(pause_s)
        lost_races = unseen = 0
        untargeted = None
        while True:
            began = now()
            outcome = await attempt(lost_races)
            if not isinstance(outcome, Conflict):
                if lost_races or contended:
                    ended = now()
                    for contention in _contention(targets):
                        contention.record_success(ended - began, ended, random.random())  # noqa: S311  no secret
                return outcome
            lost_races += 1
            unseen = unseen + 1 if outcome.is_unseen else 0
            # The content of blobs is stored in time of its own, which moves the deadline.
            if lost_races == CONFLICTS_MAX or unseen == UNSEEN_MAX or time.monotonic() >= command_deadline.get():
                raise ConcurrencyConflict(
                    outcome.subject, outcome.expected, races=lost_races, is_unseen=unseen == UNSEEN_MAX
                )
            for subject, cache, aggregate_id in targets:
                if subject == outcome.subject:
                    contention = cache.contention(aggregate_id)
                    break
            else:
                contention = untargeted = untargeted or ContentionBackoff()
            if pause_s := contention.record_conflict(lost_races - 1, random.random()):  # noqa: S311  no secret
                await asyncio.sleep(pause_s)
    finally:
        command_deadline.set(outer_deadline)
        for lock in locked:
            lock.release()


async def _acquire(lock: asyncio.Lock, subject: str, timeout_s: float, deadline: float) -> None:
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await lock.acquire()
    except TimeoutError:
        raise StoreUnavailable(
            f"A command on {subject}",
            f"for {timeout_s:g} s it waited behind other commands of this connection on the same aggregate, and "
            "nothing of it was sent",
        ) from None


def _contention(targets: Sequence[Target]) -> list[ContentionBackoff]:
    return [
        contention
        for _, cache, aggregate_id in targets
        if (contention := cache.known_contention(aggregate_id)) is not None
    ]


class Executor(Generic[S, E]):
    """The loader of states, maker of decisions and keeper of the cache, of one aggregate type on one connection."""

    def __init__(
        self,
        app: str,
        store: EventStore,
        catalog: Catalog,
        aggregate: Callable[[], S],
        snapshots: Snapshots[S] | None = None,
    ) -> None:
        self.store = store
        self.cache: Cache[S] = Cache()
        self.histories = Histories(store, catalog, aggregate, snapshots)
        self.info = self.histories.info
        self.claims: Callable[[list[Decision[Any, Any]]], Awaitable[list[Decision[Any, Any]] | Conflict]] | None = None
        """Function that decides which claims are recorded with decisions of this type to keep unique values unique."""
        self.app = app
        self.catalog = catalog
        self._events = frozenset(folded_events(aggregate))
        self._with_blobs = self._events & catalog.with_blobs

    def subject(self, aggregate_id: str) -> str:
        """Return the subject of an aggregate's events; raises `Refused` for an id that cannot be a token."""
        return subject_of(self.app, self.info.name, aggregate_id)

    async def load(
        self, aggregate_id: str, is_retry: bool = False, staleness_max: float = STALENESS_MAX
    ) -> FoldedState[S]:
        """Return the state to decide on: the cached state if it is likely the newest, else the newest state of the log.

        On a retry the newest state is read, unless the lost race has shown it.
        """
        if is_retry:
            return self.cache.newest(aggregate_id) or await self.newest(aggregate_id)
        is_confirmed = self.store.is_confirmed or await self.store.confirm()
        cached = self.cache.assume_newest(aggregate_id, staleness_max) if is_confirmed else None
        return cached or await self.newest(aggregate_id)

    async def newest(self, aggregate_id: str) -> FoldedState[S]:
        """Read the newest state from the log, and cache it."""
        cached = self.cache.get(aggregate_id)
        with tracing.span(spans.LOAD, labels={"eventjet.aggregate": self.info.name}) as attributes:
            newest = await self.histories.load(aggregate_id, cached)
            attributes["eventjet.version"] = newest.version
        if cached is not None:
            self.cache.observe_read(aggregate_id, is_stale=newest.position != cached.position)
            if newest.position < cached.position:
                self.cache.drop(aggregate_id)  # the log was restored and does not have the cached state
        self.cache.put(aggregate_id, newest)
        return newest

    async def newest_of_leader(self, aggregate_id: str) -> FoldedState[S]:
        """Return a state that contains every event stored before this call, even if a replica lags behind the leader.

        Raises `StoreUnavailable` as `reaching`.
        """
        if not self.store.may_lag:
            return await self.newest(aggregate_id)
        position = await self.store.last(self.info.name, aggregate_id)
        return await self._reaching(aggregate_id, None, position, 0)

    async def reaching(self, aggregate_id: str, *, position: int = 0, version: int = 0) -> FoldedState[S]:
        """Return a state that contains a position and a version, even if a replica lags behind the leader.

        Raises `StoreUnavailable` if no read has reached them within about five seconds.
        """
        cached = self.cache.get(aggregate_id) if self.store.is_confirmed else None
        return await self._reaching(aggregate_id, cached, position, version)

    async def _reaching(
        self, aggregate_id: str, state: FoldedState[S] | None, position: int, version: int
    ) -> FoldedState[S]:
        for pause_s in LAG_PAUSES_S:
            if state is None or state.position < position or state.version < version:
                state = await self.newest(aggregate_id)
            if state.position >= position and state.version >= version:
                return state
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(self.subject(aggregate_id), f"a replica lags behind position {position}")

    def cache_first(self, event: Recorded[Any]) -> None:
        """Cache the state after an aggregate's first event, unless one is cached, so that a load needs no request."""
        if event.version == 1 and self.cache.get(event.aggregate_id) is None:
            folded = self.histories.folded_first(event)
            if folded is not None:
                self.cache.put(event.aggregate_id, folded)

    async def outdated(self, aggregate_id: str, state: FoldedState[S]) -> Conflict | None:
        """Return a `Conflict` unless the leader's last record is that of this state; it may be older, too."""
        tail = await self.store.tail(self.info.name, aggregate_id)
        if tail is None:
            is_newest = state.position == 0
        else:
            is_newest = (tail[0], event_id_of(tail)) == (state.position, state.event_id)
        return None if is_newest else Conflict(self.subject(aggregate_id), state.position)

    async def decide(self, plan: Planned[S, E], before: FoldedState[S]) -> Decision[S, E] | Conflict:
        """Make a decision on a state.

        Return a `Conflict` if the decision records nothing, or raises, on a state that is not the newest. Raises what
        the decision raises on the newest state, `UsageError`, `UnencodableEvent` and `LogIncomplete`.
        """
        log = self.store.identity
        try:
            has_moved = plan.only_at is not None and plan.only_at != before.position
            events = () if has_moved else recorded_events(plan.decide(own_copy(before.state)))
        except BaseException as raised:
            # A decision is not a coroutine, so a `CancelledError` out of it does not cancel the caller.
            error = UnexpectedExit.instead_of(raised)
            conflict = await self.outdated(plan.aggregate_id, before)
            if conflict is None:
                if error is raised:
                    raise
                raise error from raised
            return conflict
        if not events:
            # Nothing is appended, so the log cannot check the expected position: ask the leader if it is the newest.
            return await self.outdated(plan.aggregate_id, before) or Decision(plan, before, None, before.state)
        if before.version == 0 and (missing_range := self.store.missing_range):
            raise LogIncomplete(
                f"The log {self.app!r}", f"{missing_range}, and {self.subject(plan.aggregate_id)} has no events"
            )
        append = self._append_of(plan, before, events)
        state = own_copy(before.state)
        for new_event in append.events:
            # The event is folded as a reader will decode it, so that an event which `evolve` refuses is not stored.
            state = evolved(state, own_copy(new_event.encoded.event))
        return Decision(plan, before, append, state, self._blobs_in(events) if self._with_blobs else (), log)

    def _blobs_in(self, events: Sequence[E]) -> list[tuple[str, Blob]]:
        return [
            (f"the field {path} of {event_info(type(event)).name}", blob)
            for event in events
            if type(event) in self._with_blobs
            for path, blob in blobs_in(event)
        ]

    def _append_of(self, plan: Planned[S, E], before: FoldedState[S], events: Sequence[E]) -> Append:
        """Encode the events; raises `UsageError` and `UnencodableEvent`."""
        for event in events:
            if type(event) not in self._events:
                description = f"a {type(event).__qualname__}"
                if isinstance(event, type):
                    description = f"the class {event.__qualname__} itself"
                decision_text = "A decision" if plan.called is None else f"The decision {shown_name(plan.called)}"
                event_names = listed(sorted(map(shown_name, self._events)))
                raise UsageError(
                    f"{decision_text} of {self.info.name!r} returned {description}, which is not one of its events. "
                    f"Return events that its `evolve` is annotated with: {event_names}."
                )
        metadata = merge(current_metadata(), plan.metadata)
        # The current span is the command's own, which continues the trace of the metadata.
        traceparent = current_traceparent() or metadata.traceparent
        if metadata is NO_METADATA and plan.command_id is None:
            context = "" if traceparent is None else header_lines([(TRACEPARENT, traceparent)])
        else:
            if traceparent != metadata.traceparent:
                metadata = replace(metadata, traceparent=traceparent)
            request = None if plan.request is None else plan.request.text
            context = header_lines(context_headers(plan.command_id, metadata, request))
        new_events = tuple([NewEvent(new_event_id(), self.catalog.encode(event), context) for event in events])
        return Append(self.info.name, plan.aggregate_id, before.position, before.version, new_events)

    def committed(self, decision: Decision[S, E], append: Append, position: int, was_assumed: bool) -> Committed[S, E]:
        """Cache the state after a save, queue a snapshot if due, and return what came of the decision.

        `position` is that of the aggregate's last event in the save.
        """
        aggregate_id, before, command_id = decision.plan.aggregate_id, decision.before, decision.plan.command_id
        if was_assumed:
            self.cache.observe(aggregate_id, is_stale=False)
        events = tuple([cast("E", new_event.encoded.event) for new_event in append.events])
        version = before.version + len(events)
        after = FoldedState(decision.state, version, position, append.events[-1].event_id, before.commands)
        if command_id is not None:
            after.commands.add(command_id, before.version + 1)
            after.commands.add(command_id, after.version)
        self.cache.put(aggregate_id, after)
        self.histories.keep(aggregate_id, before.version, after)
        return self.answer(after, events)

    def conflicted(self, decision: Decision[S, E], conflict: Conflict, was_assumed: bool) -> None:
        """Cache what a lost race has shown: the state of the decision, with the other writer's event if it is known."""
        aggregate_id, before = decision.plan.aggregate_id, decision.before
        if conflict.subject != self.subject(aggregate_id):
            self.cache.put(aggregate_id, before)
            return
        if was_assumed:
            self.cache.observe(aggregate_id, is_stale=True)
        after = None if conflict.rival is None else self.histories.followed(before, conflict.rival)
        # With known contention a pause comes first, in which others will write again.
        is_crowded = self.cache.contention(aggregate_id).window_s > 0
        self.cache.put(aggregate_id, after or before, OLD if after is None or is_crowded else NEWEST)

    def answer(self, after: FoldedState[S], events: tuple[E, ...]) -> Committed[S, E]:
        """Return what came of a decision whose events the log stored, now or at its first execution."""
        state = own_copy(after.state)
        return Committed(state, events, after.position, after.version, self.app, self.store.identity)


async def append(
    store: EventStore, decisions: Sequence[Decision[Any, Any]], attributes: dict[str, Any] | None = None
) -> tuple[Committed[Any, Any], ...] | Conflict:
    """Append the events of decisions and of the claims that they move, all of them or nothing.

    The content of blobs is stored first. The duration of a successful append, in seconds, is put into `attributes`. A
    conflict is returned and not raised, also where the log was replaced after a decision was made. Raises what else
    `EventStore.append` and `store_blobs` raise, `NotUnique` and `UniqueNotBuilt`.
    """
    claim_count = 0
    if any(decision.plan.executor.claims is not None for decision in decisions):
        claim_decisions = await _decide_claims(decisions)
        if isinstance(claim_decisions, Conflict):
            return claim_decisions
        # Claims go first: the claims that a torn batch leaves block a value, but never let two aggregates have it.
        claim_count, decisions = len(claim_decisions), [*claim_decisions, *decisions]
    appends = [decision.append for decision in decisions if decision.append is not None]
    assert len(appends) == len(decisions), "what records nothing is not appended"
    for decision in decisions:
        if decision.blobs:
            check_save(decision.plan.executor.app, appends)  # before anything is stored in vain
            await store_blobs(store.objects, decision.blobs)
    for decision in decisions:
        if decision.log not in ("", store.identity):
            return Conflict(decision.plan.executor.subject(decision.plan.aggregate_id), decision.before.position)
    were_assumed = [decision.plan.executor.cache.drop(decision.plan.aggregate_id) for decision in decisions]
    began = time.perf_counter()
    try:
        position = await store.append(appends) - sum([len(write.events) for write in appends])
    except ConcurrencyConflict as error:
        conflict = Conflict(error.subject, error.expected, error.rival, error.is_unseen)
        for decision, was_assumed in zip(decisions, were_assumed, strict=True):
            decision.plan.executor.conflicted(decision, conflict, was_assumed)
        return conflict
    if attributes is not None:
        attributes[APPEND_SECONDS] = time.perf_counter() - began
    committed: list[Committed[Any, Any]] = []
    for decision, stored, was_assumed in zip(decisions, appends, were_assumed, strict=True):
        position += len(stored.events)
        committed.append(decision.plan.executor.committed(decision, stored, position, was_assumed))
    return tuple(committed[claim_count:])


async def _decide_claims(decisions: Sequence[Decision[Any, Any]]) -> list[Decision[Any, Any]] | Conflict:
    """Return the claims to record first; raises `NotUnique` and `UniqueNotBuilt` once the states are confirmed."""
    claim_decisions: list[Decision[Any, Any]] = []
    by_executor: dict[Executor[Any, Any], list[Decision[Any, Any]]] = {}
    for decision in decisions:
        by_executor.setdefault(decision.plan.executor, []).append(decision)
    try:
        for executor, decisions_of_type in by_executor.items():
            claims = await executor.claims(decisions_of_type) if executor.claims is not None else []
            if isinstance(claims, Conflict):
                return claims
            claim_decisions += claims
    except (NotUnique, UniqueNotBuilt):
        # The error holds for these states, and nothing has confirmed yet that they are the newest.
        for decision in decisions:
            if conflict := await decision.plan.executor.outdated(decision.plan.aggregate_id, decision.before):
                return conflict
        raise
    return claim_decisions


async def recorded_earlier(
    plans: Sequence[Planned[Any, Any]], states: Sequence[FoldedState[Any]]
) -> tuple[Committed[Any, Any], ...] | Conflict | None:
    """Return what came of commands that were recorded before; None if no state knows any of them.

    A transaction is one save, so the log has the events of all of its commands or of none. Return a `Conflict` if a
    state is not the newest, or is of another log. Raises `Refused` for commands of which only some were recorded, or
    not in one save; `CommandReused` for another request; `SaveTorn`; and what reads raise.
    """
    earlier: list[FirstOutcome[Any] | None] = []
    for plan, state in zip(plans, states, strict=True):
        recorded = await _recorded_earlier(plan, state)
        if isinstance(recorded, Conflict):
            return recorded
        earlier.append(recorded)
    first = next((recorded for recorded in earlier if recorded is not None), None)
    if first is None:
        return None
    for index, (plan, state) in enumerate(zip(plans, states, strict=True)):
        if earlier[index] is None:
            # The command may be older than those that the state knows, or in events after this state.
            recorded = await _recorded_earlier(replace(plan, since=max(0, first.position - BATCH_MAX)), state)
            recorded = recorded or await plan.executor.outdated(plan.aggregate_id, state)
            if isinstance(recorded, Conflict):
                return recorded
            earlier[index] = recorded
    return _of_one_save(plans, earlier)


async def _recorded_earlier(
    plan: Planned[S, E], state: FoldedState[S], *, is_former: bool = False
) -> FirstOutcome[S] | Conflict | None:
    if plan.command_id is None:
        return None
    executor = plan.executor
    versions = await executor.histories.find_command(plan.aggregate_id, state, plan.command_id, plan.since)
    if versions is None:
        return None if plan.former is None else await _recorded_earlier(plan.former, state, is_former=True)
    outcome = await executor.histories.outcome(plan.aggregate_id, *versions, plan.command_id)
    if outcome is None:
        return Conflict(executor.subject(plan.aggregate_id), state.position)
    if (other := _other_causation(plan, outcome)) is not None:
        if is_former:
            return None  # the id is another message's today
        own = plan.causations[0]
        raise Refused(
            f"The command {plan.command_id!r} on {_label(plan)}",
            f"at version {versions[0]} its id recorded a command of {other!r}, and this one is of {own!r}",
            "Give messages ids, and `Reaction.named` names, that do not run into one.",
        )
    request = plan.request
    if (
        outcome.request
        and request is not None
        and outcome.request != request.former
        and not is_same_request(outcome.request, request.text)
    ):
        arguments = differing_arguments(request, outcome.request, [event.data for event in outcome.events])
        raise CommandReused(plan.command_id, _label(plan), versions[0], outcome.request, request.text, arguments)
    return outcome


def _other_causation(plan: Planned[Any, Any], outcome: FirstOutcome[Any]) -> str | None:
    """Return the causation of recorded events of another cause than the command's; None if they are of its own."""
    recorded = next((event.metadata.causation or "" for event in outcome.events), None)
    return None if recorded is None or not plan.causations or recorded in plan.causations else recorded


def _of_one_save(
    plans: Sequence[Planned[Any, Any]], outcomes: Sequence[FirstOutcome[Any] | None]
) -> tuple[Committed[Any, Any], ...]:
    """Return the answers of the commands; raises `Refused` if they were not recorded in one save.

    A restored log does not say which save an event is of: there the commands must be closer than `BATCH_MAX` positions.
    """

    def recorded_text(plan: Planned[Any, Any], outcome: FirstOutcome[Any]) -> str:
        return f"{_label(plan)} recorded its command {plan.command_id!r} at position {outcome.position}"

    pairs = [(plan, outcome) for plan, outcome in zip(plans, outcomes, strict=True) if outcome is not None]
    plan, first = pairs[0]
    for other_plan, outcome in zip(plans, outcomes, strict=True):
        if outcome is None:
            other = f"{_label(other_plan)} never recorded its command {other_plan.command_id!r}"
            reason = f"{recorded_text(plan, first)}, and {other}"
        else:
            is_near = abs(outcome.position - first.position) < BATCH_MAX
            if outcome is first or (outcome.batch is not None and outcome.batch == first.batch and is_near):
                continue
            reason = f"{recorded_text(plan, first)}, and {recorded_text(other_plan, outcome)}, in another save"
        raise Refused(
            "A transaction",
            reason,
            "Nothing was stored now. Repeat a transaction with all of its members, or give it ids that are new.",
        )
    return tuple(
        [
            plan.executor.answer(outcome.after, tuple([event.data for event in outcome.events]))
            for plan, outcome in pairs
        ]
    )


def _label(plan: Planned[Any, Any]) -> str:
    return f"{plan.executor.info.name} {plan.aggregate_id!r}"


def recorded_events(result: Any) -> tuple[Any, ...]:
    """Return the events that a decision returned, as a tuple; raises `UsageError` for a coroutine or an iterator."""
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
