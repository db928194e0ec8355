"""`eventjet demo`: the whole road on one machine, measured, with nothing left behind.

Commands and the import run in this process; `init`, `worker`, `rebuild` and `verify` are the real commands, each a
process of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import psycopg

from eventjet.dev.demo_load import DemoTally, Traffic, old_account_id, old_accounts
from eventjet.dev.demo_process import DemoCommand, Finished
from eventjet.dev.stack import Stack
from eventjet.errors import DemoFailed, NotCaughtUp
from eventjet.examples import demo_bank
from eventjet.jet import Jet
from eventjet.sql.checkpoint import FAILED

_APP = f"{demo_bank.__name__}:bank"
_PROJECTION = demo_bank.balances.name
_COMMAND_S = 120.0
_CATCH_UP_S = 150.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the demo is."""

    accounts: int = 2_000
    commands: int = 20_000
    imported: int = 200_000
    engine: str = "spark"


class Teller(Protocol):
    """Shows what is going on."""

    def progress(self, phase: str, done: int, total: int | None = None, step: str = "") -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """One phase, measured."""

    phase: str
    events: int
    seconds: float

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Verified:
    """What one verification found."""

    when: str
    differences: int
    rows: int


@dataclass(slots=True)
class DemoReport:
    """Everything the demo measured, in order."""

    figures: list[Figures] = field(default_factory=list[Figures])
    verified: list[Verified] = field(default_factory=list[Verified])
    seconds: float = 0.0


def run_demo(sizes: Sizes, teller: Teller) -> DemoReport:
    """Run it all; raises `Unreachable` when a server cannot start and `DemoFailed` when a promise is not kept."""
    began = time.monotonic()
    with Stack(postgres=True) as stack:
        report = asyncio.run(_Demo(stack, sizes, teller).run())
    report.seconds = time.monotonic() - began
    return report


