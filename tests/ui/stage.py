"""A branch at work for the console's screens: servers, a worker, traffic, and three faults that were planted.

`planted` alters a row by hand, records an event that the balances cannot apply, and kills a worker.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import sqlalchemy as sa

from eventjet import Metadata, with_metadata
from eventjet.dev.stack import running_stack
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.transfers import Transfer
from eventjet.jet import Jet
from eventjet.settings import Settings
from tests.ui.branch import POISON, balances_table, branch
from tests.ui.conftest import in_thread

APP = "tests.ui.branch:branch"
ROOT = Path(__file__).parents[2]
OWNERS = (
    "Ada Lovelace",
    "Grace Hopper",
    "Edsger Dijkstra",
    "Barbara Liskov",
    "Alan Kay",
    "Radia Perlman",
    "Ken Thompson",
)
CLERKS = ("clerk-1", "clerk-2", "web", "night-batch")
ALTERED, POISONED = "a-0007", "a-0011"
_WAIT_S = 240.0


@dataclass(slots=True)
class Stage:
    """The folder, environment and worker of a branch."""

    folder: Path
    environ: Mapping[str, str]
    worker: subprocess.Popen[bytes]

    @property
    def settings(self) -> Settings:
        return Settings.load(environ=self.environ)

    def start_worker(self) -> None:
        """Start a worker that continues the work."""
        self.worker = _started(self.folder, self.environ, "worker")

    def kill_worker(self) -> None:
        """Kill the worker, as when its machine dies."""
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait()


@contextmanager
def staged(*, accounts: int = 40, commands: int = 400, postgres: bool = True) -> Iterator[Stage]:
    """Start all of it, with the read models up to the log's end."""
    with running_stack(postgres=postgres) as stack:
        here = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
        urls = {"EVENTJET_SERVERS": stack.servers, "EVENTJET_DATABASE": stack.database, "EVENTJET_APP": APP}
        environ = {**here, **urls, "PYTHONPATH": str(ROOT)}
        with _started(stack.folder, environ, "init") as init:
            assert init.wait(_WAIT_S) == 0
        stage = Stage(stack.folder, environ, _started(stack.folder, environ, "worker"))
        try:
            in_thread(_fill(stage.settings, accounts, commands))
            yield stage
        finally:
            stage.worker.kill()
            stage.worker.wait()


def planted(stage: Stage) -> None:
    """Plant the faults: `ALTERED`'s row, an event of `POISONED`, and a worker that is gone."""
    in_thread(_poison(stage.settings))
    engine = sa.create_engine(stage.settings.database.replace("postgresql:", "postgresql+psycopg:", 1))
    with engine.begin() as connection:
        row = balances_table.c.account_id == ALTERED
        connection.execute(balances_table.update().where(row).values(amount=balances_table.c.amount + 1000))
    engine.dispose()
    stage.kill_worker()


async def _fill(settings: Settings, accounts: int, commands: int) -> None:
    dice = random.Random(7)
    async with branch.connect(settings) as jet:
        accounts_repository = jet.repository(Account)
        for n in range(accounts):
            with with_metadata(Metadata(actor=CLERKS[n % 2], correlation=f"enrolment-{n // 10}")):
                await accounts_repository.execute(f"a-{n:04}", Account.open, OWNERS[n % len(OWNERS)])
                await accounts_repository.execute(f"a-{n:04}", Account.deposit, Decimal(dice.randrange(100, 900)))
        position = 0
        for n in range(commands):
            with with_metadata(Metadata(actor=dice.choice(CLERKS), correlation=f"day-{n // 50}")):
                account = f"a-{dice.randrange(accounts):04}"
                position = (
                    await accounts_repository.command(f"visit-{n}").execute(account, Account.deposit, _amount(dice))
                ).position
        await _transfers(jet, dice, accounts)
        await jet.caught_up("balances", position=position, timeout_s=_WAIT_S)


async def _transfers(jet: Jet, dice: random.Random, accounts: int) -> None:
    """Make some transfers that go through, one that fails, and one that waits for an account to thaw."""
    await jet.repository(Account).execute("a-0003", Account.freeze)
    until = datetime.now(UTC) + timedelta(days=2)
    each = jet.repository(Transfer)
    for n in range(12):
        source, target = f"a-{dice.randrange(4, accounts):04}", f"a-{dice.randrange(4, accounts - 1):04}"
        amount = Decimal(1_000_000) if n == 5 else Decimal(20 + n)
        target = "a-0003" if n == 9 else target
        with with_metadata(Metadata(actor="web", correlation=f"order-{n}")):
            name = f"t-{n:03}"
            await each.execute(name, Transfer.request, name, source, target, amount, until=until)


async def _poison(settings: Settings) -> None:
    async with branch.connect(settings) as jet:
        each = jet.repository(Account)
        with with_metadata(Metadata(actor="night-batch", correlation="interest")):
            await each.execute(POISONED, Account.deposit, POISON)
            last = await each.execute(POISONED, Account.deposit, Decimal(5))
        await jet.caught_up("balances", position=last.position, timeout_s=_WAIT_S)


def _amount(dice: random.Random) -> Decimal:
    return Decimal(dice.randrange(100, 20_000)) / 100


def _started(folder: Path, environ: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "eventjet.cli", *arguments],
            cwd=ROOT,
            env=dict(environ),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
