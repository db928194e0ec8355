"""Execute commands: load the state, decide, append what follows, and start again when another writer was first.

1. **load** the state of each aggregate: from the cache where it is likely the newest, else from the log
2. answer with what was **recorded earlier** under the same command ids
3. **decide**; a decision that records nothing, or raises, has its state confirmed by the leader first
4. **append** the events of all decisions in one atomic save, each aggregate at the position its state was read at
5. **retry** from 1 after a conflict, with a pause that makes room for other writers

A cached state is safe to decide on, since the log checks the expected position. One command and a transaction of
several take the same way. A lost race is a value, `Conflict`, on the whole way; only `retry` makes it an exception.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.commands import is_same_request
from eventjet.codec.headers import MSG_ID, TRACEPARENT, RawRecord, context_headers, header
from eventjet.codec.subjects import subject_of
from eventjet.commands.cache import NEWEST, OLD, Cache
from eventjet.commands.contention import STALENESS_MAX, STALENESS_MAX_IN_TRANSACTION, ContentionBackoff
from eventjet.commands.loading import LAG_PAUSES_S, Histories, Snapshots
from eventjet.domain.decision import Committed
from eventjet.domain.history import FoldedState, evolved
from eventjet.domain.identity import new_event_id
from eventjet.domain.recorded import NO_METADATA, Metadata, current_metadata, merge
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
from eventjet.log.store import BATCH_MAX, Append, EventStore, NewEvent
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
"""Of those in a row after which the log had no event of another writer, each of which takes two seconds."""

Target: TypeAlias = tuple[str, Cache[Any], str]
"""An aggregate that is written to: its subject, the cache of its type, its id."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A lost race: another writer's event follows the expected position, so nothing of this save is stored."""

    subject: str
    expected: int
    rival: RawRecord | None = None
    """The other writer's record, where it was the aggregate's last one then; None where that is not known."""
    is_unseen: bool = False
    """The log has no event of another writer: the server compares the save with something else."""


