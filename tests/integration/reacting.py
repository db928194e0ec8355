"""An app with a reactor whose handler can be made to fail, and its workers in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from eventjet import App, Jet, Reaction, Recorded, Retry, aggregate, event, reactor
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.logs import fresh_name

T = TypeVar("T")

QUICK = WorkerOptions(lease_s=1.0, poll_s=0.05, backoff_s=(0.02, 0.2))
PATIENT_S = 120.0


@event("bell.rung")
class Rung:
    n: int


@event("bell.polished")
class Polished:
    pass


@aggregate("bell")
class Bell:
    """The aggregate whose events the reactor handles."""

    count: int = 0

    def ring(self, n: int) -> Rung:
        return Rung(n=n)

    def polish(self) -> Polished:
        return Polished()

    def evolve(self, event: Rung | Polished) -> Bell:
        return replace(self, count=self.count + isinstance(event, Rung))


@event("tower.counted")
class Counted:
    bell: str
    n: int


@aggregate("tower", snapshot_every=50)
class Tower:
    """The aggregate that reactions write to."""

    counted: int = 0

    def count(self, bell: str, n: int) -> Counted:
        return Counted(bell=bell, n=n)

    def evolve(self, event: Counted) -> Tower:
        return replace(self, counted=self.counted + 1)


@dataclass
class Town:
    """The dependency of the reactor: it records events, and makes the handler fail on demand."""

    heard: list[tuple[str, int, str, int]] = field(default_factory=list[tuple[str, int, str, int]])
    """(bell, n, key, attempt)"""
    fails: Callable[[str, int, int], Exception | None] = lambda bell, n, attempt: None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: set[str] = field(default_factory=set[str])
    """Bells whose handler has begun, and may wait for the gate."""

    def __post_init__(self) -> None:
        self.gate.set()

    def order(self, bell: str) -> list[int]:
        """Return the distinct events of a bell, in the order of their first delivery."""
        return list(dict.fromkeys(n for heard_bell, n, _, _ in self.heard if heard_bell == bell))

    @property
    def keys(self) -> Counter[str]:
        return Counter(key for _, _, key, _ in self.heard)


def app_of(town: Town, *, retry: Retry | None = None, name: str | None = None, **declared: Any) -> App:
    """Return an app with a new stream or with the stream `name`; `declared` is what `@reactor` takes."""

    @reactor("echo", retry=retry or Retry(tries=2, first_s=0.01), **declared)
    async def echo(event: Recorded[Rung], to: Reaction[Town]) -> None:
        to.deps.begun.add(event.aggregate_id)
        await to.deps.gate.wait()
        to.deps.heard.append((event.aggregate_id, event.data.n, to.key, to.attempt))
        if (error := to.deps.fails(event.aggregate_id, event.data.n, to.attempt)) is not None:
            raise error
        await to.repository(Tower).execute("all", Tower.count, event.aggregate_id, event.data.n)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Town]:
        yield town

    return App(name or fresh_name(), aggregates=[Bell, Tower], reactors=[echo], deps=opened)


@asynccontextmanager
async def working(app: App, settings: Settings, options: WorkerOptions = QUICK) -> AsyncGenerator[None]:
    """Run a worker for all of the app in this process, within the block."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.ensure_future(run_workers(app, settings, stop=stop, on_ready=ready.set, options=options))
    waiting = asyncio.ensure_future(ready.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENT_S)
        if task.done():
            task.result()
        assert ready.is_set()
        yield
    finally:
        stop.set()
        waiting.cancel()
        await asyncio.wait_for(task, PATIENT_S)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""

    async def holds() -> bool:
        return condition()

    await eventually(holds)


async def eventually(read: Callable[[], Awaitable[T]]) -> T:
    """Wait until the result is true, and return it."""
    deadline = asyncio.get_running_loop().time() + PATIENT_S
    while not (result := await read()):
        assert asyncio.get_running_loop().time() < deadline, "it did not come to be"
        await asyncio.sleep(0.01)
    return result


async def counted(jet: Jet) -> list[tuple[str, int]]:
    """Return what reactions have recorded."""
    return [(event.data.bell, event.data.n) for event in await jet.repository(Tower).history("all")]
