"""Looking at read models and holding them still, as a person and as a program do it."""

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
from tests.acceptance.test_neighbours import said_until
from tests.acceptance.test_restore import name_of

_END_S = 60.0


@pytest.fixture
def ready(bank: Program) -> Bank:
    """The app, initialised."""
    assert bank("init").status == 0
    return Bank(bank)


@pytest.fixture
def worker(bank: Program, ready: Bank, ended_processes: Keep) -> subprocess.Popen[str]:
    """One at work, with a page for health and metrics on a free port."""
    process = bank.start("worker", "--http", "127.0.0.1:0")
    ended_processes(process)
    return process


def listed(bank: Program) -> dict[str, Any]:
    (found,) = json.loads(bank("status", "--json").out)
    return found


def test_a_projection_is_paused_and_goes_on(bank: Program, ready: Bank, worker: subprocess.Popen[str]) -> None:
    ready.await_balance(ready.deposit("a-1", 5, 7))
    paused = bank("pause", "balances")
    assert (paused.status, paused.out) == (0, "balances revision 1 is paused at position 3\n")
    last = ready.deposit("a-2", 1)
    found = listed(bank)
    assert (found["state"], found["position"], found["owner"]) == ("paused", 3, None)
    again = json.loads(bank("pause", "balances", "--json").out)
    assert again == [{"name": "balances", "revision": 1, "state": "paused", "position": 3, "changed": False}]
    resumed = bank("resume", "balances")
    assert (resumed.status, resumed.out) == (0, "balances revision 1 goes on from position 3\n")
    ready.await_balance(last)
    refused = bank("resume", "balances")
    assert refused.status == 2
    assert refused.is_one_paragraph()
    assert "not paused. Nothing to resume." in refused.said()
    stranger = bank("pause", "nope")
    assert (stranger.status, "has no 'nope'" in stranger.said()) == (2, True)
    for command in ("pause", "resume"):
        other = bank(command, "balances", "--revision", "9")
        assert (other.status, "no revision 9" in other.said()) == (2, True)


def test_the_line_of_a_worker_that_is_ready_names_what_does_not_work(
    bank: Program, ready: Bank, ended_processes: Keep
) -> None:
    assert bank("pause", "balances").status == 0
    worker = bank.start("worker")
    ended_processes(worker)
    said = said_until(worker, "says why")
    assert said.splitlines()[-1] == "ready: balances; paused: balances; `eventjet status` says why"


def test_status_measures_the_pace_where_something_lags(bank: Program, ready: Bank) -> None:
    found = listed(bank)
    assert (found["events_per_s"], found["eta_s"]) == (None, 0.0)  # one look is enough
    ready.deposit("a-1", 5, 7)
    bank("pause", "balances")
    bank("resume", "balances")
    found = listed(bank)
    assert (found["state"], found["lag_events"], found["eta_s"]) == ("new", 3, None)
    lines = bank("status").out.splitlines()
    assert lines[0].split() == ["projection", "rev", "state", "position", "lag", "behind", "rate", "ETA", "worker"]
    assert all(len(line.rstrip()) <= 80 for line in lines)


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
    found = json.loads(objects.stdout.readline())
    assert (found["state"], found["reason"], found["owner"]) == ("paused", "paused while new", None)
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
    shown = read_until(screen, "balances")
    bank("pause", "balances")
    shown += read_until(screen, "paused")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert (process.returncode, errors) == (130, "")
    os.close(screen)
    lines = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)) if line]
    assert lines[0].startswith("projection")
    assert all(len(line) <= 80 for line in lines)


def read_until(screen: int, wanted: str) -> str:
    found = ""
    deadline = time.monotonic() + _END_S
    while wanted not in found:
        assert select.select([screen], [], [], deadline - time.monotonic())[0], found
        found += os.read(screen, 65_536).decode()
    return found


def test_a_worker_tells_health_and_metrics_where_it_is_asked_to(
    bank: Program, ready: Bank, worker: subprocess.Popen[str]
) -> None:
    assert worker.stderr is not None
    said: Iterator[str] = iter(worker.stderr.readline, "")
    url = next(found[0] for line in said if (found := re.search(r"http://[\d.:]+", line)))
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        assert b"# TYPE eventjet_events_total counter" in answer.read()
    taken = url.rpartition(":")[2]
    second = bank("worker", EVENTJET_WORKER_HTTP=f"127.0.0.1:{taken}")
    assert second.status == 3
    assert f"The address 127.0.0.1:{taken}: nothing can listen there" in second.said()
    wrong = bank("worker", "--http", "8080")
    assert (wrong.status, "Write HOST:PORT" in wrong.said()) == (2, True)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=_END_S)
    assert worker.returncode == 0


def test_every_line_of_a_worker_is_one_object_where_its_log_is_json(
    bank: Program, ready: Bank, ended_processes: Keep
) -> None:
    worker = bank.start("worker", "--log-format", "json")
    ended_processes(worker)
    ready.await_balance(ready.deposit("a-1", 5))
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=_END_S)
    lines = [json.loads(line) for line in said.splitlines()]
    assert all({"at", "level", "logger", "event", "message"} <= line.keys() for line in lines), said
    assert {"eventjet.took_lease", "eventjet.note"} <= {line["event"] for line in lines}
    assert next(line for line in lines if line["event"] == "eventjet.took_lease")["name"] == "balances"
    refused = bank("worker", "--log-format", "json", "nobody")
    assert json.loads(refused.err)["event"] == "eventjet.note"
