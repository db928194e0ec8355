"""Load, decide, append; on conflict decide again on fresh state.

`execute` may start from the cache: a cached state is safe to decide on, because the log checks the expected position. A
decision that records nothing, or raises, has no such check, so its state is confirmed against the leader first.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import EXPECTED, VERSION, Decoder, RawRecord, context_headers, header
from eventjet.domain.aggregate import AggregateInfo
from eventjet.domain.history import Held, Link, fold_history
from eventjet.domain.ids import new_event_id
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded
from eventjet.errors import ConcurrencyConflict, HistoryBroken, UsageError
from eventjet.store.store import Append, EventStore, NewEvent
from eventjet.store.subjects import subject_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")

CACHE_MAX = 10_000
"""Folded states kept by one repository."""
CONFLICTS_MAX = 100
"""How often a decision is made again before the conflict is raised."""


@dataclass(frozen=True, slots=True)
class Committed(Generic[S, E]):
    """What came of a decision."""

    state: S
    """The state after its events."""
    events: tuple[E, ...]
    """What was recorded; empty when the decision was that nothing follows."""
    position: int
    """Position of the aggregate's last event; hand it to `caught_up` to read your write."""
    version: int


class Repository(Generic[S, E]):
    """One aggregate type on one connection. Safe for any number of tasks of one loop."""

    def __init__(
        self,
        app: str,
        store: EventStore,
        catalog: Catalog,
        aggregate: Callable[[], S],
        info: AggregateInfo,
        metadata: Callable[[], Metadata] = lambda: NO_METADATA,
        conflicts_max: int = CONFLICTS_MAX,
    ) -> None:
        self._app = app
        self._store = store
        self._catalog = catalog
        self._initial = aggregate
        self._info = info
        self._metadata = metadata
        self._conflicts_max = conflicts_max
        self._decoder = Decoder(catalog)
        self._cache: OrderedDict[str, Held[S]] = OrderedDict()
        self._locks: dict[str, _Lock] = {}

    async def load(self, aggregate_id: str, /) -> S:
        """The state now; the initial state for an id that has no events. Always reads the tail."""
        return (await self._load(aggregate_id)).state

    async def history(self, aggregate_id: str, /) -> list[Recorded[E]]:
        """All recorded events of one aggregate, in order."""
        records = await self._store.history(self._info.name, aggregate_id)
        decoded = (self._decoder(record) for record in records)
        return [recorded for recorded in decoded if recorded is not None]

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
        async with self._alone(aggregate_id):
            held = self._cache.get(aggregate_id)
            for attempt in range(self._conflicts_max):
                if attempt:
                    # Between processes nobody queues: spread the rivals out.
                    await asyncio.sleep(random.random() * min(0.2, 0.002 * 2 ** min(attempt, 7)))
                held = held or await self._load(aggregate_id)
                try:
                    events = recorded_events(decide(held.state, *args, **kwargs))
                except Exception:
                    if await self._is_current(aggregate_id, held):
                        raise
                    held = None
                    continue
                if not events:
                    if await self._is_current(aggregate_id, held):
                        return Committed(held.state, (), held.position, held.version)
                    held = None
                    continue
                try:
                    return await self._record(aggregate_id, held, cast("tuple[E, ...]", events))
                except ConcurrencyConflict:
                    held = None
            raise ConcurrencyConflict(self._subject(aggregate_id), (await self._load(aggregate_id)).position)

    async def _record(self, aggregate_id: str, held: Held[S], events: tuple[E, ...]) -> Committed[S, E]:
        self._cache.pop(aggregate_id, None)
        position = await self._store.append([self._append(aggregate_id, held, events)])
        state = held.state
        for event in events:
            state = self._evolve(state, event)
        after = Held(state, held.version + len(events), position)
        self._remember(aggregate_id, after)
        return Committed(state, events, position, after.version)

    def _append(self, aggregate_id: str, held: Held[S], events: tuple[E, ...]) -> Append:
        context = tuple(context_headers(None, self._metadata()))
        made = [NewEvent(new_event_id(), self._encoded(event), context) for event in events]
        return Append(self._info.name, aggregate_id, held.position, held.version, tuple(made))

    def _encoded(self, event: E) -> Any:
        if type(event) not in self._catalog:
            raise UsageError(
                f"A decision of {self._info.name!r} returned {event!r}, which is not one of its events. "
                "Return events that its `evolve` is annotated with."
            )
        return self._catalog.encode(event)

    async def _load(self, aggregate_id: str) -> Held[S]:
        held = self._cache.get(aggregate_id) or Held(self._initial(), 0, 0)
        try:
            held = self._folded(held, await self._store.history(self._info.name, aggregate_id, after=held.position))
        except HistoryBroken:
            # A reply lost on the way looks the same; only what is broken twice, from the start, is broken.
            whole = await self._store.history(self._info.name, aggregate_id)
            held = self._folded(Held(self._initial(), 0, 0), whole)
        self._remember(aggregate_id, held)
        return held

    def _folded(self, held: Held[S], records: Sequence[RawRecord]) -> Held[S]:
        if not records:
            return held
        subject = records[0][2].decode("utf-8", "replace")
        return fold_history(held, map(self._link, records), self._evolve, subject)

    def _link(self, record: RawRecord) -> Link:
        recorded = self._decoder(record)
        version = recorded.version if recorded is not None else _number(record, VERSION) or 0
        return Link(version, record[0], _number(record, EXPECTED), recorded.data if recorded is not None else None)

    def _evolve(self, state: S, event: Any) -> S:
        return cast("S", state.evolve(event))  # type: ignore[attr-defined]

    async def _is_current(self, aggregate_id: str, held: Held[S]) -> bool:
        current = await self._store.last(self._info.name, aggregate_id) == held.position
        if not current:
            self._cache.pop(aggregate_id, None)
        return current

    def _remember(self, aggregate_id: str, held: Held[S]) -> None:
        known = self._cache.get(aggregate_id)
        if known is not None and known.position > held.position:
            return
        self._cache[aggregate_id] = held
        self._cache.move_to_end(aggregate_id)
        if len(self._cache) > CACHE_MAX:
            self._cache.popitem(last=False)

    def _subject(self, aggregate_id: str) -> str:
        return subject_of(self._app, self._info.name, aggregate_id)

    @asynccontextmanager
    async def _alone(self, aggregate_id: str) -> AsyncGenerator[None]:
        """Commands on one id queue here instead of losing races against each other."""
        self._subject(aggregate_id)  # refused before anything waits for it
        lock = self._locks.setdefault(aggregate_id, _Lock())
        lock.users += 1
        try:
            async with lock.lock:
                yield
        finally:
            lock.users -= 1
            if not lock.users:
                self._locks.pop(aggregate_id, None)


class _Lock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


def recorded_events(result: Any) -> tuple[Any, ...]:
    """What a decision returned, as a tuple; raises `UsageError` for a coroutine or an iterator."""
    if result is None:
        return ()
    if isinstance(result, list | tuple):
        return tuple(cast("Sequence[Any]", result))
    if hasattr(result, "__await__") or hasattr(result, "__next__"):
        if hasattr(result, "close"):
            result.close()
        raise UsageError("A decision returned a coroutine or an iterator. Return one event, a list of them, or None.")
    return (result,)


def _number(record: RawRecord, name: str) -> int | None:
    text = header(record[3], name)
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
