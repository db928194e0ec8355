"""The commands, as a person and as a program use them, against a real server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from eventjet.jet import Jet
from tests.acceptance.conftest import Program
from tests.logs import fresh_name

_END_S = 60.0
Keep = Callable[[subprocess.Popen[str]], None]


class Bank:
    """The app behind the commands, driven in this process."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.module: Any = _imported(program.folder / "bank.py")

    def record(self, work: Callable[[Jet, Any], Any]) -> Any:
        """Run one coroutine on a connection."""

        async def run() -> Any:
            servers, database = self._program.environ["EVENTJET_SERVERS"], self._program.environ["EVENTJET_DATABASE"]
            async with self.module.bank.connect(servers=servers, database=database) as jet:
                return await work(jet, self.module)

        return asyncio.run(run())

    def deposit(self, account: str, *amounts: int) -> int:
        """Open and fill an account; return the position of its last event."""

        async def work(jet: Jet, module: Any) -> int:
            accounts = jet.repository(module.Account)
            done = await accounts.execute(account, module.Account.open, f"owner of {account}")
            for amount in amounts:
                done = await accounts.execute(account, module.Account.deposit, Decimal(amount))
            return done.position

        return int(self.record(work))

    def await_balance(self, position: int) -> None:
        self.record(lambda jet, _: jet.caught_up("balances", position=position, timeout_s=60))


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bank_{uuid4().hex}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ready(bank: Program) -> Bank:
    """The app, initialised."""
    assert bank("init").status == 0
    return Bank(bank)


def test_init_creates_once_and_then_agrees(bank: Program) -> None:
    first = json.loads(bank("init", "--json").out)
    again = json.loads(bank("init", "--json").out)
    assert {"balances", "eventjet_projection"} <= set(first["created"])
    assert (again["created"], again["drifts"], again["log"]) == ([], [], first["log"])


def test_history_shows_an_aggregate_and_says_when_there_is_nothing(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1", 5, 7)
    ready.deposit("a-2", 1)
    lines = bank("history", "account", "a-1").out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split("  ")[-1] for line in lines if "deposited" in line] == ['{"amount":"5"}', '{"amount":"7"}']
    events = json.loads(bank("history", "account", "a-1", "--json").out)
    assert [(event["version"], event["type"]) for event in events] == [
        (1, "account.opened"),
        (2, "account.deposited"),
        (3, "account.deposited"),
    ]
    for options, versions in [
        (("--newest-first",), [3, 2, 1]),
        (("--newest-first", "--limit", "2"), [3, 2]),
        (("--limit", "2"), [1, 2]),
        (("--after", "1", "--limit", "1"), [2]),
        (("--after", "2", "--newest-first", "--limit", "9"), [3]),
    ]:
        part = json.loads(bank("history", "account", "a-1", "--json", *options).out)
        assert [event["version"] for event in part] == versions
    later = bank("history", "account", "a-1", "--after", "3")
    assert (later.status, later.out) == (1, "")
    nobody = bank("history", "account", "nobody")
    assert (nobody.status, nobody.out) == (1, "")
    assert nobody.is_one_paragraph()