@dataclass(frozen=True, slots=True)
class Planned(Generic[S, E]):
    """A decision on one aggregate that is yet to be made: `Repository.decide` returns it, `Jet.transact` takes it."""

    executor: Executor[S, E]
    aggregate_id: str
    decide: Callable[[S], E | Sequence[E] | None]
    command_id: str | None = None
    metadata: Metadata = NO_METADATA
    request: str | None = None
    """Digest of what is asked for, where there is a command id."""
    since: int | None = None
    """A position before which the command cannot have been recorded, where one is known: its cause's."""
    called: Any = None
    """The decision itself, which traces name."""
    only_at: int | None = None
    """Position of the only state that it is made on; nothing follows on another. None for any state."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[S, E]):
    """A decision that was made on a state."""

    plan: Planned[S, E]
    before: FoldedState[S]
    append: Append | None
    """What is to be stored; None for nothing."""
    state: S
    """The state after its events."""


async def execute(
    store: EventStore, plans: Sequence[Planned[Any, Any]], *, is_transaction: bool = False
) -> tuple[Committed[Any, Any], ...]:
    """Execute one command, or several as a transaction of which all is recorded or nothing.

    Raises what a decision raises, once its state is confirmed; `ConcurrencyConflict` after 100 lost races; what
    `recorded_earlier`, `Executor.decide` and `EventStore.append` raise; and `Refused` for a member of a transaction
    that records nothing: nothing would fence it.
    """
    staleness_max = STALENESS_MAX_IN_TRANSACTION if is_transaction else STALENESS_MAX
    span = None

    async def attempt(lost: int) -> tuple[Committed[Any, Any], ...] | Conflict:
        attributes = None
        if span is not None:
            span.conflicts, attributes = lost, span.attributes
        # 1. load
        states: list[FoldedState[Any]] = []
        for plan in plans:
            states.append(await plan.executor.load(plan.aggregate_id, lost > 0, staleness_max))  # noqa: PERF401  a comprehension that awaits is a coroutine
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
            if decision.append is None:
                if not is_transaction:
                    return (replace(plan.executor.answer(state, ()), confirmed=False),)
                raise Refused(
                    f"A transaction with {_shown(plan)}",
                    "its decision records nothing, so nothing would fence it",
                    "Record an event there, or leave it out.",
                )
            decisions.append(decision)
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
        return await retry(attempt, targets)
    try:
        done = await retry(attempt, targets)
    except BaseException as error:
        if not is_transaction:
            span.attributes["eventjet.aggregate_id"] = first.aggregate_id
        span.ended(0, error)
        raise
    if not is_transaction:
        span.attributes["eventjet.aggregate_id"] = first.aggregate_id
    span.attributes["eventjet.position"] = done[-1].position
    span.ended(sum([len(committed.events) for committed in done]))
    return done


async def transact(store: EventStore, plans: Sequence[Planned[Any, Any]]) -> tuple[Committed[Any, Any], ...]:
    """Execute several commands as one transaction.

    Where all of them were recorded before, returns what came of them then. Raises as `execute`; `Refused` for an
    aggregate named twice, and `UsageError` for a decision of another connection, and where only some have an id.
    """
    for number, plan in enumerate(plans, 1):
        _check_planned(number, plan)
    if not plans:
        raise Refused("A transaction", "it has no members", "Give it at least one decision.")
    if any(plan.executor.store is not store for plan in plans):
        raise UsageError("A transaction names a decision of another connection. Make all of them on one, then take it.")
    if len({plan.executor.subject(plan.aggregate_id) for plan in plans}) < len(plans):
        raise Refused("A transaction", "it names one aggregate twice", "Put both steps into one decision.")
    without_id = [plan for plan in plans if plan.command_id is None]
    if without_id and len(without_id) < len(plans):
        raise UsageError(
            f"A transaction has a member without a command id, {_shown(without_id[0])}, and others with one, so what "
            "came of it could not be told when it is repeated. Give all of its members an id, or none."
        )
    return await execute(store, plans, is_transaction=True)


def _check_planned(number: int, plan: object) -> None:
    if isinstance(plan, Planned):
        return
    if asyncio.iscoroutine(plan):
        plan.close()  # it will never be awaited, and Python would say so as well
    raise UsageError(
        f"Member {number} of the transaction is a {type(plan).__name__}. Give `transact` what `repository.decide(…)` "
        "returns, one after the other: not a list, and nothing that `execute` returns."
    )


async def retry(attempt: Callable[[int], Awaitable[T | Conflict]], targets: Sequence[Target] = ()) -> T:
    """Return what `attempt` gives that is no conflict; it is called with the number of races lost so far.

    Tasks of this process take turns at the same `targets`, and writers elsewhere make room for each other (see
    `contention`): before the first try, and after a lost race. Raises `ConcurrencyConflict` after `CONFLICTS_MAX` lost
    races, or `UNSEEN_MAX` in a row whose winner nobody sees.
    """
    # Locks are taken in one order everywhere, so that two transactions never wait for each other.
    ordered = targets if len(targets) < 2 else sorted(targets, key=lambda target: target[0])
    locks = [cache.lock(aggregate_id) for _, cache, aggregate_id in ordered]
    locked: list[asyncio.Lock] = []
    try:
        for lock in locks:
            await lock.acquire()
            locked.append(lock)
        now = asyncio.get_running_loop().time
        contended = _contention(targets)
        if contended and (pause_s := max([contention.delay_s(now()) for contention in contended])):
            await asyncio.sleep(pause_s)
        lost = unseen = 0
        untargeted = None
        while True:
            began = now()
            outcome = await attempt(lost)
            if not isinstance(outcome, Conflict):
                if lost or contended:
                    ended = now()
                    for contention in _contention(targets):
                        contention.record_success(ended - began, ended, random.random())  # noqa: S311  no secret
                return outcome
            lost += 1
            unseen = unseen + 1 if outcome.is_unseen else 0
            if lost == CONFLICTS_MAX or unseen == UNSEEN_MAX:
                raise ConcurrencyConflict(outcome.subject, outcome.expected, races=lost, is_unseen=unseen == UNSEEN_MAX)
            for subject, cache, aggregate_id in targets:
                if subject == outcome.subject:
                    contention = cache.contention(aggregate_id)
                    break
            else:
                contention = untargeted = untargeted or ContentionBackoff()
            if pause_s := contention.record_conflict(lost - 1, random.random()):  # noqa: S311  no secret
                await asyncio.sleep(pause_s)
    finally:
        for lock in locked:
            lock.release()


def _contention(targets: Sequence[Target]) -> list[ContentionBackoff]:
    return [
        contention
        for _, cache, aggregate_id in targets
        if (contention := cache.known_contention(aggregate_id)) is not None
    ]


class Executor(Generic[S, E]):
    """One aggregate type on one connection: loads its states, makes its decisions, remembers what came of them."""

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
        """Decides what is to be recorded beside decisions of this type, so that unique values stay so."""
        self.app = app
        self.catalog = catalog
        self._events = frozenset(folded_events(aggregate))

    def subject(self, aggregate_id: str) -> str:
        """Return the subject of an aggregate's events; raises `Refused` for an id that cannot be a token."""
        return subject_of(self.app, self.info.name, aggregate_id)

    async def load(
        self, aggregate_id: str, is_retry: bool = False, staleness_max: float = STALENESS_MAX
    ) -> FoldedState[S]:
        """Return the state to decide on: the cached one where it is likely the newest, else the newest.

        On a retry the newest is read, unless the lost race told what it is.
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
                self.cache.drop(aggregate_id)  # the log was restored, and knows nothing of it
        self.cache.put(aggregate_id, newest)
        return newest

    async def reaching(self, aggregate_id: str, *, position: int = 0, version: int = 0) -> FoldedState[S]:
        """Return a state that contains a position and a version, however far a replica lags behind the leader.

        Raises `StoreUnavailable` when that does not come within a second or two.
        """
        state = self.cache.get(aggregate_id) if self.store.is_confirmed else None
        for pause_s in LAG_PAUSES_S:
            if state is None or state.position < position or state.version < version:
                state = await self.newest(aggregate_id)
            if state.position >= position and state.version >= version:
                return state
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(self.subject(aggregate_id), f"a replica lags behind position {position}")

    async def outdated(self, aggregate_id: str, state: FoldedState[S]) -> Conflict | None:
        """Return None if the leader knows nothing newer, and nothing else: the log may have been made again."""
        tail = await self.store.tail(self.info.name, aggregate_id)
        if tail is None:
            is_newest = state.position == 0
        else:
            is_newest = (tail[0], header(tail[3], MSG_ID) or "") == (state.position, state.event_id)
        return None if is_newest else Conflict(self.subject(aggregate_id), state.position)

    async def decide(self, plan: Planned[S, E], before: FoldedState[S]) -> Decision[S, E] | Conflict:
        """Make a decision on a state; a conflict when it records nothing, or raises, on a state that is not the newest.

        Raises what the decision raises on the newest state, `UsageError`, `UnencodableEvent` and `LogIncomplete`.
        """
        try:
            has_moved = plan.only_at is not None and plan.only_at != before.position
            events = () if has_moved else recorded_events(plan.decide(own_copy(before.state)))
        except BaseException as raised:
            # A decision awaits nothing, so what looks like a cancellation is none of the caller.
            error = UnexpectedExit.instead_of(raised)
            conflict = await self.outdated(plan.aggregate_id, before)
            if conflict is None:
                if error is raised:
                    raise
                raise error from raised
            return conflict
        if not events:
            # Nothing is appended, so the log cannot check the expected position: ask whether it is the newest.
            return await self.outdated(plan.aggregate_id, before) or Decision(plan, before, None, before.state)
        if before.version == 0 and (gone := self.store.missing_range):
            raise LogIncomplete(f"The log {self.app!r}", f"{gone}, and {self.subject(plan.aggregate_id)} has no events")
        append = self._append_of(plan, before, events)
        state = own_copy(before.state)
        for new in append.events:
            # As it will be read back: what no fold can take is not stored.
            state = evolved(state, own_copy(new.encoded.event))
        return Decision(plan, before, append, state)

    def _append_of(self, plan: Planned[S, E], before: FoldedState[S], events: Sequence[E]) -> Append:
        """Encode the events; raises `UsageError` and `UnencodableEvent`."""
        for event in events:
            if type(event) not in self._events:
                what = f"a {type(event).__qualname__}"
                if isinstance(event, type):
                    what = f"the class {event.__qualname__} itself"
                named = "A decision" if plan.called is None else f"The decision {shown_name(plan.called)}"
                known = listed(sorted(map(shown_name, self._events)))
                raise UsageError(
                    f"{named} of {self.info.name!r} returned {what}, which is not one of its events. Return events "
                    f"that its `evolve` is annotated with: {known}."
                )
        metadata = merge(current_metadata(), plan.metadata)
        # The command's own span, which goes on with the trace it was given.
        traceparent = current_traceparent() or metadata.traceparent
        if metadata is NO_METADATA and plan.command_id is None:
            context = () if traceparent is None else ((TRACEPARENT, traceparent),)
        else:
            if traceparent != metadata.traceparent:
                metadata = replace(metadata, traceparent=traceparent)
            context = tuple(context_headers(plan.command_id, metadata, plan.request))
        new = tuple([NewEvent(new_event_id(), self.catalog.encode(event), context) for event in events])
        return Append(self.info.name, plan.aggregate_id, before.position, before.version, new)

    def committed(self, decision: Decision[S, E], append: Append, position: int, was_assumed: bool) -> Committed[S, E]:
        """Cache the state after a save whose last event of this aggregate is at `position`; queue a snapshot if due."""
        aggregate_id, before, command_id = decision.plan.aggregate_id, decision.before, decision.plan.command_id
        if was_assumed:
            self.cache.observe(aggregate_id, is_stale=False)
        events = tuple([cast("E", new.encoded.event) for new in append.events])
        version = before.version + len(events)
        after = FoldedState(decision.state, version, position, append.events[-1].event_id, before.commands)
        if command_id is not None:
            after.commands.add(command_id, before.version + 1)
            after.commands.add(command_id, after.version)
        self.cache.put(aggregate_id, after)
        self.histories.keep(aggregate_id, before.version, after)
        return self.answer(after, events)

    def conflicted(self, decision: Decision[S, E], conflict: Conflict, was_assumed: bool) -> None:
        """Cache what a lost race has told: the state decided on, or that and the rival's event that follows it."""
        aggregate_id, before = decision.plan.aggregate_id, decision.before
        if conflict.subject != self.subject(aggregate_id):
            self.cache.put(aggregate_id, before)
            return
        if was_assumed:
            self.cache.observe(aggregate_id, is_stale=True)
        after = None if conflict.rival is None else self.histories.followed(before, conflict.rival)
        # Where others are known to compete a pause comes first, and others will write in it.
        is_crowded = self.cache.contention(aggregate_id).window_s > 0
        self.cache.put(aggregate_id, after or before, OLD if after is None or is_crowded else NEWEST)

    def answer(self, after: FoldedState[S], events: tuple[E, ...]) -> Committed[S, E]:
        """Return what came of a decision whose events the log stored, now or when it was made first."""
        state = own_copy(after.state)
        return Committed(state, events, after.position, after.version, self.app, self.store.identity)


