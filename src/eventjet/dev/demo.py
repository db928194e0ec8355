"""`eventjet demo`: commands, import, worker, rebuild and verification on one machine, measured.

Commands and the import run in this process; `init`, `worker`, `rebuild` and `verify` are the real commands, each a
process of its own. The demo leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import psycopg

from eventjet.commands import Imported
from eventjet.dev.process import ServerProcess
from eventjet.dev.stack import Stack, running_stack
from eventjet.dev.supervisor import Program
from eventjet.domain.position import FAILED
from eventjet.errors import DemoFailed, NotCaughtUp
from eventjet.examples import demo_bank
from eventjet.examples.demo_bank import Account, Deposited, InsufficientFunds, Opened
from eventjet.jet import Jet

_APP = f"{demo_bank.__name__}:bank"
_PROJECTION = demo_bank.balances.name
_STEP_S = 900.0
"""Seconds until a command, or the worker's catch-up, is taken to hang. On a busy machine a step takes minutes."""
_POLL_S = 0.1
TASKS = 64
"""Commands in flight at once."""
_HOT = 10
"""Accounts that together get a twentieth of all commands, over both connections, so that saves conflict."""
_EVENTS_PER_ACCOUNT = 40
_BLOCK = 100
"""Imported accounts whose events alternate in the log."""
_PAUSE_S = 0.02
_Step = Callable[[str, int, int | None], None]
"""A callback for progress, called with the name of a step, how much of it is done, and its total."""


class ShowProgress(Protocol):
    """A callback for the progress of a phase and the step that it is in."""

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None: ...


