"""Connections that compete for aggregates in simulated time: the product's repository over a slow log.

One server does one thing at a time: it stores, refuses or reads. So what a rate means is how much of the server's time
went into storing, and how long a command waits is measured in what the server could have stored meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eventjet import aggregate, event
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord
from eventjet.commands.repository import Repository
from eventjet.errors import ConcurrencyConflict
from eventjet.log.memory import MemoryStore
from eventjet.log.outcome import BACKOFF_CONTESTED_S
from eventjet.log.store import Append

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Costs:
    """Average times in seconds, as measured on one replica that always syncs."""

    way: float = 0.000_1
    """The way from a client to the server, or back."""
    client: float = 0.000_15
    """The time of a client to decide and encode."""
    store: float = 0.001
    refuse: float = 0.000_05
    read: float = 0.000_05
    agree: float = 0.0
    """The time of three replicas instead of `store`; others get answers meanwhile, such as a conflict."""


@event("tally.counted")
class Counted:
    by: str


@aggregate("tally")
class Tally:
    count: int = 0

    def evolve(self, event: Counted) -> Tally:
        return Tally(count=self.count + 1)


class Moved(Exception):
    """A refusal of the server: an aggregate is not where a save expects it."""

    def __init__(self, index: int, last: int | None) -> None:
        super().__init__()
        self.index, self.last = index, last


class Server:
    """A server that stores, refuses and reads one request at a time, except while replicas agree."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.log = MemoryStore("sim")
        self._turn = asyncio.Lock()
        self._in_process: set[tuple[str, str]] = set()

    async def store(self, writes: Sequence[Append]) -> int:
        """Store a save and return its position; raise `Moved` for a conflict."""
        names = {(write.aggregate, write.aggregate_id) for write in writes}
        async with self._turn:
            for index, write in enumerate(writes):
                last = await self.log.last(write.aggregate, write.aggregate_id)
                if (is_raced := not self._in_process.isdisjoint(names)) or last != write.expected:
                    await takes(self.costs.refuse)
                    raise Moved(index, None if is_raced else last)
            if not self.costs.agree:
                await takes(self.costs.store)
                return await self.log.append(writes)
            self._in_process |= names
            await takes(self.costs.refuse)
        await takes(self.costs.agree)
        self._in_process -= names
        return await self.log.append(writes)

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            await takes(self.costs.read)
            return await read()


class SlowStore(MemoryStore):
    """One of many connections to a log."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.log.app)
        self._server, self._log, self._costs = server, server.log, server.costs
        self.lost = self.looked = 0

    async def append(self, writes: Sequence[Append]) -> int:
        await takes(self._costs.client)
        while True:
            await takes(self._costs.way)
            try:
                position = await self._server.store(writes)
            except Moved as moved:
                await takes(self._costs.way)
                write = writes[moved.index]
                slot = await self.history(write.aggregate, write.aggregate_id, after=write.expected, limit=1)
                if not slot:  # the event of a rival is on its way into the slot
                    await takes(BACKOFF_CONTESTED_S)
                    continue
                self.lost += 1
                name = f"{self.app}.{write.aggregate}.{write.aggregate_id}"
                rival = slot[0] if slot[0][0] == moved.last else None
                raise ConcurrencyConflict(name, write.expected, rival=rival) from None
            await takes(self._costs.way)
            return position

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        return await self._read(lambda: self._log.history(aggregate, aggregate_id, after=after, limit=limit))

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        self.looked += after > 0
        yield await self.history(aggregate, aggregate_id, after=after)

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self._read(lambda: self._log.newest(aggregate, aggregate_id))

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        await takes(self._costs.way)
        result = await self._server.read(read)
        await takes(self._costs.way)
        return result


async def takes(seconds: float) -> None:
    """Sleep about that long; nothing takes the same time twice."""
    await asyncio.sleep(seconds * (0.5 + random.random()))


@dataclass(slots=True)
class Measurement:
    """The measured result of a competition."""

    seconds: float = 0.0
    waits_s: list[list[float]] = field(default_factory=list[list[float]])
    """The durations of the commands of each connection."""
    lost: int = 0
    """The number of lost races."""
    looked: int = 0
    """The number of reads of an aggregate that the connection had written or read before."""
    failed: int = 0
    """The number of commands that lost too many races."""
    recorded: int = 0

    @property
    def commands(self) -> int:
        return sum(map(len, self.waits_s))

    @property
    def rate(self) -> float:
        return self.commands / self.seconds

    @property
    def worst_s(self) -> float:
        return max(map(max, self.waits_s))


def compete(
    connections: int, aggregates: int, seconds: float, seed: int = 1, costs: Costs | None = None
) -> Measurement:
    """Measure connections that execute commands on random aggregates for some seconds."""
    random.seed(seed)
    return in_simulated_time(_compete(connections, aggregates, seconds, costs or Costs()))


async def _compete(connections: int, aggregates: int, seconds: float, costs: Costs) -> Measurement:
    server, measured = Server(costs), Measurement()
    loop = asyncio.get_running_loop()
    stores = [SlowStore(server) for _ in range(connections)]

    async def compete_with(number: int) -> None:
        tallies = Repository[Tally, Counted]("sim", stores[number], Catalog({Counted: "tally"}), Tally)
        measured.waits_s.append(waits := [])
        await asyncio.sleep(random.random() * 0.01)
        while loop.time() < seconds:
            began = loop.time()
            try:
                await tallies.execute(f"t{random.randrange(aggregates)}", lambda _: Counted(by=str(number)))
            except ConcurrencyConflict:
                measured.failed += 1
            else:
                waits.append(loop.time() - began)

    await asyncio.gather(*map(compete_with, range(connections)))
    measured.seconds = loop.time()
    measured.lost = sum(store.lost for store in stores)
    measured.looked = sum(store.looked for store in stores)
    measured.recorded = (await server.log.state()).last
    return measured


class _Clock(selectors.SelectSelector):
    """A selector that advances the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen again"
        self.now += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._simulated = _Clock()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now


def in_simulated_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop whose time advances when nothing is left to do."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
