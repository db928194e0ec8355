"""`eventjet restore` as a program: killed, interrupted, run again, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventjet.archive.republish import BATCH_MAX, lasting
from eventjet.codec.headers import RawRecord
from eventjet.dev.nats import NatsServer
from eventjet.errors import ApiRefused
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from tests.acceptance.conftest import Program
from tests.integration.restoring import endpoint, records_of, seal
from tests.logs import block

EVENTS = int(os.environ.get("EVENTJET_TEST_RESTORE_EVENTS", "12000"))
KILLS = int(os.environ.get("EVENTJET_TEST_RESTORE_KILLS", "2"))
LOG = "7f9d6a52-3b0e-4b0c-9a51-1c1f2f4e8a01"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m") as server:
        yield server


def name_of(bank: Program) -> str:
    text = (bank.folder / "bank.py").read_text(encoding="utf-8")
    return text.partition('App("')[2].partition('"')[0]


def records_for(name: str, count: int) -> list[RawRecord]:
    """Return deposits on a hundred accounts, a second apart, some weeks ago."""
    return [
        (
            position,
            1_700_000_000_000_000_000 + position * 1_000_000_000,
            f"{name}.account.a-{position % 100}".encode(),
            block(Ej_Version=str((position - 1) // 100 + 1)),
            b'{"amount":"1.00"}',
        )
        for position in range(1, count + 1)
    ]


def last_of(url: str, name: str) -> int:
    try:
        return ask_once(endpoint(url), stream_info(name)).last
    except ApiRefused:
        return 0


def await_stop(process: subprocess.Popen[str], fired: Path) -> None:
    """Wait until its failpoint has stopped the process."""
    deadline = time.monotonic() + 60
    while not (fired.exists() and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_restore_killed_anywhere_is_finished_by_the_next(
    bank: Program,
    server: NatsServer,
    tmp_path: Path,
    ended_processes: Callable[[subprocess.Popen[str]], None],
) -> None:
    name = name_of(bank)
    records = records_for(name, EVENTS)
    url = seal(tmp_path / "archive", records, LOG, name=name)
    killed: list[int] = []
    for number in range(KILLS):
        place = ("stored", "sent")[number % 2]
        at = f"restore.batch_{place}:kill:{max(2, EVENTS // BATCH_MAX // (KILLS + 2))}"
        process = bank.start("restore", url, EVENTJET_SERVERS=server.url, EVENTJET_FAILPOINT=at)
        ended_processes(process)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        killed.append(last_of(server.url, name))
        assert [lasting(record) for record in records_of(server.url, name)] == [
            lasting(record) for record in records[: killed[-1]]
        ]
    assert 0 < killed[0] < killed[-1] < EVENTS
    restored = bank("restore", url, "--json", EVENTJET_SERVERS=server.url)
    assert (restored.status, restored.err) == (0, "") or "phase=" in restored.err, restored.err
    report = json.loads(restored.out)
    assert (report["log"], report["events"], report["published"]) == (LOG, EVENTS, EVENTS - killed[-1])
    assert [lasting(record) for record in records_of(server.url, name)] == [lasting(record) for record in records]


def test_an_interrupted_restore_says_that_it_can_go_on(
    bank: Program,
    server: NatsServer,
    tmp_path: Path,
    ended_processes: Callable[[subprocess.Popen[str]], None],
) -> None:
    name = name_of(bank)
    url = seal(tmp_path / "archive", records_for(name, EVENTS), LOG, name=name)
    fired = tmp_path / "fired"
    at = {"EVENTJET_FAILPOINT": "restore.batch_stored:stop:2", "EVENTJET_FAILPOINT_LOG": str(fired)}
    process = bank.start("restore", url, EVENTJET_SERVERS=server.url, **at)
    ended_processes(process)
    await_stop(process, fired)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "What was restored stays; run it again and it goes on there." in " ".join(err.split())
    assert "Traceback" not in err


def test_a_restored_log_has_its_original_times_and_other_archives_are_refused(
    bank: Program, server: NatsServer, tmp_path: Path
) -> None:
    name = name_of(bank)
    url = seal(tmp_path / "archive", records_for(name, 300), LOG, name=name)
    at = {"EVENTJET_SERVERS": server.url}
    restored = bank("restore", url, "--master", "local[1]", **at)
    assert restored.status == 0, restored.err
    text = " ".join(restored.out.split())
    assert text.startswith(f"{name} is restored: 300 events at positions 1 to 300, log {LOG} published in ")
    events = json.loads(bank("history", "account", "a-1", "--json", **at).out)
    assert [event["recorded_at"] for event in events] == [
        "2023-11-14T22:13:21Z",
        "2023-11-14T22:15:01Z",
        "2023-11-14T22:16:41Z",
    ]
    (tailed, *_) = bank("tail", "--json", **at).out.splitlines()
    assert json.loads(tailed)["recorded_at"] == "2023-11-14T22:18:11Z"
    again = bank("restore", url, **at)
    assert again.status == 0
    assert "300 events of them were there before." in again.out
    other = seal(tmp_path / "other", records_for(name, 200), LOG, name=name)
    refused = bank("restore", other, **at)
    assert (refused.status, refused.out) == (2, "")
    assert "holds 300 events at positions 1 to 300, and the archive 1 to 200" in refused.message()
    nothing = bank("restore", str(tmp_path / "nowhere"), **at)
    assert nothing.status == 1
    assert "there is no such folder. Name what `eventjet archive` made" in nothing.message()
    away = bank("restore", url, EVENTJET_SERVERS="nats://127.0.0.1:1")
    assert away.status == 3
    for ended in (refused, nothing, away):
        assert ended.is_one_paragraph()
