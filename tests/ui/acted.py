"""A bank beside a console: its log, its worker, and the actions recorded in its database."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page
from sqlalchemy import Engine, text

from eventjet.sql.database import Database
from tests import forked
from tests.acceptance.conftest import BANK, Program, clean_environ
from tests.logs import fresh_name
from tests.ui.conftest import serving

FILL = """
import asyncio, sys
from decimal import Decimal
import bank

async def main():
    async with bank.bank.connect() as jet:
        accounts = jet.repository(bank.Account)
        for account, *amounts in [("a-1", 1, 666, 2, 3), ("a-2", 666, 5), ("a-3", 7)]:
            await accounts.execute(account, bank.Account.open, f"owner of {account}")
            for amount in amounts:
                await accounts.execute(account, bank.Account.deposit, Decimal(amount))

asyncio.run(main())
"""
LAST = 10
"""The log's last position."""
POISON = 'if isinstance(event.data, Deposited) and event.data.amount == 666:\n        raise ValueError("no 666")\n    '
FOLD = "match row, event.data:"


@dataclass(frozen=True, slots=True)
class Books:
    """The bank, whose balances quarantine each deposit of 666."""

    program: Program

    def mend(self) -> None:
        file = self.program.folder / "bank.py"
        file.write_text(file.read_text().replace(POISON, ""))

    @contextmanager
    def working(self) -> Generator[subprocess.Popen[str]]:
        """Run a worker process for the block."""
        process = self.program.start("worker")
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)

    def _engine(self) -> Engine:
        return Database(self.program.environ["EVENTJET_DATABASE"]).sync_engine()

    def rows(self, query: str) -> list[Any]:
        with self._engine().connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def change(self, statement: str) -> None:
        with self._engine().begin() as connection:
            connection.execute(text(statement))

    def actions(self) -> list[tuple[str, str, str, str]]:
        """Return (action, target, outcome, actor) in the order of the actions."""
        return self.rows("select action, target, outcome, actor from eventjet_action order by at, id")

    def details(self, action: str) -> Any:
        ((details,),) = self.rows(f"select details from eventjet_action where action = '{action}'")
        return json.loads(details)

    @contextmanager
    def console(self, *options: str) -> Generator[str]:
        with serving(self.program.folder, self.program.environ, *options) as url:
            yield url

    @contextmanager
    def read_meanwhile(self) -> Generator[None]:
        """Keep a reader's transaction open: on PostgreSQL no table is swapped as long."""
        with self._engine().connect() as connection:
            connection.execute(text("select * from balances")).all()
            yield


def books_in(folder: Path, servers: str, database: str) -> Books:
    """Make a bank with ten events, two of which the balances cannot apply."""
    source = BANK.read_text(encoding="utf-8").replace('App("bank"', f'App("{fresh_name("bank")}"')
    assert FOLD in source
    source = source.replace(FOLD, POISON + FOLD, 1)
    quarantining = '@projection("balances", on_error="quarantine"'
    source = source.replace('@projection("balances"', quarantining)
    assert quarantining in source
    (folder / "bank.py").write_text(source, encoding="utf-8")
    (folder / "fill.py").write_text(FILL, encoding="utf-8")
    environ = {**clean_environ(), "EVENTJET_APP": "bank:bank"}
    program = Program(folder, {**environ, "EVENTJET_SERVERS": servers, "EVENTJET_DATABASE": database})
    assert program("init").status == 0
    importable = {**program.environ, "PYTHONPATH": str(folder)}
    filled = forked.run("fill", (), folder=folder, environ=importable, timeout_s=100)
    assert filled.returncode == 0, filled.stderr
    return Books(program)


def confirm(page: Page, button: str) -> None:
    """Press the button of a confirmation page."""
    page.locator("main form button").filter(has_text=button).click()


@contextmanager
def leaving(page: Page) -> Generator[None]:
    """Leave the page at the end, before its console ends: a live page would complain."""
    try:
        yield
    finally:
        page.goto("about:blank")
