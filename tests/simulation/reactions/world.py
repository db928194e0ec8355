"""A schedule: workers over a log and cursors, trouble meanwhile, and the checks at its end.

Everything is drawn from one seed, so the same seed gives the same trace.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_module
import traceback
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import orjson

from eventjet.errors import EventjetError
from eventjet.subscriptions.cursor_control import create_missing_cursors
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from tests.simulation.reactions.books import OPERATOR, Books, Broken
from tests.simulation.reactions.hearing import Hearing
from tests.simulation.reactions.log import Durables, Truth
from tests.simulation.reactions.loop import VirtualLoop
from tests.simulation.reactions.operators import Operator
from tests.simulation.reactions.reacting import Reacting
from tests.simulation.reactions.server import REQUEST_S, Link, Network, Server, SimulatedClient
from tests.simulation.reactions.streams import Rules, SimulatedStream, Stored
from tests.simulation.reactions.transferring import Transferring
from tests.simulation.reactions.weather import Weather, drawn
from tests.simulation.reactions.worker import OPTIONS, Worker

PRODUCT = Rules()
SETTLED_S = 120.0
"""The time within which all is done after the end of the trouble."""
_LOOK_S = 0.25
_CALM = Weather(0.0, 0.0, (), 0.001)


class Unforeseen(logging.Handler):
    """Keeps the logged errors with a traceback, which no subscription foresees."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.messages.append(f"{record.getMessage()} {traceback.format_exception(*record.exc_info)[-3:]}")


UNFORESEEN = Unforeseen()
logging.getLogger("eventjet").addHandler(UNFORESEEN)


