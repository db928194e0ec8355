"""The command line of an app with processes, reactors and commands: watched, paused and resolved."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet import App, served
from eventjet.dev.nats import NatsServer
from eventjet.examples.transfer.accounts import Account, Book, InsufficientFunds
from eventjet.examples.transfer.app import outside, receipts
from eventjet.examples.transfer.transfers import Transfer
from tests.acceptance.conftest import Program, clean_environ
from tests.logs import fresh_name

BOUND_S = 120.0
WIRED = """
from eventjet import App, served
from eventjet.examples.transfer.accounts import Account, Book, InsufficientFunds
from eventjet.examples.transfer.app import outside, receipts
from eventjet.examples.transfer.transfers import Transfer

wired = App(
    NAME,
    aggregates=[Account, Book],
    processes=[Transfer],
    reactors=[receipts],
    deps=outside,
    served=[served(Account, Account.deposit), served(Account, Account.withdraw, InsufficientFunds)],
)
"""


@dataclass(frozen=True, slots=True)
class Acting:
    """The program in a folder with the app, and the app in this process."""

    program: Program
    app: App
    url: str

    def __call__(self, *arguments: str) -> Any:
        return self.program(*arguments)

    def json(self, *arguments: str) -> Any:
        done = self.program(*arguments, "--json")
        assert done.status == 0, done.err
        return json.loads(done.out)

    def ask(self, name: str, source: str, target: str, seconds: float) -> None:
        """Ask for a transfer of 4."""

        async def run() -> None:
            async with self.app.connect(servers=self.url) as jet:
                until = datetime.now(UTC) + timedelta(seconds=seconds)
                transfers = jet.repository(Transfer)
                await transfers.execute(name, Transfer.request, name, source, target, Decimal(4), until=until)

        asyncio.run(run())

    def decide(self, aggregate_id: str, *decision: Any) -> None:
        async def run() -> None:
            async with self.app.connect(servers=self.url) as jet:
                await jet.repository(Account).execute(aggregate_id, *decision)

        asyncio.run(run())

    def eventually(self, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + BOUND_S
        while not (result := look()):
            assert time.monotonic() < deadline, "it did not come to be"
            time.sleep(0.1)
        return result


@pytest.fixture
def acting(tmp_path: Path, eventjet_nats: NatsServer) -> Acting:
    name = fresh_name("acting")
    (tmp_path / "wired.py").write_text(WIRED.replace("NAME", repr(name)), encoding="utf-8")
    environ = {**clean_environ(), "EVENTJET_APP": "wired:wired", "EVENTJET_SERVERS": eventjet_nats.url}
    app = App(
        name,
        aggregates=[Account, Book],
        processes=[Transfer],
        reactors=[receipts],
        deps=outside,
        served=[served(Account, Account.deposit), served(Account, Account.withdraw, InsufficientFunds)],
    )
    return Acting(Program(tmp_path, environ), app, eventjet_nats.url)


def test_a_worker_without_its_cursors_says_what_to_do(acting: Acting) -> None:
    async def declare() -> None:
        async with App(acting.app.name, aggregates=[Account]).connect(servers=acting.url) as jet:
            await jet.init()

    asyncio.run(declare())
    result = acting("worker")
    assert result.status == 3
    assert result.is_one_paragraph()
    assert "The cursor of 'receipts'" in result.message()
    assert "Run `eventjet init` once." in result.message()
    assert "it has no cursor: run `eventjet init`" in acting("status").out


def test_processes_and_reactors_are_watched_paused_and_set(
    acting: Acting, ended_processes: Callable[[subprocess.Popen[str]], None]
) -> None:
    report = acting.json("init")
    assert report["cursors"] == {"receipts": 0, "transfer": 0}
    assert acting.json("init")["cursors"] == {}
    acting.decide("ada", Account.deposit, Decimal(10))
    acting.decide("bob", Account.freeze)
    worker = acting.program.start("worker")
    ended_processes(worker)
    acting.ask("t-1", "ada", "bob", 3_600)
    deadlines = acting.eventually(lambda: acting.json("deadlines", "list"))
    assert {(deadline["process"], deadline["id"]) for deadline in deadlines} == {("transfer", "t-1")}

    def waiting_process() -> Any:
        process = acting.json("process", "show", "transfer", "t-1")
        return process if process["state"]["stage"] == "waiting" else None

    process = acting.eventually(waiting_process)
    assert (process["process"], process["id"], process["step"]) == ("transfer", "t-1", None)
    assert [deadline["decision"] for deadline in process["deadlines"]] == ["try_again", "gave_up"]
    assert process["version"] >= 3
    assert acting("process", "show", "transfer", "nobody").status == 1
    paused = acting.json("pause", "transfer", "receipts")
    assert {status["name"]: status["state"] for status in paused} == {"transfer": "paused", "receipts": "paused"}
    states = {status["name"]: (status["kind"], status["state"]) for status in acting.json("status")}
    assert states == {"receipts": ("reactor", "paused"), "transfer": ("process", "paused")}
    lines = acting("status").out.splitlines()
    assert lines[0].split()[0] == "name"
    assert all(len(line.rstrip()) <= 80 for line in lines)
    acting("resume", "transfer", "receipts")
    again = acting("resume", "transfer")
    assert (again.status, "is active, not paused. Nothing to resume." in again.message()) == (2, True)
    acting.decide("bob", Account.thaw)
    acting.eventually(lambda: "transfer.completed" in acting("history", "transfer", "t-1").out)
    end = json.loads(acting("tail", "--limit", "1", "--json").out)["position"]
    assert acting.json("cursor", "set", "transfer", str(end), "--yes")["name"] == "transfer"
    assert "Run `eventjet process sync transfer`, too" in acting("cursor", "set", "transfer", str(end), "--yes").out
    synced = acting.json("process", "sync", "transfer")
    assert synced == {"woken": 1, "steps": 0, "failed": 0, "examples": []}
    refused = acting("cursor", "set", "receipts", "100000", "--yes")
    assert refused.status == 2
    assert "the log ends at" in refused.message()
    acting.eventually(lambda: "mail receipts/" in read_some(worker))
    assert acting.json("cursor", "set", "receipts", "0", "--yes")["position"] == 0
    acting.eventually(lambda: "mail receipts/" in read_some(worker))  # again, under the same key
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(BOUND_S) == 0


def read_some(process: subprocess.Popen[str]) -> str:
    """Read a line of what the process has printed."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_commands_are_served_until_a_signal(
    acting: Acting, ended_processes: Callable[[subprocess.Popen[str]], None]
) -> None:
    missing = acting("serve")
    assert (missing.status, missing.is_one_paragraph()) == (3, True)
    acting("init")
    service = acting.program.start("serve")
    ended_processes(service)
    assert service.stderr is not None
    assert service.stderr.readline().strip() == "ready: account.deposit, account.withdraw"

    def run(ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        async def connected() -> Any:
            async with acting.app.client(servers=acting.url, request_timeout_s=30) as remote:
                return await ask(remote.repository(Account))

        return asyncio.run(connected())

    committed = run(lambda accounts: accounts.execute("ada", Account.deposit, Decimal(5)))
    assert committed.version == 1
    with pytest.raises(InsufficientFunds):
        run(lambda accounts: accounts.execute("ada", Account.withdraw, Decimal(9)))
    service.send_signal(signal.SIGTERM)
    assert service.wait(BOUND_S) == 0
