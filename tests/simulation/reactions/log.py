"""The log of a schedule by the server's clock, a process's way to it, and the reader of a subscription."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.errors import (
    ConcurrencyConflict,
    ConnectionLost,
    Evicted,
    LogRolledBack,
    OutcomeUnknown,
    StoreUnavailable,
    Unreachable,
)
from eventjet.log.memory import MemoryStore
from eventjet.log.predecessors import PredecessorReader
from eventjet.log.store import Append, LogState, check_save
from eventjet.projections.fold import Reader
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.event_source import LogSource
from eventjet.subscriptions.reader import Source
from eventjet.writers.batch import Batch
from tests.simulation.reactions.server import Link

T = TypeVar("T")
SAVE_S = 6.0
_CHUNK_MAX = 40


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


class Truth(MemoryStore):
    """The log, which calls `on_grown` after each save; if it does not compare, rivals overwrite each other."""

    def __init__(self, app: str, clock: Callable[[], int], *, compares: bool = True) -> None:
        super().__init__(app, clock)
        self.on_grown: list[Callable[[], None]] = []
        self._compares = compares

    @property
    def all(self) -> list[RawRecord]:
        return self._records

    async def append(self, writes: Sequence[Append]) -> int:
        if not self._compares:
            for write in writes:
                before = await self.history(write.aggregate, write.aggregate_id)
                object.__setattr__(write, "expected", before[-1][0] if before else 0)
                object.__setattr__(write, "version", len(before))
        position = await super().append(writes)
        for grown in list(self.on_grown):
            grown()
        return position


class SimulatedLog(MemoryStore):
    """The log over a link: answers are late or lost, and those of replicas may be stale."""

    def __init__(self, truth: Truth, link: Link) -> None:
        super().__init__(truth.app)
        self._truth = truth
        self._link = link
        self._identity = truth.identity

    @property
    def is_confirmed(self) -> bool:
        return self._link.is_confirmed

    async def confirm(self) -> bool:
        if not self._link.is_confirmed:
            try:
                await self.state()
            except StoreUnavailable:
                return False
            self._link.is_confirmed = True
        return True

    async def append(self, writes: Sequence[Append]) -> int:
        check_save(self.app, writes)

        def save() -> int | ConcurrencyConflict:
            try:
                return at_once(self._truth.append(writes))
            except ConcurrencyConflict as conflict:
                return conflict

        try:
            saved = await self._link.exchange("A save", save, SAVE_S)
        except StoreUnavailable as error:
            ids = [new.event_id for write in writes for new in write.events]
            raise OutcomeUnknown([], ids, str(error), writes) from None
        if isinstance(saved, ConcurrencyConflict):
            raise saved
        return saved

    async def at(self, position: int) -> RawRecord | None:
        return await self._leader(lambda: self._truth.at(position))

    async def history(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> list[RawRecord]:
        records = await self._leader(lambda: self._truth.history(aggregate, aggregate_id, after=after))
        until = self._known()
        return [record for record in records if record[0] <= until]

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        yield await self.history(aggregate, aggregate_id, after=after)

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        return await self._leader(lambda: self._truth.last(aggregate, aggregate_id))

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self._leader(lambda: self._truth.tail(aggregate, aggregate_id))

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        records = await self.history(aggregate, aggregate_id)
        return records[-1] if records else None

    async def state(self) -> LogState:
        return await self._leader(self._truth.state)

    async def _leader(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._link.exchange("The log", lambda: at_once(read()))

    def _known(self) -> int:
        """Return the last position that the asked replica has."""
        network = self._link.network
        length = len(self._truth.all)
        if network.loop.now < network.weather.calm_at and network.random() < network.weather.stale:
            network.weather.count("stale read")
            return length - int(network.random() * 6)
        return length


class SimulatedFeed(LogSource):
    """A source that reads the log without delay."""

    truth: Truth
    link: Link

    async def check(self, cursor: Cursor) -> str:
        if self.link.network.weather.is_out(self.link.network.loop.now):
            raise Unreachable("The server", "it is away", "Wait.")
        await self.look(cursor, cursor.name)
        if not cursor.position:
            return cursor.log
        record = at_once(self.truth.at(cursor.position))
        if record is None or header(record[3], MSG_ID) != cursor.event_id:
            raise LogRolledBack(cursor.name, cursor.position, "the event there is another")
        return cursor.log

    async def look(self, cursor: Cursor, durable: str) -> None:
        if cursor.log != self.truth.identity:
            raise LogRolledBack(cursor.name, cursor.position, "it is another log")


class SimulatedReader:
    """A reader of a durable's records from a position on, until another reader takes the durable."""

    def __init__(self, truth: Truth, link: Link, position: int, filters: Sequence[str], decode: Reader) -> None:
        self._truth = truth
        self._link = link
        self._position = position
        self._read = position
        self._prefixes = tuple(pattern.removesuffix("*").encode() for pattern in filters)
        self._decode = decode
        self._batches: deque[Batch] = deque()
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None
        self._is_coming = False

    def start(self) -> None:
        self._truth.on_grown.append(self.grown)
        self.grown()

    def grown(self) -> None:
        """Schedule the arrival of new records of the log."""
        if not self._is_coming and self._failure is None and self._read < len(self._truth.all):
            self._is_coming = True
            self._link.network.loop.after(self._delay(), self._come)

    def evict(self) -> None:
        """Fail soon, since another reader has the durable."""
        self._link.network.loop.after(self._delay(), self.fail, Evicted("the durable", "another has it"))

    def fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._arrived.set()

    async def take(self, timeout_s: float) -> Batch | None:
        if not self._batches and self._failure is None:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        if self._batches:
            return self._batches.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def remaining_after(self, position: int) -> int:
        ahead = self._truth.all[self._read :]
        return max(0, self._position - position) + sum(record[2].startswith(self._prefixes) for record in ahead)

    async def close(self) -> None:
        self.fail(ConnectionLost("the durable", "it is closed"))
        if self.grown in self._truth.on_grown:
            self._truth.on_grown.remove(self.grown)

    def _delay(self) -> float:
        network = self._link.network
        there_s, back_s = network.weather.delays(network.loop.now, network.random)
        if there_s is not None and back_s is not None:
            return there_s + back_s
        return 0.5 + network.random() * 2.0  # a missed heartbeat makes the reader ask again

    def _come(self) -> None:
        self._is_coming = False
        if self._failure is not None:
            return
        network, records = self._link.network, self._truth.all
        if network.loop.now < network.weather.calm_at and network.random() < network.weather.mishap:
            network.weather.count("link lost")
            self.fail(ConnectionLost("the durable", "the link broke"))
            return
        until = self._read + 1 + int(network.random() * _CHUNK_MAX)
        matching = [record for record in records[self._read : until] if record[2].startswith(self._prefixes)]
        self._read = min(until, len(records))
        if matching:
            self._decode.expect(matching)
            events = [event for event in map(self._decode, matching) if event is not None]
            last = matching[-1]
            self._batches.append(Batch(self._position, last[0], header(last[3], MSG_ID) or "", events))
            self._position = last[0]
            self._arrived.set()
        self.grown()


class EarlierTruth(PredecessorReader):
    """A source that reads the log without delay."""

    def __init__(self, truth: Truth, source: Source) -> None:
        super().__init__(source.endpoint, source.stream)
        self._truth = truth

    def at(self, positions: Sequence[int]) -> list[RawRecord | None]:
        return [at_once(self._truth.at(position)) for position in positions]

    def before(self, subject: bytes, position: int) -> RawRecord | None:
        earlier = [record for record in self._truth.all[: position - 1] if record[2] == subject]
        return earlier[-1] if earlier else None


class Durables:
    """The present reader of each durable."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._readers: dict[str, SimulatedReader] = {}

    async def open(
        self,
        link: Link,
        source: Source,
        position: int,
        decoder: Callable[[PredecessorReader], Reader],
        filters: Sequence[str],
    ) -> SimulatedReader:
        """Open a reader as `EventReader.open` does."""
        reader = SimulatedReader(self._truth, link, position, filters, decoder(EarlierTruth(self._truth, source)))

        def register() -> None:
            before = self._readers.get(source.durable)
            if before is not None:
                before.evict()
            self._readers[source.durable] = reader

        await link.exchange(f"The durable {source.durable}", register)
        return reader