async def append(
    store: EventStore, decisions: Sequence[Decision[Any, Any]], attributes: dict[str, Any] | None = None
) -> tuple[Committed[Any, Any], ...] | Conflict:
    """Append what was decided with the claims it moves, all of it or nothing; puts the seconds into `attributes`.

    Raises what `EventStore.append` raises, but for a conflict; `NotUnique` and `UniqueNotBuilt`.
    """
    claims = 0
    if any(decision.plan.executor.claims is not None for decision in decisions):
        claimed = await _claimed(decisions)
        if isinstance(claimed, Conflict):
            return claimed
        # Claims first: what a torn batch leaves of them refuses a value, and lets no two have it.
        claims, decisions = len(claimed), [*claimed, *decisions]
    appends = [decision.append for decision in decisions if decision.append is not None]
    assert len(appends) == len(decisions), "what records nothing is not appended"
    were_assumed = [decision.plan.executor.cache.drop(decision.plan.aggregate_id) for decision in decisions]
    began = time.perf_counter()
    try:
        position = await store.append(appends) - sum([len(one.events) for one in appends])
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
    return tuple(committed[claims:])


async def _claimed(decisions: Sequence[Decision[Any, Any]]) -> list[Decision[Any, Any]] | Conflict:
    """Return what has to be recorded first so that unique values stay unique; raises `NotUnique`, `UniqueNotBuilt`."""
    claimed: list[Decision[Any, Any]] = []
    by_executor: dict[Executor[Any, Any], list[Decision[Any, Any]]] = {}
    for decision in decisions:
        by_executor.setdefault(decision.plan.executor, []).append(decision)
    try:
        for executor, of_type in by_executor.items():
            moved = await executor.claims(of_type) if executor.claims is not None else []
            if isinstance(moved, Conflict):
                return moved
            claimed += moved
    except (NotUnique, UniqueNotBuilt):
        # It is true of these states; whether they are the newest, nothing has checked.
        for decision in decisions:
            if conflict := await decision.plan.executor.outdated(decision.plan.aggregate_id, decision.before):
                return conflict
        raise
    return claimed