def test_tail_shows_the_last_events_or_begins_at_a_position(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1", *range(1, 15))
    last = [json.loads(line) for line in bank("tail", "--json").out.splitlines()]
    assert [event["position"] for event in last] == list(range(6, 16))
    events = [json.loads(line) for line in bank("tail", "--json", "--from", "14").out.splitlines()]
    beyond = bank("tail", "--from", "9999")
    assert (beyond.status, beyond.out) == (0, "")
    assert "There is nothing to show: the log ends at position " in beyond.err
    assert [event["position"] for event in events] == [14, 15]
    for options, positions in [
        (("--limit", "2"), [14, 15]),
        (("--from", "3", "--limit", "2"), [3, 4]),
        (("--until", "4"), [1, 2, 3, 4]),
        (("--until", "4", "--limit", "2"), [3, 4]),
        (("--from", "14", "--until", "15", "--follow"), [14, 15]),
    ]:
        lines = bank("tail", "--json", *options).out.splitlines()
        assert [json.loads(line)["position"] for line in lines] == positions
    assert all(len(line) <= 80 for line in bank("tail").out.splitlines())


def test_tail_shows_an_event_that_the_app_cannot_read(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1")

    async def stray(jet: Jet, module: Any) -> None:
        from nats.aio.client import Client

        client = Client()
        await client.connect(bank.environ["EVENTJET_SERVERS"])
        headers = {"Ej-Type": "account.\x9bcursed", "Ej-Schema": "1", "Ej-Version": "1"}
        await client.jetstream().publish(f"{module.bank.name}.account.a-9", b'{"x":', headers=headers)
        await client.close()

    ready.record(stray)
    tail = bank("tail")
    assert tail.status == 0
    assert "unreadable" in tail.out
    assert "\x9b" not in tail.out
    assert json.loads(bank("tail", "--json").out.splitlines()[-1])["fault"]


def test_tail_follows_until_it_is_interrupted(bank: Program, ready: Bank, ended_processes: Keep) -> None:
    process = bank.start("tail", "--follow", "--json")
    ended_processes(process)
    ready.deposit("a-1", 5)
    assert process.stdout is not None
    positions = [json.loads(process.stdout.readline())["position"] for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert (positions, process.returncode, errors) == ([1, 2], 130, "")


def test_a_reader_that_leaves_early_is_no_error(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1", *range(1, 400))
    process = bank.start("tail", "--json", "--from", "1")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(_END_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_keeps_the_table_until_a_signal(
    bank: Program, ready: Bank, number: signal.Signals, ended_processes: Keep
) -> None:
    process = bank.start("worker", "balances")
    ended_processes(process)
    ready.await_balance(ready.deposit("a-1", 5, 7))
    deadline = time.monotonic() + _END_S
    while True:
        (status,) = json.loads(bank("status", "--json").out)
        state = (status["name"], status["state"], status["position"], status["lag_events"], status["owner"] is not None)
        if state == ("balances", "active", 3, 0, True):
            break
        assert time.monotonic() < deadline, state
    process.send_signal(number)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 0
    assert "ready: balances" in errors
    assert "Traceback" not in errors
    (status,) = json.loads(bank("status", "--json").out)
    assert status["owner"] is None


BLOCKING = """
import asyncio, time
from contextlib import asynccontextmanager
from eventjet import App, Reaction, Recorded, aggregate, event, reactor

@event("bell.rung")
class Rung:
    pass

@aggregate("bell")
class Bell:
    def evolve(self, event: Rung) -> "Bell":
        return self

@reactor("echo")
async def echo(event: Recorded[Rung], to: Reaction[object]) -> None:
    pass

@asynccontextmanager
async def deps():
    yield
    WAIT

bells = App("NAME", aggregates=[Bell], reactors=[echo], deps=deps)
"""


@pytest.mark.slow
def test_a_worker_ends_although_its_deps_block_their_closing(bank: Program, ended_processes: Keep) -> None:
    """Two of them at once, as both are waited for long."""
    waits = {"blocking": "time.sleep(3600)", "waiting": "await asyncio.to_thread(time.sleep, 3600)"}
    processes: dict[str, subprocess.Popen[str]] = {}
    for module, wait in waits.items():
        source = BLOCKING.replace("NAME", fresh_name("bells")).replace("WAIT", wait)
        (bank.folder / f"{module}.py").write_text(source, encoding="utf-8")
        assert bank("init", EVENTJET_APP=f"{module}:bells").status == 0
        process = processes[module] = bank.start("worker", EVENTJET_APP=f"{module}:bells")
        ended_processes(process)
        assert process.stderr is not None
        while "ready: echo" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    for module, process in processes.items():
        _, errors = process.communicate(timeout=3 * _END_S)
        assert "not over within 25 s: ended" in errors
        assert ("the deps of the app" in errors) == ("to_thread" in waits[module])


def test_status_says_how_far_behind_a_read_model_is(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1", 5, 7)
    (status,) = json.loads(bank("status", "--json").out)
    assert (status["position"], status["log_position"], status["lag_events"]) == (0, 3, 3)
    assert status["lag_s"] >= 0
    lines = bank("status").out.splitlines()
    assert lines[0].split()[0] == "projection"
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_a_rebuild_fills_the_table_and_verify_finds_an_altered_row(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1", 5, 7)
    ready.deposit("a-2", 1)
    rebuilt = bank("rebuild", "balances", "--engine", "local")
    assert rebuilt.out.startswith("balances revision 1: 2 rows from 5 events, swapped in at position 5")
    same = bank("verify", "balances")
    assert (same.status, same.out.splitlines()[0]) == (0, "0 differences: balances at position 5, 2 rows")

    with sqlite3.connect(bank.folder / "read.db") as connection:
        connection.execute("update balances set owner = 'eve' where account_id = 'a-2'")
    connection.close()
    other = bank("verify", "balances")
    assert (other.status, other.out.splitlines()[0]) == (1, "1 difference: balances at position 5, 2 rows")
    assert "a-2: owner is eve and should be owner of a-2" in " ".join(other.out.split())
    report = json.loads(bank("verify", "balances", "--json").out)
    assert (report["differences"], report["examples"][0]["key"]) == (1, "a-2")


OWNERS = """

@dataclass(frozen=True, slots=True)
class Owner:
    account_id: Key[str]
    owner: str


@projection("owners")
def owners(row: Owner | None, event: Recorded[Opened]) -> Owner | None:
    return Owner(event.aggregate_id, event.data.owner)


both = App(bank.name, aggregates=[Account], projections=[balances, owners])
"""


def test_several_read_models_are_verified_although_one_fails(bank: Program, ready: Bank) -> None:
    ready.deposit("a-1", 5)
    with (bank.folder / "bank.py").open("a", encoding="utf-8") as source:
        source.write(OWNERS)
    both = Program(bank.folder, {**bank.environ, "EVENTJET_APP": "bank:both"})
    assert both("rebuild", "balances", "--engine", "local").status == 0
    result = both("verify", "owners", "balances")
    assert result.status == 1
    assert "owners could not be verified: 'owners' has no live read model yet" in " ".join(result.out.split())
    assert "0 differences: balances at position 2, 1 row" in result.out  # after the one that failed
    table = [line.split() for line in result.out.splitlines()[-3:]]
    assert table == [
        ["verified", "position", "rows", "differences"],
        ["owners", "–", "–", "not", "verified"],
        ["balances", "2", "1", "0"],
    ]
    values = json.loads(both("verify", "owners", "balances", "--json").out)["projections"]
    assert [(value["projection"], value.get("differences")) for value in values] == [("owners", None), ("balances", 0)]
    assert both("rebuild", "owners", "--engine", "local").status == 0
    assert both("verify", "owners", "balances").status == 0


def test_the_app_can_be_named_in_pyproject(bank: Program, ready: Bank) -> None:
    (bank.folder / "pyproject.toml").write_text('[tool.eventjet]\napp = "bank:bank"\n')
    assert bank("status", EVENTJET_APP="").status == 0


def test_version_and_help_are_printed(bank: Program) -> None:
    assert bank("--version").out.strip() == "0.1.0"
    for arguments in (("--help",), ("worker", "--help"), ("rebuild", "--help")):
        ended = bank(*arguments)
        assert ended.status == 0
        assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert bank().status == 2


def test_help_starts_at_once_and_imports_nothing_heavy(bank: Program) -> None:
    ended = bank("--help", without=("pyspark", "sqlalchemy", "nats", "pydantic", "psycopg", "orjson"))
    assert ended.status == 0, ended.err
