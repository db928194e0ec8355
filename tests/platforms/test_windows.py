"""On Windows applications, tests and the program `eventjet` work; servers and Spark refuse to start and say so.

These run on a Python from which `emulation.py` has taken what Windows lacks.
"""

from __future__ import annotations

import signal

from eventjet.dev.nats import NatsServer
from tests.logs import fresh_name
from tests.platforms.conftest import EVERYTHING, OPTIONS, Platform, wait_for

_REFUSED = """
import sys
from eventjet.cli.main import main
from eventjet.dev import NatsServer, PostgresServer
from eventjet.errors import Unreachable

for words in ("dev", "dev --temporary --postgres", "demo"):
    print("status", words, main(words.split()))
for server in NatsServer, PostgresServer:
    try:
        server()
    except Unreachable as error:
        print(error)
"""

_APPLICATION = """
import asyncio
from decimal import Decimal

from eventjet.errors import UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.settings import Settings

async def work():
    async with bank.connect() as jet:
        accounts = jet.repository(Account)
        await accounts.execute("a-1", Account.open, "Zoë 東京")
        done = await accounts.execute("a-1", Account.deposit, Decimal(5))
        print("recorded", [event.data async for event in jet.tail()])
        await jet.caught_up("balances", position=done.position, timeout_s=250)
        print("caught up")

try:
    asyncio.run(work())
except UsageError as error:
    print("refused:", error)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(work())
"""

_COMMANDS = """
import sys

from eventjet.cli.main import run

for words in (
    "history account a-1",
    "status",
    "verify balances --engine local",
    "rebuild balances postings --engine local",
    "rebuild balances --engine spark",
):
    sys.argv = ["eventjet", *words.split()]
    try:
        run()
    except SystemExit as end:
        print("status", words, end.code, flush=True)
"""


def test_all_modules_import_and_all_commands_print_help(windows: Platform) -> None:
    windows("-c", EVERYTHING)


def test_the_bank_runs_in_memory_and_its_tests_by_the_testing_kit(windows: Platform) -> None:
    output = windows("-m", "pytest", *OPTIONS, "examples/bank/tests/test_bank.py", "examples/transfer/tests")
    assert " passed" in output
    assert "failed" not in output


def test_commands_that_start_servers_are_refused(windows: Platform) -> None:
    output = " ".join(windows("-c", _REFUSED).split())
    for words in ("dev", "dev --temporary --postgres", "demo"):
        assert f"status {words} 3" in output
    assert output.count("EVENTJET_SERVERS, then run `eventjet init` and `eventjet worker`") == 5


def test_an_application_workers_and_rebuilds_use_a_real_server(
    windows: Platform, nats: NatsServer, database: str
) -> None:
    where = {"EVENTJET_SERVERS": nats.url, "EVENTJET_DATABASE": database.replace("+psycopg", "", 1)}
    where["EVENTJET_STREAM"] = fresh_name()
    windows("-m", "eventjet.cli", "init", **where)
    worker = windows.start("-m", "eventjet.cli", "worker", **where)
    wait_for(worker, "ready: ")

    output = windows("-c", _APPLICATION, PYTHONIOENCODING="utf-8", **where)
    assert output.splitlines()[-1] == "caught up"
    assert ("asyncio:SelectorEventLoop" in output) is database.startswith("postgresql")
    worker.send_signal(signal.SIGINT)
    assert "stopping: what is in hand is finished first" in wait_for(worker, "stopping")
    assert worker.wait(120) == 0

    output = " ".join(windows("-c", _COMMANDS, PYTHONIOENCODING="cp1252", **where).split())
    for words in (
        "history account a-1",
        "status",
        "verify balances --engine local",
        "rebuild balances postings --engine local",
    ):
        assert f"status {words} 0" in output
    assert "Zoë 東京" in output
    assert "status rebuild balances --engine spark 3" in output
    assert "Use `--engine local`, or run this in WSL." in output