@dataclass(frozen=True, slots=True)
class _Earlier(Generic[S, E]):
    """A command that was recorded before."""

    answer: Committed[S, E]
    position: int
    """Of its first event."""
    batch: str | None
    """As `FirstOutcome.batch`."""


async def recorded_earlier(
    plans: Sequence[Planned[Any, Any]], states: Sequence[FoldedState[Any]]
) -> tuple[Committed[Any, Any], ...] | Conflict | None:
    """Return what came of commands that were recorded before; None for those that no state knows.

    A transaction is one save, so the log holds what all of its commands recorded, or nothing of any. A conflict where a
    state turns out not to be the newest, or is of another log. Raises `Refused` for commands of which only some were
    recorded, or not in one save; `CommandReused` for another request, `SaveTorn`, and what reads raise.
    """
    earlier: list[_Earlier[Any, Any] | None] = []
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
            # It may be beyond the commands that are remembered, or in events that this state has not seen.
            recorded = await _recorded_earlier(replace(plan, since=max(0, first.position - BATCH_MAX)), state)
            recorded = recorded or await plan.executor.outdated(plan.aggregate_id, state)
            if isinstance(recorded, Conflict):
                return recorded
            earlier[index] = recorded
    return _of_one_save(plans, earlier)


async def _recorded_earlier(plan: Planned[S, E], state: FoldedState[S]) -> _Earlier[S, E] | Conflict | None:
    if plan.command_id is None:
        return None
    executor = plan.executor
    versions = await executor.histories.find_command(plan.aggregate_id, state, plan.command_id, plan.since)
    if versions is None:
        return None
    outcome = await executor.histories.outcome(plan.aggregate_id, *versions, plan.command_id)
    if outcome is None:
        return Conflict(executor.subject(plan.aggregate_id), state.position)
    if outcome.request and plan.request and not is_same_request(outcome.request, plan.request):
        raise CommandReused(plan.command_id, _shown(plan), versions[0], outcome.request, plan.request)
    answer = executor.answer(outcome.after, tuple([cast("E", event.data) for event in outcome.events]))
    return _Earlier(answer, outcome.position, outcome.batch)


