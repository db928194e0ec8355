"""One aggregate type: load, decide, append, and on conflict (see `decisions`) decide again.

`execute` may start from the cache (see `cache`): a cached state is safe to decide on, because the log checks the
expected position. A decision that records nothing, or raises, has no such check, so its state is confirmed against the
leader first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.commands import request_of
from eventjet.codec.headers import MSG_ID, TRACEPARENT, context_headers, header
from eventjet.codec.subjects import subject_of
from eventjet.commands.cache import NEWEST, OLD, Cache
from eventjet.commands.claims import Claims, claim_catalog
from eventjet.commands.decisions import Committed, Decided, Planned, recorded, recorded_events, retried
from eventjet.commands.excerpts import Excerpt
from eventjet.commands.histories import LAG_PAUSES_S, Histories, Snapshots
from eventjet.commands.repeated import repeated
from eventjet.commands.rivals import CONFIRMED_ABOVE
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.claim import Claim
from eventjet.domain.decision import check_decision, decided_on
from eventjet.domain.history import FoldedState, evolved
from eventjet.domain.identity import new_event_id
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded, current_metadata, merge
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import folded_events, shown_name
from eventjet.errors import ConcurrencyConflict, LogIncomplete, StoreUnavailable, UnexpectedExit, UsageError
from eventjet.log.store import Append, EventStore, NewEvent
from eventjet.loop_guard import LoopGuard
from eventjet.observability import spans, tracing
from eventjet.observability.tracing import active, current_traceparent
from eventjet.spelling import listed

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


class Repository(Generic[S, E]):
    """One aggregate type on one connection. Safe for any number of tasks of the loop that opened that.

    ```python
    accounts = jet.repository(Account)
    done = await accounts.execute("a-1", Account.deposit, Decimal(100))
    assert (done.state.balance, done.version) == (100, 1)
    assert (await accounts.load("a-1")).balance == 100
    ```
    """

    def __init__(
        self,
        app: str,
        store: EventStore,
        catalog: Catalog,
        aggregate: Callable[[], S],
        snapshots: Snapshots[S] | None = None,
        guard: LoopGuard | None = None,
    ) -> None:
        self.cache: Cache[S] = Cache()
        self.histories = Histories(store, catalog, aggregate, snapshots)
        self.info = aggregate_info(aggregate)
        self.claims = self._claims(app, store, catalog)
        """Of the values that are unique; None where none are."""
        self._guard = guard or LoopGuard()
        self._app = app
        self._aggregate = aggregate
        self._catalog = catalog
        self._events = frozenset(folded_events(aggregate))

    async def load(
        self,
        aggregate_id: str,
        /,
        *,
        version: int | None = None,
        position: int | None = None,
        at: datetime | None = None,
    ) -> S:
        """The state now, or as it was at a version, a position of the log or a time.

        An id without events is the initial state. Always reads the tail. Raises `HistoryBroken`, `CodecError`,
        `StoreUnavailable`, and `UsageError` for a bound that is not past.
        """
        self._guard.check()
        self.subject(aggregate_id)
        if version is not None or position is not None or at is not None:
            found = await self.histories.load_until(aggregate_id, version=version, position=position, at=at)
            return own_copy(found.state)
        return own_copy((await self.fresh(aggregate_id)).state)

    async def history(
        self,
        aggregate_id: str,
        /,
        *,
        after: int = 0,
        version: int | None = None,
        position: int | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> list[Recorded[E]]:
        """Recorded events of one aggregate in order: all, or those after a version and up to one, or to a position.

        `limit` of them at the most, the oldest or the newest ones. What is not asked for is not read, as far as the
        server allows; the last event is two direct gets. Bounds beyond the end are no error. What is read has to follow
        on one another, and on the event before it, as `load` would have it. Raises `HistoryBroken` where it does not,
        `CodecError`, `StoreUnavailable`, and `UsageError` for what is no bound.
        """
        self._guard.check()
        self.subject(aggregate_id)
        return await self.histories.events(aggregate_id, Excerpt(after, version, position, newest_first, limit))

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Decide on the aggregate's state and record what follows, at once or not at all.

        The decision is made again when another writer was quicker. Raises what the decision raises, once its state is
        confirmed; `ConcurrencyConflict` after 100 lost races; `UsageError` for what is no decision, or arguments that
        do not fit; and what `EventStore.append` raises.
        """
        return await self.run(self.decide(aggregate_id, decide, *args, **kwargs))

    def decide(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Planned[S, E]:
        """A decision for `Jet.transact` to take together with others."""
        check_decision(self._aggregate, decide, aggregate_id)
        call = partial(decided_on, self._aggregate, decide, args=args, kwargs=kwargs)
        return Planned(self, aggregate_id, call, called=decide)

    def command(self, command_id: str | None = None, /, *, metadata: Metadata = NO_METADATA) -> Command[S, E]:
        """An idempotent command: the same id on the same aggregate returns the first outcome.

        The newest 1,024 ids of an aggregate are known; all of them when it has no snapshot policy. A command that
        recorded nothing is not remembered. An id that comes with another decision or other arguments raises
        `CommandReused`. Without an id, only the metadata is carried.
        """
        context_headers(command_id, metadata)  # refused here, before anything is decided
        return Command(self, command_id, metadata)

    async def run(self, plan: Planned[S, E]) -> Committed[S, E]:
        """What `execute` does, with an id and metadata where the plan has them."""
        self._guard.check()  # before the lock, for which the rightful loop would wait, too
        places = [(self.subject(plan.aggregate_id), self.cache, plan.aggregate_id)]
        telemetry = active()
        told = None
        if telemetry is not None:
            parent = plan.metadata.traceparent or current_metadata().traceparent
            told = telemetry.command(self.info.name, getattr(plan.called, "__name__", "decide"), parent)
        if told is None:
            async with self.cache.lock(plan.aggregate_id):
                return await retried(lambda again: self._attempt(plan, again), places)
        try:
            async with self.cache.lock(plan.aggregate_id):
                done = await retried(lambda again: self._attempt(plan, told.again(again), told.more), places)
        except BaseException as error:
            told.more["eventjet.aggregate_id"] = plan.aggregate_id
            told.ended(0, error)
            raise
        told.more.update({"eventjet.aggregate_id": plan.aggregate_id, "eventjet.position": done.position})
        told.ended(len(done.events))
        return done

    async def _attempt(
        self, plan: Planned[S, E], again: bool, told: dict[str, Any] | None = None
    ) -> Committed[S, E] | ConcurrencyConflict:
        held = await self.known(plan.aggregate_id, again)
        before = await repeated(plan, held)
        if before is not None:
            return before if isinstance(before, ConcurrencyConflict) else before.done
        decided = await self.decided(plan, held)
        if isinstance(decided, ConcurrencyConflict):
            return decided
        if decided.append is None:
            return replace(self.answer(held, ()), confirmed=False)
        saved = await recorded(self.histories.store, [decided], told)
        return saved if isinstance(saved, ConcurrencyConflict) else saved[0]

    async def known(self, aggregate_id: str, again: bool, at_most: float = CONFIRMED_ABOVE) -> FoldedState[S]:
        """The state to decide on: as it is remembered, or the newest one.

        That is read where nothing is remembered, where what is remembered is old by a chance higher than `at_most`, and
        `again` after a lost race, unless that told what the newest is.
        """
        if again:
            return self.cache.newest(aggregate_id) or await self.fresh(aggregate_id)
        store = self.histories.store
        is_certain = store.is_certain or await store.confirm()
        remembered = self.cache.relied_upon(aggregate_id, at_most) if is_certain else None
        return remembered or await self.fresh(aggregate_id)

    async def decided(self, plan: Planned[S, E], held: FoldedState[S]) -> Decided[S, E] | ConcurrencyConflict:
        """The decision on a state; a conflict when it records nothing, or raises, on a state that is not the newest.

        Raises what the decision raises on the newest state, `UsageError`, `UnencodableEvent` and `LogIncomplete`.
        """
        try:
            has_moved = plan.only_at is not None and plan.only_at != held.position
            events = () if has_moved else recorded_events(plan.decide(own_copy(held.state)))
        except BaseException as raised:
            # A decision awaits nothing, so what looks like a cancellation is none of the caller.
            error = UnexpectedExit.instead_of(raised)
            conflict = await self.outdated(plan.aggregate_id, held)
            if conflict is None:
                if error is raised:
                    raise
                raise error from raised
            return conflict
        if not events:
            # Nothing is appended, so the log cannot check the expected position: ask whether it is the newest.
            return await self.outdated(plan.aggregate_id, held) or Decided(plan, held, None, held.state)
        if held.version == 0 and (gone := self.histories.store.loss):
            raise LogIncomplete(
                f"The log {self._app!r}", f"{gone}, and {self.subject(plan.aggregate_id)} has no events"
            )
        append = self._append_of(plan, held, events)
        state = own_copy(held.state)
        for new in append.events:
            # As it will be read back: what no fold can take is not stored.
            state = evolved(state, own_copy(new.encoded.event))
        return Decided(plan, held, append, state)

    async def reaching(self, aggregate_id: str, *, position: int = 0, version: int = 0) -> FoldedState[S]:
        """A state that contains what is at a position and a version, however far a replica lags behind the leader.

        Raises `StoreUnavailable` when that does not come within a second or two.
        """
        held = self.cache.get(aggregate_id) if self.histories.store.is_certain else None
        for pause_s in LAG_PAUSES_S:
            if held is None or held.position < position or held.version < version:
                held = await self.fresh(aggregate_id)
            if held.position >= position and held.version >= version:
                return held
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(self.subject(aggregate_id), f"a replica lags behind position {position}")

    async def fresh(self, aggregate_id: str) -> FoldedState[S]:
        """The newest state, remembered."""
        known = self.cache.get(aggregate_id)
        with tracing.span(spans.LOAD, labels={"eventjet.aggregate": self.info.name}) as told:
            held = await self.histories.load(aggregate_id, known)
            told["eventjet.version"] = held.version
        if known is not None:
            self.cache.looked(aggregate_id, is_old=held.position != known.position)
            if held.position < known.position:
                self.cache.drop(aggregate_id)  # the log was restored, and knows nothing of it
        self.cache.put(aggregate_id, held)
        return held

    def committed(self, decided: Decided[S, E], append: Append, position: int) -> Committed[S, E]:
        """What came of a save whose last event of this aggregate is at `position`; remembered, and kept if due."""
        aggregate_id, held, command_id = decided.plan.aggregate_id, decided.held, decided.plan.command_id
        events = tuple(cast("E", new.encoded.event) for new in append.events)
        version = held.version + len(events)
        after = FoldedState(decided.state, version, position, append.events[-1].event_id, held.commands)
        if command_id is not None:
            after.commands.add(command_id, held.version + 1)
            after.commands.add(command_id, after.version)
        self.cache.put(aggregate_id, after)
        self.histories.keep(aggregate_id, held.version, after)
        return self.answer(after, events)

    def lost(self, decided: Decided[S, E], conflict: ConcurrencyConflict) -> None:
        """Remember what a lost race has told: what was decided on, or that and the event of a rival that follows it."""
        aggregate_id, held = decided.plan.aggregate_id, decided.held
        if conflict.subject != self.subject(aggregate_id):
            self.cache.put(aggregate_id, held)
            return
        after = None if conflict.rival is None else self.histories.followed(held, conflict.rival)
        is_crowded = self.cache.rivals(aggregate_id).window_s > 0  # a pause comes first, and others will write in it
        self.cache.put(aggregate_id, after or held, OLD if after is None or is_crowded else NEWEST)

    def answer(self, after: FoldedState[S], events: tuple[E, ...]) -> Committed[S, E]:
        """What came of a decision whose events the log stored, now or when it was made first."""
        log = self.histories.store.identity
        return Committed(own_copy(after.state), events, after.position, after.version, self._app, log)

    def subject(self, aggregate_id: str) -> str:
        """Where its events are; raises `Refused` for an id that cannot be a token."""
        return subject_of(self._app, self.info.name, aggregate_id)

    async def outdated(self, aggregate_id: str, held: FoldedState[S]) -> ConcurrencyConflict | None:
        """None when the leader knows of nothing newer, and of nothing else: the log may have been made again."""
        tail = await self.histories.store.tail(self.info.name, aggregate_id)
        if (
            (held.position == 0)
            if tail is None
            else (tail[0], header(tail[3], MSG_ID) or "") == (held.position, held.event_id)
        ):
            return None
        return ConcurrencyConflict(self.subject(aggregate_id), held.position)

    def _claims(self, app: str, store: EventStore, catalog: Catalog) -> Claims | None:
        if not self.info.unique:
            return None
        return Claims(Repository(app, store, claim_catalog(catalog), Claim), self.info.name, self.info.unique)

    def _append_of(self, plan: Planned[S, E], held: FoldedState[S], events: Sequence[E]) -> Append:
        """The part of a save that these events are; raises `UsageError` and `UnencodableEvent`."""
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
        merged = merge(current_metadata(), plan.metadata)
        # The command's own span, which goes on with the trace it was given.
        traceparent = current_traceparent() or merged.traceparent
        if merged is NO_METADATA and plan.command_id is None:
            context = () if traceparent is None else ((TRACEPARENT, traceparent),)
        else:
            if traceparent != merged.traceparent:
                merged = replace(merged, traceparent=traceparent)
            context = tuple(context_headers(plan.command_id, merged, plan.request))
        made = tuple(NewEvent(new_event_id(), self._catalog.encode(event), context) for event in events)
        return Append(self.info.name, plan.aggregate_id, held.position, held.version, made)


class Command(Generic[S, E]):
    """What `Repository.command` returns: `execute` and `decide` with an id and metadata."""

    def __init__(self, repository: Repository[S, E], command_id: str | None, metadata: Metadata) -> None:
        self._repository = repository
        self._command_id = command_id
        self._metadata = metadata

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """As `Repository.execute`, once."""
        return await self._repository.run(self.decide(aggregate_id, decide, *args, **kwargs))

    def decide(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Planned[S, E]:
        """As `Repository.decide`; a transaction of commands is recorded once."""
        plan = self._repository.decide(aggregate_id, decide, *args, **kwargs)
        command_id, request = self._command_id, None
        if command_id is not None:
            request = request_of(decide, args, kwargs, whose=f"{aggregate_id}\n{command_id}\n")
        return replace(plan, command_id=command_id, metadata=self._metadata, request=request)
