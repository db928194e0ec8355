"""One aggregate type: load, decide, append, and on conflict (see `conflicts`) decide again.

`execute` may start from the cache: a cached state is safe to decide on, because the log checks the expected position. A
decision that records nothing, or raises, has no such check, so its state is confirmed against the leader first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import context_headers
from eventjet.codec.subjects import subject_of
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import FoldedState
from eventjet.domain.identity import new_event_id
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded, current_metadata, merge
from eventjet.domain.subscription import folded_events
from eventjet.errors import ConcurrencyConflict, UsageError
from eventjet.observability.tracing import current_traceparent
from eventjet.repository.cache import Cache
from eventjet.repository.conflicts import CONFLICTS_MAX, retried
from eventjet.repository.histories import Histories, Snapshots
from eventjet.repository.planned import Committed, Decided, Planned, recorded_events
from eventjet.store.store import Append, EventStore, NewEvent

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


class Repository(Generic[S, E]):
    """One aggregate type on one connection. Safe for any number of tasks of one loop."""

    def __init__(
        self,
        app: str,
        store: EventStore,
        catalog: Catalog,
        aggregate: Callable[[], S],
        *,
        snapshots: Snapshots[S] | None = None,
        conflicts_max: int = CONFLICTS_MAX,
    ) -> None:
        self.cache: Cache[S] = Cache()
        self.histories = Histories(store, catalog, aggregate, snapshots)
        self.info = aggregate_info(aggregate)
        self._app = app
        self._catalog = catalog
        self._events = frozenset(folded_events(aggregate))
        self._conflicts_max = conflicts_max

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
        self.subject(aggregate_id)
        if version is not None or position is not None or at is not None:
            found = await self.histories.load_until(aggregate_id, version=version, position=position, at=at)
            return found.state
        return (await self.fresh(aggregate_id)).state

    async def history(self, aggregate_id: str, /) -> list[Recorded[E]]:
        """All recorded events of one aggregate, in order."""
        return await self.histories.events(aggregate_id)

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
        confirmed; `ConcurrencyConflict` after 100 lost races; and what `EventStore.append` raises.
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
        return Planned(self, aggregate_id, lambda state: decide(state, *args, **kwargs))

    def command(self, command_id: str | None = None, /, *, metadata: Metadata = NO_METADATA) -> Command[S, E]:
        """An idempotent command: the same id on the same aggregate returns the first outcome.

        The newest 1,024 ids of an aggregate are known; all of them when it has no snapshot policy. A command that
        recorded nothing is not remembered. Without an id, only the metadata is carried.
        """
        context_headers(command_id, metadata)  # refused here, before anything is decided
        return Command(self, command_id, metadata)

    async def run(self, plan: Planned[S, E]) -> Committed[S, E]:
        """What `execute` does, with an id and metadata where the plan has them."""
        self.subject(plan.aggregate_id)
        async with self.cache.alone(plan.aggregate_id):
            return await retried(lambda again: self._attempt(plan, again), self._conflicts_max)

    async def _attempt(self, plan: Planned[S, E], again: bool) -> Committed[S, E] | ConcurrencyConflict:
        held = await self.known(plan.aggregate_id, again)
        if plan.command_id is not None:
            versions = await self.histories.find_command(plan.aggregate_id, held, plan.command_id)
            if versions is not None:
                return await self._first_outcome(plan.aggregate_id, *versions)
        decided = await self.decided(plan, held)
        if isinstance(decided, ConcurrencyConflict):
            return decided
        if decided.append is None:
            return Committed(held.state, (), held.position, held.version, self._app)
        outcome = await recorded(self.histories.store, [decided])
        return outcome if isinstance(outcome, ConcurrencyConflict) else outcome[0]

    async def known(self, aggregate_id: str, again: bool) -> FoldedState[S]:
        """The state to decide on: as it is remembered, or the newest one when it is read `again`."""
        remembered = None if again else self.cache.get(aggregate_id)
        return remembered or await self.fresh(aggregate_id)

    async def decided(self, plan: Planned[S, E], held: FoldedState[S]) -> Decided[S, E] | ConcurrencyConflict:
        """The decision on a state; a conflict when it records nothing, or raises, on a state that is not the newest.

        Raises what the decision raises on the newest state, `UsageError` and `UnencodableEvent`.
        """
        try:
            events = recorded_events(plan.decide(held.state))
        except Exception:
            if await self._is_current(plan.aggregate_id, held):
                raise
            return self._stale(plan.aggregate_id, held)
        if not events:
            # Nothing is appended, so the log cannot check the expected position: ask whether it is the newest.
            if await self._is_current(plan.aggregate_id, held):
                return Decided(plan, held, None, held.state)
            return self._stale(plan.aggregate_id, held)
        append = self._append_of(plan, held, events)
        return Decided(plan, held, append, self._state_after(held.state, append))

    async def fresh(self, aggregate_id: str) -> FoldedState[S]:
        """The newest state, remembered."""
        known = self.cache.get(aggregate_id)
        held = await self.histories.load(aggregate_id, known)
        if known is not None and held.position < known.position:
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
        return Committed(decided.state, events, position, after.version, self._app)

    def subject(self, aggregate_id: str) -> str:
        """Where its events are; raises `Refused` for an id that cannot be a token."""
        return subject_of(self._app, self.info.name, aggregate_id)

    async def _is_current(self, aggregate_id: str, held: FoldedState[S]) -> bool:
        """Whether the leader knows of nothing newer."""
        return await self.histories.store.last(self.info.name, aggregate_id) == held.position

    def _stale(self, aggregate_id: str, held: FoldedState[S]) -> ConcurrencyConflict:
        return ConcurrencyConflict(self.subject(aggregate_id), held.position)

    def _append_of(self, plan: Planned[S, E], held: FoldedState[S], events: Sequence[E]) -> Append:
        """The part of a save that these events are; raises `UsageError` and `UnencodableEvent`."""
        merged = merge(current_metadata(), plan.metadata)
        if merged.traceparent is None and (traceparent := current_traceparent()) is not None:
            merged = merge(Metadata(traceparent=traceparent), merged)
        bare = merged is NO_METADATA and plan.command_id is None
        context = () if bare else tuple(context_headers(plan.command_id, merged))
        made = tuple(NewEvent(new_event_id(), self._encoded(event), context) for event in events)
        return Append(self.info.name, plan.aggregate_id, held.position, held.version, made)

    def _state_after(self, state: S, append: Append) -> S:
        """The fold of what is about to be stored, as it will be read back: what no fold can take is not stored."""
        for new in append.events:
            state = self.histories.evolve(state, new.encoded.event)
        return state

    async def _first_outcome(self, aggregate_id: str, first: int, last: int) -> Committed[S, E]:
        held, recorded = await self.histories.outcome(aggregate_id, first, last)
        events = tuple(cast("E", one.data) for one in recorded)
        return Committed(held.state, events, held.position, held.version, self._app)

    def _encoded(self, event: E) -> Any:
        if type(event) not in self._events:
            raise UsageError(
                f"A decision of {self.info.name!r} returned {event!r}, which is not one of its events. "
                "Return events that its `evolve` is annotated with."
            )
        return self._catalog.encode(event)


class Command(Generic[S, E]):
    """What `Repository.command` returns: `execute` with an id and metadata."""

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
        plan = self._repository.decide(aggregate_id, decide, *args, **kwargs)
        return await self._repository.run(replace(plan, command_id=self._command_id, metadata=self._metadata))


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