def _of_one_save(
    plans: Sequence[Planned[Any, Any]], earlier: Sequence[_Earlier[Any, Any] | None]
) -> tuple[Committed[Any, Any], ...]:
    """Return the answers; raises `Refused` where they are not those of one save.

    A log that was restored does not tell its batches: there they are no further apart than one batch is long.
    """

    def shown(plan: Planned[Any, Any], recorded: _Earlier[Any, Any]) -> str:
        return f"{_shown(plan)} recorded its command {plan.command_id!r} at position {recorded.position}"

    known = [(plan, recorded) for plan, recorded in zip(plans, earlier, strict=True) if recorded is not None]
    plan, first = known[0]
    for other, recorded in zip(plans, earlier, strict=True):
        if recorded is None:
            reason = f"{shown(plan, first)}, and {_shown(other)} never recorded its command {other.command_id!r}"
        else:
            is_near = abs(recorded.position - first.position) < BATCH_MAX
            if recorded is first or (recorded.batch is not None and recorded.batch == first.batch and is_near):
                continue
            reason = f"{shown(plan, first)}, and {shown(other, recorded)}, in another save"
        raise Refused(
            "A transaction",
            reason,
            "Nothing was stored now. Repeat a transaction with all of its members, or give it ids that are new.",
        )
    return tuple([recorded.answer for _, recorded in known])


def _shown(plan: Planned[Any, Any]) -> str:
    return f"{plan.executor.info.name} {plan.aggregate_id!r}"


def recorded_events(result: Any) -> tuple[Any, ...]:
    """Return what a decision returned as a tuple; raises `UsageError` for a coroutine or an iterator."""
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