class _Demo:
    """One run: each step adds its figures to the report."""

    def __init__(self, stack: Stack, sizes: Sizes, teller: Teller) -> None:
        self._stack = stack
        self._sizes = sizes
        self._teller = teller
        self._report = DemoReport()
        self._commands = 0
        self._steps: dict[str, int] = {"rebuild": 0, "verify": 0}

    async def run(self) -> DemoReport:
        """From an empty log to a verified read model, twice, while commands keep arriving."""
        self._teller.say("NATS and PostgreSQL run. Creating the stream and the tables.")
        finished = await self._command("init").finished(_COMMAND_S)
        if finished.status != 0:
            raise DemoFailed("init", finished.output)
        async with AsyncExitStack() as stack:
            jets = [await stack.enter_async_context(self._connect()) for _ in range(2)]
            traffic = Traffic(jets, self._sizes.accounts)
            last = await self._fill(traffic, jets[0])
            worker = self._command("worker", _PROJECTION)
            stack.callback(worker.kill)
            await self._catch_up(worker, jets[0], last)
            async with _kept_busy(traffic) as tally:
                await self._rebuild(jets[0], self._sizes.engine)
                await self._verify(f"after the rebuild ({self._sizes.engine})")
                # An account that gets no commands: the next event of another one would be folded over its row.
                altered = old_account_id(0)
                await self._alter(altered)
                await self._verify(f"after {altered} was altered by hand", differs=altered)
                # On the other engine: it is the same function, so it must be the same table.
                await self._rebuild(jets[0], "local")
                await self._verify("after the next rebuild (local)")
            self._teller.say(f"{tally.sent:,} commands arrived meanwhile, and {tally.recorded:,} events were recorded.")
            status = await asyncio.to_thread(worker.stop)
            if status != 0:
                raise DemoFailed("worker", f"it ended with exit status {status}: {worker.tail()}")
        return self._report

    async def _fill(self, traffic: Traffic, jet: Jet) -> int:
        """Commands, then an import; returns the position of the last event."""
        sizes = self._sizes
        began = time.monotonic()
        opened = await traffic.open_accounts(self._counting("open", sizes.accounts))
        self._add("accounts opened", opened.recorded, began)
        began = time.monotonic()
        tally = await traffic.run(sizes.commands, self._counting("commands", sizes.commands))
        self._add("commands", tally.recorded, began)
        self._teller.say(
            f"{tally.sent:,} commands: {tally.recorded:,} recorded an event, {tally.refused:,} were refused for lack "
            f"of funds, {tally.decided_again:,} decisions were made again after a conflict."
        )
        began = time.monotonic()
        imported = await jet.append_many(
            old_accounts(sizes.imported),
            source="old-bank",
            progress=self._counting("import", sizes.imported),
        )
        self._add("events imported", imported.stored, began)
        return max(opened.position, tally.position, imported.position)

    async def _catch_up(self, worker: DemoCommand, jet: Jet, last: int) -> None:
        began = time.monotonic()
        reached = 0
        while reached < last:
            if not worker.running:
                raise DemoFailed("worker", f"it ended: {worker.tail()}")
            if time.monotonic() - began > _CATCH_UP_S:
                raise DemoFailed(
                    "worker", f"it is at position {reached} of {last} after {_CATCH_UP_S:g} s: {worker.tail()}"
                )
            try:
                await jet.caught_up(_PROJECTION, position=last, timeout_s=0.3)
                reached = last
            except NotCaughtUp as error:
                if error.state == FAILED:
                    raise DemoFailed("worker", str(error)) from None
                reached = error.reached
            self._teller.progress("worker", reached, last)
        self._add("read by the worker", last, began)

    async def _rebuild(self, jet: Jet, engine: str) -> None:
        last = (await jet.log()).last
        began = time.monotonic()
        phase, finished = await self._step("rebuild", "--engine", engine)
        if finished.status != 0:
            raise DemoFailed("rebuild", f"exit status {finished.status}: {finished.output}")
        self._teller.progress(phase, last, last)
        self._add(f"rebuilt ({engine})", last, began)

    async def _verify(self, when: str, *, differs: str | None = None) -> None:
        """Verify, and hold the answer to what is expected: no difference, or exactly one, at that key."""
        began = time.monotonic()
        phase, finished = await self._step("verify")
        if finished.status not in (0, 1):
            raise DemoFailed("verification", finished.output)
        found = json.loads(finished.output[finished.output.index("{") :])
        differences, rows, position = int(found["differences"]), int(found["rows"]), int(found["position"])
        self._teller.progress(phase, position, position)
        self._add("verified", position, began)
        self._report.verified.append(Verified(when, differences, rows))
        said = "1 difference" if differences == 1 else f"{differences} differences"
        keys = ", ".join(str(one["key"]) for one in found["examples"])
        self._teller.say(f"{said} {when}, in {rows:,} rows{f': {keys}' if keys else ''}")
        if (differences, keys) != ((0, "") if differs is None else (1, differs)):
            raise DemoFailed("verification", f"it found {differences} difference(s) {when}: {keys}")

    async def _alter(self, key: str) -> None:
        """What no projection would do."""
        async with await psycopg.AsyncConnection.connect(self._stack.database) as connection:
            await connection.execute("update balances set amount = amount + 1 where account_id = %s", [key])

    async def _step(self, command: str, *options: str) -> tuple[str, Finished]:
        """Run a command on the projection, with its progress as ours; the name of its phase, and how it ended."""
        self._steps[command] += 1
        phase = f"{command} {self._steps[command]}"

        def step(name: str, done: int, total: int | None) -> None:
            self._teller.progress(phase, done, total, name)

        self._teller.progress(phase, 0)
        running = self._command(command, _PROJECTION, *options, "--json")
        return phase, await running.finished(_COMMAND_S, step)

    def _command(self, *arguments: str) -> DemoCommand:
        self._commands += 1
        environ = {
            "EVENTJET_SERVERS": self._stack.servers,
            "EVENTJET_DATABASE": self._stack.database,
            "EVENTJET_APP": _APP,
            # What a command that is killed leaves behind goes with the folder.
            "TMPDIR": str(self._stack.folder),
        }
        log = self._stack.folder / f"{self._commands}-{arguments[0]}.log"
        return DemoCommand([*arguments, "--app-dir", str(self._stack.folder)], environ, log)

    def _connect(self) -> AbstractAsyncContextManager[Jet]:
        return demo_bank.bank.connect(servers=self._stack.servers, database=self._stack.database)

    def _counting(self, phase: str, total: int) -> Callable[[int], None]:
        return lambda done: self._teller.progress(phase, done, total)

    def _add(self, phase: str, events: int, began: float) -> None:
        self._report.figures.append(Figures(phase, events, time.monotonic() - began))


@asynccontextmanager
async def _kept_busy(traffic: Traffic) -> AsyncGenerator[DemoTally]:
    """Commands keep arriving during the block; the tally is complete after it."""
    tally = DemoTally()
    stop = asyncio.Event()
    arriving = asyncio.create_task(traffic.keep_on(stop, tally))
    try:
        yield tally
    finally:
        stop.set()
        await arriving
