"""Looking at read models and pausing them, as a person and as a program do it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Bank, Keep
from tests.acceptance.test_neighbours import errors_until
from tests.acceptance.test_restore import name_of

_END_S = 60.0


@pytest.fixture
def ready(bank: Program) -> Bank:
    """The app, initialised."""
    assert bank("init").status == 0
    return Bank(bank)


@pytest.fixture
def worker(bank: Program, ready: Bank, ended_processes: Keep) -> subprocess.Popen[str]:
    """A worker with a page for health and metrics on a free port."""
    process = bank.start("worker", "--http", "127.0.0.1:0")
    ended_processes(process)
    return process


def status_of(bank: Program) -> dict[str, Any]:
    (status,) = json.loads(bank("status", "--json").out)
    return status


def test_a_projection_is_paused_and_goes_on(bank: Program, ready: Bank, worker: subprocess.Popen[str]) -> None:
    ready.await_balance(ready.deposit("a-1", 5, 7))
    paused = bank("pause", "balances")
    assert (paused.status, paused.out) == (0, "balances revision 1 is paused at position 3\n")
    last = ready.deposit("a-2", 1)
    status = status_of(bank)
    assert (status["state"], status["position"], status["owner"]) == ("paused", 3, None)
    again = json.loads(bank("pause", "balances", "--json").out)
    assert again == [{"name": "balances", "revision": 1, "state": "paused", "position": 3, "changed": False}]
    resumed = bank("resume", "balances")
    assert (resumed.status, resumed.out) == (0, "balances revision 1 goes on from position 3\n")
    ready.await_balance(last)
    refused = bank("resume", "balances")
    assert refused.status == 2
    assert refused.is_one_paragraph()
    assert "not paused. Nothing to resume." in refused.message()
    stranger = bank("pause", "nope")
    assert (stranger.status, "has no 'nope'" in stranger.message()) == (2, True)
    for command in ("pause", "resume"):
        other = bank(command, "balances", "--revision", "9")
        assert (other.status, "no revision 9" in other.message()) == (2, True)


def test_the_ready_line_of_a_worker_names_what_does_not_work(bank: Program, ready: Bank, ended_processes: Keep) -> None:
    assert bank("pause", "balances").status == 0
    worker = bank.start("worker")
    ended_processes(worker)
    errors = errors_until(worker, "says why")
    assert errors.splitlines()[-1] == "ready: balances; paused: balances; `eventjet status` says why"


def test_status_measures_the_rate_of_a_lagging_projection(bank: Program, ready: Bank) -> None:
    status = status_of(bank)
    assert (status["events_per_s"], status["eta_s"]) == (None, 0.0)  # nothing lags, so one look is enough
    ready.deposit("a-1", 5, 7)
    bank("pause", "balances")
    bank("resume", "balances")
    status = status_of(bank)
    assert (status["state"], status["lag_events"], status["eta_s"]) == ("new", 3, None)
    lines = bank("status").out.splitlines()
    assert lines[0].split() == ["projection", "rev", "state", "position", "lag", "behind", "rate", "ETA", "worker"]
    assert all(len(line.rstrip()) <= 80 for line in lines)


@pytest.mark.parametrize("command", [("status", "--watch", "--json", "--interval", "0.5"), ("tail", "--follow")])
def test_a_reader_that_closes_the_pipe_ends_the_command_without_a_word(
    bank: Program, ready: Bank, ended_processes: Keep, command: tuple[str, ...]
) -> None:
    ready.deposit("a-1", 5)
    process = bank.start(*command)
    ended_processes(process)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    for amount in range(1, 100):  # until the command writes again
        ready.deposit("a-1", amount)
        try:
            process.wait(1)
            break
        except subprocess.TimeoutExpired:
            continue
    assert process.stderr is not None
    assert (process.wait(100), process.stderr.read()) == (0, "")


def test_watching_an_app_that_declares_nothing_says_so_and_ends(bank: Program) -> None:
    assert bank("init").status == 0
    declared = f'bare = App("{name_of(bank)}", aggregates=[Account])'
    (bank.folder / "bare.py").write_text(f"from eventjet import App\nfrom bank import Account\n\n{declared}\n")
    ended = bank("status", "--watch", "--app", "bare:bare")
    assert (ended.status, "declares nothing that could be looked at" in " ".join(ended.out.split())) == (0, True)
    assert json.loads(bank("status", "--watch", "--json", "--app", "bare:bare").out) == []


def test_watching_prints_a_line_for_each_change(bank: Program, ready: Bank, ended_processes: Keep) -> None:
    texts = bank.start("status", "--watch", "--interval", "0.2")
    objects = bank.start("status", "--watch", "--interval", "0.2", "--json")
    for process in (texts, objects):
        ended_processes(process)
        assert process.stdout is not None
    assert texts.stdout is not None
    assert objects.stdout is not None
    assert texts.stdout.readline().startswith(
        "name=balances revision=1 state=new position=0 log_position=0 lag_events=0"
    )
    assert json.loads(objects.stdout.readline())["state"] == "new"
    bank("pause", "balances")
    line = texts.stdout.readline()
    assert "state=paused" in line
    assert 'reason="paused while new"' in line
    status = json.loads(objects.stdout.readline())
    assert (status["state"], status["reason"], status["owner"]) == ("paused", "paused while new", None)
    for process in (texts, objects):
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=_END_S)
        assert (process.returncode, rest, errors) == (130, "", "")


def test_watching_on_a_terminal_keeps_one_table_current(bank: Program, ready: Bank, ended_processes: Keep) -> None:
    ready.deposit("a-1", 5)
    screen, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "eventjet.cli", "status", "--watch", "--interval", "0.1"],
        cwd=bank.folder,
        env={**bank.environ, "TERM": "xterm"},
        stdout=slave,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(slave)
    ended_processes(process)
    screen_text = read_until(screen, "balances")
    bank("pause", "balances")
    screen_text += read_until(screen, "paused")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert (process.returncode, errors) == (130, "")
    os.close(screen)
    lines = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen_text)) if line]
    assert lines[0].startswith("projection")
    assert all(len(line) <= 80 for line in lines)


def read_until(screen: int, wanted: str) -> str:
    text = ""
    deadline = time.monotonic() + _END_S
    while wanted not in text:
        assert select.select([screen], [], [], deadline - time.monotonic())[0], text
        text += os.read(screen, 65_536).decode()
    return text


def test_a_worker_serves_health_and_metrics_at_its_address(
    bank: Program, ready: Bank, worker: subprocess.Popen[str]
) -> None:
    assert worker.stderr is not None
    lines: Iterator[str] = iter(worker.stderr.readline, "")
    url = next(match[0] for line in lines if (match := re.search(r"http://[\d.:]+", line)))
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        assert b"# TYPE eventjet_events_total counter" in answer.read()
    port = url.rpartition(":")[2]
    second = bank("worker", EVENTJET_WORKER_HTTP=f"127.0.0.1:{port}")
    assert second.status == 3
    assert f"The address 127.0.0.1:{port}: nothing can listen there" in second.message()
    wrong = bank("worker", "--http", "8080")
    assert (wrong.status, "Write HOST:PORT" in wrong.message()) == (2, True)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=_END_S)
    assert worker.returncode == 0


def test_every_line_of_a_json_log_is_an_object(bank: Program, ready: Bank, ended_processes: Keep) -> None:
    worker = bank.start("worker", "--log-format", "json")
    ended_processes(worker)
    ready.await_balance(ready.deposit("a-1", 5))
    worker.send_signal(signal.SIGTERM)
    _, errors = worker.communicate(timeout=_END_S)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert all({"at", "level", "logger", "event", "message"} <= line.keys() for line in lines), errors
    assert {"eventjet.took_lease", "eventjet.note"} <= {line["event"] for line in lines}
    assert next(line for line in lines if line["event"] == "eventjet.took_lease")["name"] == "balances"
    refused = bank("worker", "--log-format", "json", "nobody")
    assert json.loads(refused.err)["event"] == "eventjet.note"
