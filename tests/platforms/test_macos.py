"""On macOS everything works, without `/proc` and other features of Linux.

These run on a Python from which `emulation.py` has taken what macOS lacks.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.platforms.conftest import EVERYTHING, OPTIONS, Platform, wait_for

_BOUND_S = 120.0
_SERVERS = """
import socket

import psycopg

from eventjet.dev import NatsServer, PostgresServer


def greeting(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        return connection.recv(4)


with NatsServer() as nats, PostgresServer(durable=False) as postgres:
    assert greeting(nats) == b"INFO"
    nats.pause()
    nats.resume()
    assert greeting(nats) == b"INFO"
    nats.kill()
    assert not nats.running
    nats.start()
    assert greeting(nats) == b"INFO"

    with psycopg.connect(postgres.url.replace("+psycopg", "")) as session:
        postgres.pause()
        print("paused", postgres.pid, flush=True)
        input()
        postgres.resume()
        assert session.execute("select 1").fetchone() == (1,)
    postgres.kill()
    postgres.start()
"""


def test_all_modules_import_and_all_commands_print_help(macos: Platform) -> None:
    macos("-c", EVERYTHING)


def test_the_examples_run_in_memory_and_their_tests_by_the_testing_kit(macos: Platform) -> None:
    output = macos("-m", "pytest", *OPTIONS, "examples/bank/tests/test_bank.py", "examples/transfer/tests")
    assert " passed" in output
    assert "failed" not in output


def test_embedded_servers_are_paused_killed_and_started_again(macos: Platform) -> None:
    program = macos.start("-c", _SERVERS)
    pid = wait_for(program, "paused").split()[1]
    wait_until(lambda: set(states_with_children(pid)) == {"T"})
    output, _ = program.communicate("\n", timeout=_BOUND_S)
    assert program.returncode == 0, output


def states_with_children(pid: str) -> list[str]:
    """Return the states of a process and of its children: `T` is stopped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [
        Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        for each in [pid, *children]
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_eventjet_dev_works_and_its_servers_end_with_it(
    macos: Platform, tmp_path: Path, number: signal.Signals
) -> None:
    dev = macos.start("-m", "eventjet.cli", "dev", "--temporary", TMPDIR=str(tmp_path))
    port = int(re.findall(r":(\d+)", wait_for(dev, "NATS at"))[0])
    wait_for(dev, "ready: ")
    dev.send_signal(number)
    dev.communicate(timeout=_BOUND_S)
    assert dev.returncode == (0 if number == signal.SIGINT else -number)
    wait_until(lambda: not listens(port))
