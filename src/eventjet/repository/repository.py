"""One aggregate type: the loop that loads, decides, appends, and on conflict decides again.

`execute` may start from the cache: a cached state is safe to decide on, because the log checks the expected position. A
decision that records nothing, or raises, has no such check, so its state is confirmed against the leader first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import context_headers
from eventjet.codec.subjects import subject_of
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.context import current_metadata, merge
from eventjet.domain.history import FoldedState
from eventjet.domain.ids import new_event_id
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded
from eventjet.domain.subscription import folded_events
from eventjet.errors import ConcurrencyConflict, UsageError
from eventjet.observability.tracing import current_traceparent
from eventjet.repository.cache import Cache
from eventjet.repository.histories import Histories, Snapshots
from eventjet.repository.planned import Committed, Planned, recorded_events
from eventjet.store.store import Append, EventStore, NewEvent

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")

CONFLICTS_MAX = 100
"""How often a decision is made again before the conflict is raised."""


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
        return await self.run(aggregate_id, lambda state: decide(state, *args, **kwargs), None, NO_METADATA)

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

    async def run(
        self,
        aggregate_id: str,
        decide: Callable[[S], E | Sequence[E] | None],
        command_id: str | None,
        metadata: Metadata,
    ) -> Committed[S, E]:
        """The loop behind `execute`."""
        self.subject(aggregate_id)
        async with self.cache.alone(aggregate_id):
            held = self.cache.get(aggregate_id)
            lost: ConcurrencyConflict | None = None
            for attempt in range(self._conflicts_max):
                if attempt:
                    await between_conflicts(attempt)
                held = held or await self.fresh(aggregate_id)
                if command_id is not None:
                    known = await self.histories.find_command(aggregate_id, held, command_id)
                    if known is not None:
                        return await self._first_outcome(aggregate_id, *known)
                try:
                    events = cast("tuple[E, ...]", recorded_events(decide(held.state)))
                except Exception:
                    if await self.is_current(aggregate_id, held):
                        raise
                    held = None
                    continue
                if not events:
                    if await self.is_current(aggregate_id, held):
                        return Committed(held.state, (), held.position, held.version, self._app)
                    held = None
                    continue
                append = self.append_of(aggregate_id, held, events, command_id, metadata)
                state = self.state_after(held.state, append)
                self.cache.drop(aggregate_id)
                try:
                    position = await self.histories.store.append([append])
                except ConcurrencyConflict as error:
                    self.cache.put(aggregate_id, held)  # what follows it is all there is to read
                    held, lost = None, error
                    continue
                return self.committed(aggregate_id, held, append, state, position, command_id)
            raise lost or ConcurrencyConflict(self.subject(aggregate_id), 0)

    async def fresh(self, aggregate_id: str) -> FoldedState[S]:
        """The newest state, remembered."""
        known = self.cache.get(aggregate_id)
        held = await self.histories.load(aggregate_id, known)
        if known is not None and held.position < known.position:
            self.cache.drop(aggregate_id)  # the log was restored, and knows nothing of it
        self.cache.put(aggregate_id, held)
        return held

    async def is_current(self, aggregate_id: str, held: FoldedState[S]) -> bool:
        """Whether the leader knows of nothing newer."""
        return await self.histories.store.last(self.info.name, aggregate_id) == held.position

    def append_of(
        self, aggregate_id: str, held: FoldedState[S], events: Sequence[E], command_id: str | None, metadata: Metadata
    ) -> Append:
        """The part of a save that these events are; raises `UsageError` and `UnencodableEvent`."""
        merged = merge(current_metadata(), metadata)
        if merged.traceparent is None and (traceparent := current_traceparent()) is not None:
            merged = merge(Metadata(traceparent=traceparent), merged)
        bare = merged is NO_METADATA and command_id is None
        context = () if bare else tuple(context_headers(command_id, merged))
        made = tuple(NewEvent(new_event_id(), self._encoded(event), context) for event in events)
        return Append(self.info.name, aggregate_id, held.position, held.version, made)

    def state_after(self, state: S, append: Append) -> S:
        """The fold of what is about to be stored, as it will be read back: what no fold can take is not stored."""
        for new in append.events:
            state = self.histories.evolve(state, new.encoded.event)
        return state

    def committed(
        self,
        aggregate_id: str,
        held: FoldedState[S],
        append: Append,
        state: S,
        position: int,
        command_id: str | None = None,
    ) -> Committed[S, E]:
        """What came of a save whose last event of this aggregate is at `position`; remembered, and kept if due."""
        events = tuple(cast("E", new.encoded.event) for new in append.events)
        after = FoldedState(state, held.version + len(events), position, append.events[-1].event_id, held.commands)
        if command_id is not None:
            after.commands.add(command_id, held.version + 1)
            after.commands.add(command_id, after.version)
        self.cache.put(aggregate_id, after)
        self.histories.keep(aggregate_id, held.version, after)
        return Committed(state, events, position, after.version, self._app)

    def subject(self, aggregate_id: str) -> str:
        """Where its events are; raises `Refused` for an id that cannot be a token."""
        return subject_of(self._app, self.info.name, aggregate_id)

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
        return await self._repository.run(
            aggregate_id, lambda state: decide(state, *args, **kwargs), self._command_id, self._metadata
        )


async def between_conflicts(attempt: int) -> None:
    """Between processes nobody queues: spread the rivals out, further with each lost race."""
    spread = random.random()  # noqa: S311  no secret
    await asyncio.sleep(spread * min(0.2, 0.002 * 2 ** min(attempt, 7)))