@dataclass(slots=True)
class Demo:
    """One run of the demo, with its measurements."""

    accounts: int
    commands: int
    imported: int
    engine: str
    progress: ShowProgress
    say: Callable[[str], None]
    figures: list[tuple[str, int, float, int]] = field(default_factory=list[tuple[str, int, float, int]])
    """(phase, events, seconds, events per second) of each measured phase."""
    verified: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    """(when, rows, differences) of each verification."""
    started: Counter[str] = field(default_factory=Counter[str])
    """How often each command was started."""
    stack: Stack = field(init=False)

    def run(self, run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
        """Run the demo on servers of its own, whose coroutine `run` runs; raises `Unreachable` and `DemoFailed`."""
        with running_stack(postgres=True) as self.stack:
            run(self._run())

    async def _run(self) -> None:
        """Go from an empty log to a verified read model, and rebuild that twice while commands keep arriving."""
        self.say("NATS and PostgreSQL run. Creating the stream and the tables.")
        await self._command("init").finished()
        async with AsyncExitStack() as ending:
            jets = [
                await ending.enter_async_context(
                    demo_bank.bank.connect(servers=self.stack.servers, database=self.stack.database)
                )
                for _ in range(2)
            ]
            traffic = Traffic(jets, self.accounts)
            await self._fill(traffic, jets[0])
            worker = self._command("worker", _PROJECTION)
            ending.callback(worker.kill)
            await self._catch_up(worker, jets[0])
            async with traffic.kept_up() as tally:
                await self._rebuild(jets[0], self.engine)
                await self._verify(f"after the rebuild ({self.engine})")
                # An account that gets no commands, since a further event would be folded over its altered row.
                altered = old_account_id(0)
                async with await psycopg.AsyncConnection.connect(self.stack.database) as connection:
                    await connection.execute("update balances set amount = amount + 1 where account_id = %s", [altered])
                await self._verify(f"after {altered} was altered by hand", differs=altered)
                # On the other engine: the same function must give the same table.
                await self._rebuild(jets[0], "local")
                await self._verify("after the next rebuild (local)")
            self.say(f"{tally.sent:,} commands arrived meanwhile, and {tally.recorded:,} events were recorded.")
            await asyncio.to_thread(worker.stop)
            if status := worker.wait(0):
                raise DemoFailed("worker", f"it ended with exit status {status}: {worker.tail()}")

    async def _fill(self, traffic: Traffic, jet: Jet) -> None:
        """Fill the log with commands, then with an import."""
        began = time.monotonic()
        opened = await traffic.open_accounts(self._counting("open", self.accounts))
        self._measured("accounts opened", opened.recorded, began)
        began = time.monotonic()
        tally = await traffic.run(self.commands, self._counting("commands", self.commands))
        self._measured("commands", tally.recorded, began)
        self.say(
            f"{tally.sent:,} commands: {tally.recorded:,} recorded an event, {tally.refused:,} were refused for lack "
            f"of funds, {tally.decided - tally.sent:,} decisions were made again after a conflict."
        )
        began = time.monotonic()
        counting = self._counting("import", self.imported)
        imported = await jet.append_many(old_accounts(self.imported), source="old-bank", progress=counting)
        self._measured("events imported", imported.stored, began)

    async def _catch_up(self, worker: DemoCommand, jet: Jet) -> None:
        began = time.monotonic()
        reached, last = 0, (await jet.log()).last
        while reached < last:
            if not worker.running:
                raise DemoFailed("worker", f"it ended: {worker.tail()}")
            if time.monotonic() - began > _STEP_S:
                reason = f"it is at position {reached} of {last} after {_STEP_S:g} s: {worker.tail()}"
                raise DemoFailed("worker", reason)
            try:
                await jet.caught_up(_PROJECTION, position=last, timeout_s=0.3)
                reached = last
            except NotCaughtUp as error:
                if error.state == FAILED:
                    raise DemoFailed("worker", str(error)) from None
                reached = error.reached
            self.progress("worker", reached, last)
        self._measured("read by the worker", last, began)

    async def _rebuild(self, jet: Jet, engine: str) -> None:
        last = (await jet.log()).last
        began = time.monotonic()
        phase, _ = await self._step("rebuild", "--engine", engine)
        self.progress(phase, last, last)
        self._measured(f"rebuilt ({engine})", last, began)

    async def _verify(self, when: str, *, differs: str | None = None) -> None:
        """Verify the read model; raises `DemoFailed` unless it has no difference, or only one at the key `differs`."""
        began = time.monotonic()
        phase, output = await self._step("verify", statuses=(0, 1))
        report = json.loads(output[output.index("{") :])
        differences, rows, position = int(report["differences"]), int(report["rows"]), int(report["position"])
        self.progress(phase, position, position)
        self._measured("verified", position, began)
        self.verified.append((when, rows, differences))
        summary = "1 difference" if differences == 1 else f"{differences} differences"
        keys = ", ".join(str(example["key"]) for example in report["examples"])
        self.say(f"{summary} {when}, in {rows:,} rows{f': {keys}' if keys else ''}")
        if (differences, keys) != ((0, "") if differs is None else (1, differs)):
            raise DemoFailed("verification", f"it found {differences} difference(s) {when}: {keys}")

    async def _step(self, command: str, *options: str, statuses: tuple[int, ...] = (0,)) -> tuple[str, str]:
        """Run a command on the projection, report its progress, and return (name of its phase, its output)."""
        phase = f"{command} {self.started[command] + 1}"
        self.progress(phase, 0)
        running = self._command(command, _PROJECTION, *options, "--json")

        def show(step: str, done: int, total: int | None) -> None:
            self.progress(phase, done, total, step)

        return phase, await running.finished(show, statuses)

    def _command(self, command: str, *options: str) -> DemoCommand:
        self.started[command] += 1
        environ = {
            "EVENTJET_SERVERS": self.stack.servers,
            "EVENTJET_DATABASE": self.stack.database,
            "EVENTJET_APP": _APP,
            # Files that a killed command leaves behind are removed with the folder.
            "TMPDIR": str(self.stack.folder),
        }
        log = self.stack.folder / f"{command}-{self.started[command]}.log"
        return DemoCommand([command, *options, "--app-dir", str(self.stack.folder)], environ, log)

    def _counting(self, phase: str, total: int) -> Callable[[int], None]:
        return lambda done: self.progress(phase, done, total)

    def _measured(self, phase: str, events: int, began: float) -> None:
        """Add the figures of a phase that ends now."""
        seconds = time.monotonic() - began
        self.figures.append((phase, events, seconds, round(events / seconds)))


class DemoCommand(ServerProcess):
    """An `eventjet` command as a process, started by the constructor; `finished`, `stop` or `kill` ends it."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._name = f"`eventjet {' '.join(arguments)}`"
        self._output = log
        self._read = 0
        self._unfinished_line = b""
        # `-P`: no imports from the current folder, which may contain anything.
        program = Program([sys.executable, "-P", "-m", "eventjet.cli", *arguments], grace_s=25.0)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
        super().__init__(self._name, program, log, {**inherited, **environ})

    async def finished(self, step: _Step = lambda _name, _done, _total: None, statuses: tuple[int, ...] = (0,)) -> str:
        """Wait for the end of the command and return its output, without the lines of progress, which `step` gets."""
        output: list[str] = []
        deadline = time.monotonic() + _STEP_S
        try:
            while self.running:
                output += self._printed(step)
                if time.monotonic() > deadline:
                    raise DemoFailed(self._name, f"it was not done within {_STEP_S:g} s")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise
        output += self._printed(step)
        printed = "\n".join(output)
        if self.wait(0) not in statuses:
            raise DemoFailed(self._name, f"exit status {self.wait(0)}: {printed}")
        return printed

    def _printed(self, step: _Step) -> Iterator[str]:
        """Yield the lines printed since the last call; lines of progress go to `step` instead."""
        with self._output.open("rb") as log:
            log.seek(self._read)
            fresh = log.read()
        self._read += len(fresh)
        *lines, self._unfinished_line = (self._unfinished_line + fresh).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if not text.startswith("phase="):
                yield text
                continue
            values = {name: value for name, _, value in (part.partition("=") for part in text.split())}
            total = values.get("total")
            step(values["phase"], int(values["done"]), None if total is None else int(total))


@dataclass(slots=True)
class DemoTally:
    """How many commands were sent, and with which results."""

    sent: int = 0
    recorded: int = 0
    refused: int = 0
    """Commands whose decision was refused for lack of funds."""
    decided: int = 0
    """Decisions made; each beyond the first of its command followed a conflict."""


_Order = tuple[int, int, Any, Any]
"""One command: (number of its account, number of its connection, decision, argument)."""


class Traffic:
    """Random commands on a number of accounts over several connections, as separate processes would have.

    The commands on an account use one connection; only those on the hot accounts use any.
    """

    def __init__(self, jets: Sequence[Jet], accounts: int) -> None:
        self._repositories = [jet.repository(Account) for jet in jets]
        self._accounts = accounts
        self._random = random.Random(0)  # noqa: S311  traffic, the same in every run

    async def open_accounts(self, progress: Callable[[int], None]) -> DemoTally:
        """Open every account."""
        orders = ((number, number, Account.open, f"owner {number}") for number in range(self._accounts))
        return await self._execute_all(orders, progress)

    async def run(self, commands: int, progress: Callable[[int], None]) -> DemoTally:
        """Execute this many random commands."""
        return await self._execute_all((self._order() for _ in range(commands)), progress)

    @asynccontextmanager
    async def kept_up(self) -> AsyncGenerator[DemoTally]:
        """Execute a few dozen commands a second during the block; the tally is complete after it."""
        tally = DemoTally()
        stop = asyncio.Event()

        async def keep_on() -> None:
            while not stop.is_set():
                await self._execute(self._order(), tally)
                await asyncio.sleep(_PAUSE_S)

        arriving = asyncio.create_task(keep_on())
        try:
            yield tally
        finally:
            stop.set()
            await arriving

    def _order(self) -> _Order:
        chance = self._random
        hot = chance.random() < 0.05
        number = chance.randrange(min(_HOT, self._accounts) if hot else self._accounts)
        decide = Account.deposit if chance.random() < 0.6 else Account.withdraw
        by = chance.randrange(len(self._repositories)) if hot else number
        return number, by, decide, Decimal(chance.randrange(100, 30_000)) / 100

    async def _execute_all(self, orders: Iterator[_Order], progress: Callable[[int], None]) -> DemoTally:
        """Execute all orders with `TASKS` tasks that share one iterator, so that each waits only for the log."""
        tally = DemoTally()

        async def take() -> None:
            for order in orders:
                await self._execute(order, tally)
                progress(tally.sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(take())
        return tally

    async def _execute(self, order: _Order, tally: DemoTally) -> None:
        number, by, decide, argument = order
        repository = self._repositories[by % len(self._repositories)]

        def decision(state: Any) -> Any:
            tally.decided += 1
            return decide(state, argument)

        try:
            done = await repository.execute(f"a-{number:05d}", decision)
            tally.recorded += len(done.events)
        except InsufficientFunds:
            tally.refused += 1
        tally.sent += 1


def old_account_id(number: int) -> str:
    """Return the id of an account that the demo imports."""
    return f"old-{number:05d}"


def old_accounts(events: int) -> Iterator[Imported]:
    """Yield this many events of accounts to import: in order for each account, alternating within a block."""
    chance = random.Random(1)  # noqa: S311  amounts, the same in every run
    for first in count(step=_BLOCK):
        for number in range(_EVENTS_PER_ACCOUNT):
            for account in range(first, first + _BLOCK):
                if not events:
                    return
                events -= 1
                amount = Decimal(chance.randrange(100, 10_000)) / 100
                event = Deposited(amount=amount) if number else Opened(owner=f"owner {account}")
                yield Imported(Account, old_account_id(account), event)
