"""`Trial`: a scenario on servers of its own. Commands run, something fails, and in the end the answers are checked.

`scenario` lists a function in `SCENARIOS`; its docstring says what it does. It draws from `Trial.chance` alone, so that
a seed repeats its choices (not the machine's timing).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventjet.codec.records import Decoder
from eventjet.errors import EventjetError
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.subscriptions.work_status import WorkStatus
from tests.faults.processes import WorkerProcess
from tests.faults.tally import Truth, judge, snapshot, tally_app
from tests.faults.trials.commands import Commands
from tests.faults.trials.machine import Disk
from tests.faults.trials.verdict import Figures, judge_log, log_of
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with
from tests.logs import fresh_name
from tests.stores import declared

CATCHES_UP_S = 90.0
LEASE_S = 5.0
SAVE_S = 15.0
"""The deadline of a save: an election takes 4 to 8 s."""
FIRST_ACKS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """Options that all trials of a run share."""

    seed: int = 1
    rounds: int = 3
    """How often a trial repeats its fault."""
    seconds: float = 2.0
    """How long commands run before and after each fault, roughly."""
    minutes: float = 30.0
    """The length of steady load."""


@dataclass(slots=True)
class Trial:
    """The servers' folder, options and figures of a scenario."""

    folder: Path
    options: Options
    stack: ExitStack
    """What is entered here ends with the trial."""
    chance: random.Random
    figures: Figures = field(default_factory=Figures)
    notes: list[str] = field(default_factory=list[str])
    _disks: int = 0

    def disk(self, megabytes: int = 256) -> Disk:
        """A disk until the end of the trial."""
        self._disks += 1
        return self.stack.enter_context(Disk(self.folder, f"disk-{self._disks}", megabytes))

    def wait(self, factor: float = 1.0) -> None:
        """Let commands run for as long as the seed says."""
        time.sleep(self.options.seconds * factor * self.chance.uniform(0.7, 1.3))

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def running(self, servers: Iterable[str], database: str | None = None, **more: Any) -> Generator[Run]:
        """Make a log on the servers, with commands and a worker. The answers are checked at the end.

        `more`: fields of `Commands`, and of `Settings`.
        """
        with ExitStack() as stack:
            run = Run(self, tuple(servers), database, stack, more)
            yield run
            self.figures += run.check()


COMMANDS = {"writers", "entities", "proxied", "pause_s", "settles_s"}


class Run:
    """One log of a trial, its commands and its worker."""

    def __init__(
        self, trial: Trial, servers: tuple[str, ...], database: str | None, stack: ExitStack, more: dict[str, Any]
    ) -> None:
        app = tally_app(fresh_name("tally"))
        self.settings = Settings(
            servers=servers,
            database=database or f"sqlite:///{trial.folder}/{app.name}.db",
            replicas=3 if len(servers) > 1 else 1,
            save_timeout_s=SAVE_S,
            **{name: value for name, value in more.items() if name not in COMMANDS},
        )
        self.ledger = Ledger(self.settings, app.name, app.catalog, dict(app.projections))
        database_with(self.settings.database, *app.projections.values())
        asyncio.run(init(self.ledger))
        self.workers: list[WorkerProcess] = []
        self._start = (trial, stack)
        self.worker = self.another_worker()
        how = {name: value for name, value in more.items() if name in COMMANDS}
        self.commands = stack.enter_context(Commands(self.settings, app.name, trial.chance.randrange(1 << 30), **how))
        self.commands.await_acks(FIRST_ACKS)

    def another_worker(self) -> WorkerProcess:
        """Start a worker that works or stands by."""
        trial, stack = self._start
        batch_max = 500
        worker = WorkerProcess(self.ledger, trial.folder, batch_max=batch_max, lease_s=LEASE_S)
        self.workers.append(stack.enter_context(worker))
        return worker.ready()

    def check(self) -> Figures:
        """End the writers, settle what is unknown, and compare answers, log and read models."""
        attempts = self.commands.finish()
        decode = Decoder(self.ledger.catalog)
        records = log_of(Endpoint.of(self.settings), self.ledger.name)
        figures = judge_log(attempts, records, decode)
        stopped = self.settled(records[-1][0] if records else 0)
        if stopped:
            figures.add_problem(f"the read models stopped: {stopped}")
            return figures
        events = [(event.aggregate_id, event.data) for record in records if (event := decode(record)) is not None]
        verdict = judge(Truth(events), snapshot(self.settings.database))
        if not verdict.right:
            figures.models += 1
            figures.add_problem(f"read models: {verdict}")
        return figures

    def log_position(self) -> int:
        return ask_once(Endpoint.of(self.settings), stream_info(self.ledger.name)).last

    def reached(self) -> int:
        """Return the sum of the positions of all read models."""
        return sum(status.position for status in self.statuses())

    def is_at(self, position: int) -> bool:
        """Return whether the read models are at this position, or beyond it."""
        return all(status.position >= position for status in self.statuses())

    def statuses(self) -> list[WorkStatus]:
        return [asyncio.run(self.ledger.status(name)) for name in self.ledger.projections]

    def settled(self, last: int) -> str:
        """Wait until the read models are at the position; return "" or why one has stopped."""
        deadline, before = time.monotonic() + CATCHES_UP_S, 0
        while True:
            try:
                statuses = self.statuses()
            except EventjetError as error:
                return str(error)
            stopped = [
                status.reason or status.state for status in statuses if status.state == "failed" or status.reason
            ]
            if stopped:
                return stopped[0]
            if all(status.position == last for status in statuses):
                return ""
            reached = sum(status.position for status in statuses)
            if reached > before:
                deadline, before = time.monotonic() + CATCHES_UP_S, reached
            if time.monotonic() > deadline:
                positions = ", ".join(f"{status.name} {status.state} at {status.position}" for status in statuses)
                message = f"for {CATCHES_UP_S:g} s no nearer to position {last}: {positions}"
                raise TimeoutError(f"{message}\n{self.worker.logged()}")
            time.sleep(0.1)


async def init(ledger: Ledger) -> None:
    """Make the log's stream as `eventjet init` does; a cluster may need an election for that."""
    async with tally_app(ledger.name).connect(ledger.settings) as jet:
        assert jet.client is not None
        await declared(jet.client, ledger.name, ledger.settings.replicas)


@dataclass(frozen=True, slots=True)
class Scenario:
    """An entry of the list of scenarios."""

    name: str
    run: Callable[[Trial], None]
    needs: tuple[str, ...]
    """The facilities of `machine` that it needs; without any it needs no root."""
    must_lose: bool
    """Whether it is a control: its losses show that the others would have shown a loss."""
    may: tuple[str, ...] = ()
    """Figures that need not be zero, as its docstring says."""

    @property
    def what(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, *, needs: tuple[str, ...] = (), must_lose: bool = False, may: tuple[str, ...] = ()
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """List a scenario under a name."""

    def listed(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        SCENARIOS[name] = Scenario(name, run, needs, must_lose, may)
        return run

    return listed


def recovered(trial: Trial, run: Run, fault: str, wait_s: float = 60.0) -> bool:
    """Note and return whether saves go on."""
    try:
        trial.note(f"{fault}: saves go on after {run.commands.await_acks(10, wait_s):.1f} s")
    except AssertionError:
        trial.note(f"{fault}: no saves for {wait_s:g} s")
        return False
    return True
