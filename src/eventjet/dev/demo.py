"""`eventjet demo`: the whole road on one machine, measured, with nothing left behind.

Commands and the import run in this process; `init`, `worker`, `rebuild` and `verify` are the real commands, each a
process of its own.
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
from eventjet.errors import DemoFailed, NotCaughtUp
from eventjet.examples import demo_bank
from eventjet.examples.demo_bank import Account, Deposited, InsufficientFunds, Opened
from eventjet.jet import Jet
from eventjet.sql.checkpoint import FAILED

_APP = f"{demo_bank.__name__}:bank"
_PROJECTION = demo_bank.balances.name
_COMMAND_S = 120.0
_POLL_S = 0.1
_CATCH_UP_S = 150.0
TASKS = 64
"""Commands in flight at once."""
_HOT = 10
"""So many accounts get a twentieth of all commands, on both connections: there they meet."""
_EVENTS_PER_ACCOUNT = 40
_BLOCK = 100
"""Imported accounts whose events are mixed with each other's."""
_PAUSE_S = 0.02
_Step = Callable[[str, int, int | None], None]
"""Told the name of a step, how much of it is done, and of how much."""


class ShowProgress(Protocol):
    """Told how far a phase is, and in which step."""

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None: ...


@dataclass(slots=True)
class Demo:
    """One run, and what it measured."""

    accounts: int
    commands: int
    imported: int
    engine: str
    progress: ShowProgress
    say: Callable[[str], None]
    figures: list[tuple[str, int, float, int]] = field(default_factory=list[tuple[str, int, float, int]])
    """(phase, events, seconds, events a second)."""
    verified: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    """(when, rows, differences)."""
    started: Counter[str] = field(default_factory=Counter[str])
    """How often each command was."""
    stack: Stack = field(init=False)

    def run(self, run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
        """`run` runs what begins once the servers are there.

        Raises `Unreachable` when a server cannot start and `DemoFailed` when a promise is not kept.
        """
        with running_stack(postgres=True) as self.stack:
            run(self._run())

    async def _run(self) -> None:
        """From an empty log to a verified read model, twice, while commands keep arriving."""
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
                # An account that gets no commands: the next event of another one would be folded over its row.
                altered = old_account_id(0)
                async with await psycopg.AsyncConnection.connect(self.stack.database) as connection:
                    await connection.execute("update balances set amount = amount + 1 where account_id = %s", [altered])
                await self._verify(f"after {altered} was altered by hand", differs=altered)
                # On the other engine: it is the same function, so it must be the same table.
                await self._rebuild(jets[0], "local")
                await self._verify("after the next rebuild (local)")
            self.say(f"{tally.sent:,} commands arrived meanwhile, and {tally.recorded:,} events were recorded.")
            await asyncio.to_thread(worker.stop)
            if status := worker.wait(0):
                raise DemoFailed("worker", f"it ended with exit status {status}: {worker.tail()}")

    async def _fill(self, traffic: Traffic, jet: Jet) -> None:
        """Commands, then an import."""
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
            if time.monotonic() - began > _CATCH_UP_S:
                reason = f"it is at position {reached} of {last} after {_CATCH_UP_S:g} s: {worker.tail()}"
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
        """Verify, and hold the answer to what is expected: no difference, or exactly one, at that key."""
        began = time.monotonic()
        phase, output = await self._step("verify", statuses=(0, 1))
        found = json.loads(output[output.index("{") :])
        differences, rows, position = int(found["differences"]), int(found["rows"]), int(found["position"])
        self.progress(phase, position, position)
        self._measured("verified", position, began)
        self.verified.append((when, rows, differences))
        said = "1 difference" if differences == 1 else f"{differences} differences"
        keys = ", ".join(str(one["key"]) for one in found["examples"])
        self.say(f"{said} {when}, in {rows:,} rows{f': {keys}' if keys else ''}")
        if (differences, keys) != ((0, "") if differs is None else (1, differs)):
            raise DemoFailed("verification", f"it found {differences} difference(s) {when}: {keys}")

    async def _step(self, command: str, *options: str, statuses: tuple[int, ...] = (0,)) -> tuple[str, str]:
        """Run a command on the projection, with its progress as ours; the name of its phase, and its output."""
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
            # What a command that is killed leaves behind goes with the folder.
            "TMPDIR": str(self.stack.folder),
        }
        log = self.stack.folder / f"{command}-{self.started[command]}.log"
        return DemoCommand([command, *options, "--app-dir", str(self.stack.folder)], environ, log)

    def _counting(self, phase: str, total: int) -> Callable[[int], None]:
        return lambda done: self.progress(phase, done, total)

    def _measured(self, phase: str, events: int, began: float) -> None:
        """A phase that ends now."""
        seconds = time.monotonic() - began
        self.figures.append((phase, events, seconds, round(events / seconds)))


class DemoCommand(ServerProcess):
    """Started when it is made; `finished`, `stop` or `kill` ends it."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._name = f"`eventjet {' '.join(arguments)}`"
        self._output = log
        self._read = 0
        self._rest = b""
        # Not from the current folder, where anything may lie.
        program = Program([sys.executable, "-P", "-m", "eventjet.cli", *arguments], grace_s=25.0)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
        super().__init__(self._name, program, log, {**ours, **environ})

    async def finished(self, step: _Step = lambda _name, _done, _total: None, statuses: tuple[int, ...] = (0,)) -> str:
        """Wait for its end; what it printed apart from its progress. Ends it when cancelled.

        Raises `DemoFailed` when that takes too long, and for an exit status other than these.
        """
        output: list[str] = []
        deadline = time.monotonic() + _COMMAND_S
        try:
            while self.running:
                output += self._printed(step)
                if time.monotonic() > deadline:
                    raise DemoFailed(self._name, f"it was not done within {_COMMAND_S:g} s")
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
        """The lines printed since; those of progress go to `step` instead."""
        with self._output.open("rb") as log:
            log.seek(self._read)
            fresh = log.read()
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
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
    """What became of the commands."""

    sent: int = 0
    recorded: int = 0
    refused: int = 0
    """The decision said no: too little money."""
    decided: int = 0
    """Decisions made; those beyond one a command followed a conflict."""


_Order = tuple[int, int, Any, Any]
"""One command: number of its account, number of its connection, decision, argument."""


class Traffic:
    """Commands on a number of accounts; two connections, as two processes would have.

    Each account has its connection, except that commands on the hot ones come by either.
    """

    def __init__(self, jets: Sequence[Jet], accounts: int) -> None:
        self._repositories = [jet.repository(Account) for jet in jets]
        self._accounts = accounts
        self._random = random.Random(0)  # noqa: S311  traffic, the same in every run

    async def open_accounts(self, progress: Callable[[int], None]) -> DemoTally:
        orders = ((number, number, Account.open, f"owner {number}") for number in range(self._accounts))
        return await self._execute_all(orders, progress)

    async def run(self, commands: int, progress: Callable[[int], None]) -> DemoTally:
        return await self._execute_all((self._order() for _ in range(commands)), progress)

    @asynccontextmanager
    async def kept_up(self) -> AsyncGenerator[DemoTally]:
        """A few dozen commands a second during the block; the tally is complete after it."""
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
        """`TASKS` tasks that take from one iterator, so each waits for nobody but the log."""
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
    """The id of an account that the demo imports."""
    return f"old-{number:05d}"


def old_accounts(events: int) -> Iterator[Imported]:
    """So many events of accounts from elsewhere, each account's in order, a block's mixed."""
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
