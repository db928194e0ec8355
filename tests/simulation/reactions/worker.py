"""A worker of a schedule: the product's subscriptions in a process, until it is stopped or dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from eventjet.app import App
from eventjet.commands.repository import Repositories
from eventjet.log.mirror import LogReader
from eventjet.log.predecessors import PredecessorReader
from eventjet.projections.fold import Reader
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor_session import ReactionContext, ReactionSubscription
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.partitions import PartitionAssignment
from eventjet.subscriptions.reader import Source
from tests.simulation.reactions.followed import handler_of
from tests.simulation.reactions.log import Durables, SimulatedFeed, SimulatedLog, SimulatedReader, Truth
from tests.simulation.reactions.loop import Process
from tests.simulation.reactions.server import Link, Network, Server, SimulatedClient

OPTIONS = WorkerOptions(drain_s=4.0)


class Worker:
    """A worker, which begins to work when it is made."""

    def __init__(
        self, name: str, app: App, network: Network, server: Server, truth: Truth, durables: Durables, deps: Any
    ) -> None:
        self.name = name
        self.process = Process(name)
        self.link = Link(network, name)
        self.is_dead = False
        self.is_leaving = False
        self.tasks: list[asyncio.Task[None]] = []
        self._app = app
        self._network = network
        self._durables = durables
        self._truth = truth
        self._deps = deps
        self._client = SimulatedClient(server, self.link)
        self._stop = asyncio.Event()
        self._booted = network.random() * 1e6
        self._speed = 1.0 if network.rules.clocks else 0.3 + network.random()
        self._begin()

    @property
    def is_over(self) -> bool:
        return self.is_dead or all(task.done() for task in self.tasks)

    def leave(self) -> None:
        """Ask the worker to end."""
        self.is_leaving = True
        self._stop.set()

    def die(self) -> None:
        """End the worker at once; its sent requests may still arrive."""
        self.is_dead = True
        self.process.is_stopped = True

    async def bury(self) -> None:
        """End the rest of the worker at the end of a schedule, without any effect."""
        self.link.close()
        self._network.loop.wake(self.process)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _begin(self) -> None:
        repositories = Repositories(self._app, SimulatedLog(self._truth, self.link))
        cursors = Cursors(self._client, self._app.name, self._clock)
        context = ReactionContext(repositories, cursors, self.name, OPTIONS, open_reader=self._open_reader)
        shares: dict[str, PartitionAssignment] = {}
        for declaration in declarations_of(self._app).values():
            share = shares.setdefault(declaration.declared_as, PartitionAssignment(declaration.partitions))
            feed = SimulatedFeed(repositories, LogReader(self._app.name, self._client), declaration)
            feed.truth, feed.link = self._truth, self.link
            handler = handler_of(
                self._app, declaration, feed, repositories, self._client, self._deps, self._network.rules
            )
            self._run(ReactionSubscription(handler, context, share, _ready).run)
            if declaration.partitions > 1 and declaration.partition == 0:
                self._run(partial(share.keep, cursors, declaration.declared_as, self.name, OPTIONS.lease_s))

    def _run(self, run: Callable[[asyncio.Event], Any]) -> None:
        self.tasks.append(self._network.loop.create_task(run(self._stop), context=self.process.context.copy()))

    def _clock(self) -> float:
        return self._booted + self._network.loop.now * self._speed

    async def _open_reader(
        self,
        source: Source,
        position: int,
        decoder: Callable[[PredecessorReader], Reader],
        batch_max: int,
        filters: Sequence[str] = (),
    ) -> SimulatedReader:
        return await self._durables.open(self.link, source, position, decoder, filters)


def _ready() -> None:
    """Take the readiness of a subscription, which no caller waits for."""