class ReactionWorld:
    """The whole state of a schedule."""

    def __init__(self, seed: int, rules: Rules = PRODUCT, trace: list[Any] | None = None) -> None:
        self.random: Callable[[], float] = Random(seed).random
        self.rules = rules
        self.seed = seed
        self.loop = VirtualLoop()
        self.weather = drawn(self.random)
        self.counts: dict[str, int] = self.weather.counts
        self.workers: list[Worker] = []
        self.failure: Broken | None = None
        self._trace = trace
        self._made = 0
        self._coming = 0
        self._woken_at = 0.0

    def run(self) -> None:
        """Run the schedule until all is settled; raise `Broken` for a broken promise."""
        random_module.seed(self.seed)  # the product draws its pauses from it
        UNFORESEEN.messages.clear()
        try:
            self.loop.run(self._main())
        except EventjetError as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if UNFORESEEN.messages:
            raise Broken(UNFORESEEN.messages[0])
        for fault in self.loop.faults:
            if not isinstance(fault.get("exception"), Broken):
                raise Broken(f"nobody caught {fault}")

    def note(self, *details: Any) -> None:
        """Add an entry to the trace."""
        if self._trace is not None:
            self._trace.append((round(self.loop.now, 6), *map(str, details)))

    def count(self, occurrence: str, number: int = 1) -> None:
        self.counts[occurrence] = self.counts.get(occurrence, 0) + number

    async def _main(self) -> None:
        self._build()
        try:
            await self._begin()
            tasks = [self.loop.create_task(work) for work in (self.work.use(), self._trouble())]
            await asyncio.sleep(self.weather.calm_at)
            await asyncio.gather(*tasks)
            await asyncio.sleep(REQUEST_S)  # lost requests have timed out by then
            await self.operator.calm()
            await self._settle()
            await self._end()
        finally:
            for worker in self.workers:
                await worker.bury()
        self.work.check_end()

    def _build(self) -> None:
        random, rules, loop = self.random, self.rules, self.loop
        self.network = Network(loop, random, self.weather, rules)
        draw = random()
        kind = Reacting if draw < 0.5 else Transferring if draw < 0.75 else Hearing
        self.work: Reacting | Transferring | Hearing = kind(self)
        self.count(kind.__name__)
        app = self.app = self.work.app
        self.books = Books(f"$KV.{app.name}_cursors.", OPTIONS.lease_s)
        self.books.counts = self.counts
        replicas = 3 if random() < 0.5 else 1
        self.cursors = SimulatedStream(loop, random, rules, keeps_last=True, replicas=replicas)
        self.cursors.on_stored = self._stored
        log_rules = Rules(on_time=rules.on_time)
        self.timers = SimulatedStream(loop, random, log_rules, keeps_last=False, replicas=replicas)
        self.server = Server(
            app.name,
            {
                f"KV_{app.name}_cursors": (f"$KV.{app.name}_cursors.", self.cursors),
                f"EJ_{app.name}_timers": (f"_EJ.{app.name}.", self.timers),
            },
        )
        self.truth = Truth(app.name, self.timers.now_ns, compares=rules.log_compares)
        self.truth.on_grown.append(self.work.grown)
        self.durables = Durables(self.truth)
        self.operator = Operator(self)

    async def _begin(self) -> None:
        client = SimulatedClient(self.server, Link(Network(self.loop, self.random, _CALM, self.rules), OPERATOR))
        declared = list(declarations_of(self.app).values())
        await create_missing_cursors(Cursors(client, self.app.name), self.truth, client, declared)
        for _ in range(1 + int(self.random() * 3)):
            self.hire()

    def hire(self) -> None:
        """Add a worker."""
        self._made += 1
        deps = self.work
        worker = Worker(f"w{self._made}", self.app, self.network, self.server, self.truth, self.durables, deps)
        self.workers.append(worker)
        self.note("starts", worker.name)

    def _hire_soon(self) -> None:
        self._coming += 1

        def come() -> None:
            self._coming -= 1
            self.hire()

        self.loop.after(0.5 + self.random() * 4.0, come)

    async def _trouble(self) -> None:
        """Kill, stop and dismiss workers, break connections, and let the operator act."""
        often = (0.6, 1.5, 4.0)[int(self.random() * 3)]
        while True:
            await asyncio.sleep(self.random() * 2.0 * often)
            if self.loop.now >= self.weather.calm_at:
                return
            if self.random() < 0.35:
                await self.operator.act()
            else:
                self._harm()

    def _harm(self) -> None:
        living = [worker for worker in self.workers if not worker.is_over and not worker.process.is_stopped]
        if not living:
            return
        worker = living[int(self.random() * len(living))]
        draw = self.random()
        if draw < 0.35:
            self._kill(worker)
        elif draw < 0.7:
            self._stop(worker)
        elif draw < 0.85:
            self.count("asked to leave")
            self.note("leaves", worker.name)
            worker.leave()
            self._hire_soon()
            self.loop.after(OPTIONS.drain_s, worker.die)
        else:
            self.count("connection lost")
            self.note("loses its connection", worker.name)
            worker.link.lose()

    def _harm_writer(self, name: str) -> None:
        """Kill or stop a worker before it knows that its cursor was written."""
        worker = next((worker for worker in self.workers if worker.name == name), None)
        if worker is not None and not worker.is_over and self.loop.now < self.weather.calm_at:
            self.count("killed or stopped after a write")
            (self._kill if self.random() < 0.4 else self._stop)(worker)

    def _kill(self, worker: Worker) -> None:
        self.count("killed")
        self.note("dies", worker.name)
        worker.die()
        self._hire_soon()

    def _stop(self, worker: Worker) -> None:
        self.count("stopped")
        self.note("stops", worker.name)
        worker.process.is_stopped = True
        self.loop.after(0.1 + self.random() * self.random() * 12.0, self._wake, worker)

    def _wake(self, worker: Worker) -> None:
        if not worker.is_dead:
            self.note("wakes", worker.name)
            self._woken_at = self.loop.now
            self.loop.wake(worker.process)

    async def _settle(self) -> None:
        until = self.loop.now + SETTLED_S
        why = "nothing"
        while self.loop.now < until:
            self._raise_failure()
            why = self._unsettled()
            if not why:
                self.count("virtual seconds", int(self.loop.now))
                return
            await asyncio.sleep(_LOOK_S)
        raise Broken(f"{SETTLED_S:g} s after the trouble {why}")

    def _unsettled(self) -> str:
        living = [worker for worker in self.workers if not worker.is_over]
        if not living or self._coming:
            return "a worker is not yet there"
        if any(worker.process.is_stopped for worker in living) or any(worker.is_leaving for worker in living):
            return "a worker stands still"
        if self.loop.now < self._woken_at + OPTIONS.lease_s:
            return "a worker has just gone on"
        for name, known in self.books.by_name.items():
            if self.loop.now > known.written_at + OPTIONS.lease_s:
                return f"nobody works on {name}"
        return self.work.unsettled({worker.name for worker in living})

    async def _end(self) -> None:
        """Ask all workers to leave: each releases its cursors, or is cut off if it takes too long."""
        living = [worker for worker in self.workers if not worker.is_over]
        for worker in living:
            worker.leave()
        until = self.loop.now + OPTIONS.drain_s
        while not all(worker.is_over for worker in living) and self.loop.now < until:
            await asyncio.sleep(_LOOK_S)
        self._raise_failure()
        late = {worker.name for worker in living if not worker.is_over}
        self.count("cut off", len(late))
        for name, known in self.books.by_name.items():
            if known.cursor.owner is not None and known.cursor.owner not in late:
                raise Broken(f"{name} is still {known.cursor.owner}'s, and all have left")

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def broke(self, error: Broken) -> None:
        """Note a promise that was broken during the schedule, which ends soon."""
        if self.failure is None:
            self.note("BROKEN", error)
            self.failure = error

    def _stored(self, stored: Sequence[Stored]) -> None:
        network = self.network
        try:
            self.books.written(stored, network.sender, network.sent_at)
        except Broken as error:
            self.broke(error)
        if self.random() < self.weather.pounce:
            self._harm_writer(network.sender)
        for record in stored:
            if self._trace is not None:
                self.note("stored by", network.sender, record.subject, record.sequence, text_of(record.body))


def text_of(body: bytes) -> str:
    """Return a cursor or an entry as text, without the fields that differ from run to run."""
    values: Any = orjson.loads(body or b"{}")
    if isinstance(values, int):
        return str(values)
    if "quarantined" in values:
        return f"{values['quarantined']['resolution']} {values['quarantined']['aggregate_id']}"
    return " ".join(f"{values.get(name)}" for name in ("position", "done", "owner", "state"))
