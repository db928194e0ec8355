"""`eventjet quarantine`, as a person and as a program use it, beside a worker that is a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest

from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import _imported
from tests.caught_up import wait_caught_up

_END_S = 60.0
PATIENTLY = ("--timeout", "60")
POISON = 'if isinstance(event.data, Deposited) and event.data.amount == 666:\n        raise ValueError("no 666")\n    '


class Books:
    """The bank with a projection that quarantines, and a log in which two events are poison."""

    def __init__(self, bank: Program) -> None:
        self.program = bank
        self._file = bank.folder / "bank.py"
        self._write(("match row, event.data:", POISON + "match row, event.data:"))
        source = self._file.read_text()
        first, _, rest = source.partition('@projection("balances"')
        assert rest
        self._file.write_text(f'{first}@projection("balances", on_error="quarantine"{rest}')
        assert bank("init").status == 0

    def mend(self) -> None:
        self._write((POISON, ""))

    def _write(self, change: tuple[str, str]) -> None:
        source = self._file.read_text()
        assert change[0] in source
        self._file.write_text(source.replace(*change, 1))

    def deposit(self, account: str, *amounts: int) -> int:
        """Open and fill an account; return the position of its last event."""
        module: Any = _imported(self._file)

        async def work() -> int:
            environ = self.program.environ
            settings = {"servers": environ["EVENTJET_SERVERS"], "database": environ["EVENTJET_DATABASE"]}
            async with module.bank.connect(**settings) as jet:
                accounts = jet.repository(module.Account)
                done = await accounts.execute(account, module.Account.open, f"owner of {account}")
                for amount in amounts:
                    done = await accounts.execute(account, module.Account.deposit, Decimal(amount))
                return int(done.position)

        return asyncio.run(work())

    @contextmanager
    def working(self, position: int) -> Iterator[None]:
        """Run a worker process for the block, caught up."""
        process = self.program.start("worker")
        module: Any = _imported(self._file)
        try:
            resolved = module.bank.projections["balances"]
            asyncio.run(wait_caught_up(self.program.environ["EVENTJET_DATABASE"], resolved, position, 30))
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_END_S)

    def resolutions(self) -> dict[int, str]:
        entries = json.loads(self.program("quarantine", "list", "--all", "--json").out)
        return {entry["position"]: entry["resolution"] for entry in entries}


@pytest.fixture
def books(bank: Program) -> Books:
    return Books(bank)


def test_quarantined_events_are_listed_shown_retried_and_dropped(bank: Program, books: Books) -> None:
    assert bank("quarantine", "list").out == "Nothing is quarantined.\n"
    books.deposit("a-1", 1, 666, 2, 3)
    last = books.deposit("a-2", 666, 5)
    with books.working(last):
        pass
    listed = bank("quarantine", "list", "balances")
    assert all(len(line) <= 80 for line in listed.out.splitlines())
    assert "ValueError: no 666" in " ".join(listed.out.split())
    (first, second) = json.loads(bank("quarantine", "list", "--json").out)
    assert (first["position"], first["blocked"], first["resolution"]) == (3, 2, "quarantined")
    assert (second["aggregate"], second["aggregate_id"], second["blocked"]) == ("account", "a-2", 1)
    text = bank("quarantine", "show", "balances", "3").out
    assert '{"amount": "666"}' in text
    assert "raise ValueError" in text
    entry = json.loads(bank("quarantine", "show", "balances", "4", "--json").out)
    assert (entry["resolution"], entry["blocked_by"], entry["payload"]) == ("blocked", 3, None)
    status = json.loads(bank("status", "--json").out)
    assert [projection["quarantined"] for projection in status if projection["name"] == "balances"] == [2]
    assert "2 events quarantined" in bank("status").out

    with books.working(last):
        again = bank("quarantine", "retry", "balances", "3", *PATIENTLY)
        assert again.status == 1
        assert again.out == "3: failed again: ValueError: no 666\n"
        dropped = bank("quarantine", "drop", "balances", "3", "--yes", *PATIENTLY)
        assert (dropped.status, dropped.out) == (0, "3: dropped, and it blocks nothing any more\n")
    books.mend()
    with books.working(last):
        retried = json.loads(bank("quarantine", "retry", "balances", "--all", "--json", *PATIENTLY).out)
        assert [(entry["position"], entry["resolution"], entry["next"]) for entry in retried] == [(7, "retried", None)]
    assert books.resolutions() == {3: "dropped", 7: "retried"}
    assert bank("quarantine", "list").out == "Nothing is quarantined.\n"
    assert bank("quarantine", "retry", "balances", "--all").out == "Nothing is quarantined.\n"
    assert bank("verify", "balances").status == 0


def test_a_retry_without_a_worker_says_that_the_next_worker_does_it(bank: Program, books: Books) -> None:
    last = books.deposit("a-1", 666, 1)
    with books.working(last):
        pass
    waiting = bank("quarantine", "retry", "balances", "2", "--timeout", "0.3")
    assert waiting.status == 1
    assert "2: to be tried again" in waiting.out
    assert "Not over within 0.3 s: a worker may still be at its tries" in " ".join(waiting.out.split())
    unwaited = bank("quarantine", "retry", "balances", "2", "--timeout", "0")
    assert (unwaited.status, "No worker has carried it out yet" in " ".join(unwaited.out.split())) == (0, True)
    assert "to be tried again; it failed with" in " ".join(bank("quarantine", "list").out.split())
    books.mend()
    with books.working(last):
        done = bank("quarantine", "retry", "balances", "--all", *PATIENTLY)
    assert done.out in ("Nothing is quarantined.\n", "2: taken, and it blocks nothing any more\n")
    assert books.resolutions() == {2: "retried"}


def test_a_drop_asks_first(bank: Program, books: Books) -> None:
    last = books.deposit("a-1", 666)
    with books.working(last):
        pass
    command = [sys.executable, "-P", "-m", "eventjet.cli", "quarantine", "drop", "balances", "2", "--timeout", "0"]
    for answer, status, resolution in (("n\n", 1, "quarantined"), ("y\n", 0, "dropped")):
        done = subprocess.run(
            command, cwd=bank.folder, env=dict(bank.environ), input=answer, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done
        assert "A rebuild will leave it out too" in done.stderr
        assert ("Nothing was dropped." in done.stderr) == (status == 1)
        assert books.resolutions() == {2: resolution}


WRONG = [
    (("list", "balance"), "has no 'balance'"),
    (("show", "nope", "2"), "has no 'nope'"),
    (("show", "balances", "9"), "position 9 is not in the quarantine"),
    (("retry", "balances"), "--all"),
    (("retry", "balances", "2", "--all"), "--all"),
    (("retry", "balances", "9"), "position 9 of projection 'balances' is not in its quarantine"),
    (("retry", "balances", "3"), "waits behind the quarantined event at position 2"),
    (("drop", "balances", "3", "--yes"), "waits behind the quarantined event at position 2"),
    (("drop", "balances", "--yes"), "POSITION"),
]


def test_a_wrong_name_or_position_is_reported(bank: Program, books: Books) -> None:
    last = books.deposit("a-1", 666, 1)
    with books.working(last):
        pass
    before = books.resolutions()
    for arguments, part in WRONG:
        ended = bank("quarantine", *arguments)
        assert (ended.status, ended.out) == (2, ""), ended
        assert ended.is_one_paragraph(), ended
        assert part in ended.message(), arguments
    assert books.resolutions() == before
