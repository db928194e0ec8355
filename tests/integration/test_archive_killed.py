"""An `eventjet archive` that is killed at any step leaves an intact archive, which the next run continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests.integration.archived import book_of, log_records, opened
from tests.integration.ledger_log import eventually
from tests.integration.rebuild_log import Book

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "EVENTJET_TEST_ARCHIVE_KILLS" not in os.environ,
        reason="minutes of JVMs: `make faults` runs it",
    ),
]

EVENTS = 1_000
BOUND_S = 200
KILLS = ("archive.written:kill:1", "archive.read_back:kill:2", "archive.sealed:kill:1")


def run(book: Book, folder: Path, failpoint: str | None = None) -> subprocess.Popen[str]:
    """Start the command in another process, with segments of 250 events."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
    armed = {"EVENTJET_FAILPOINT": failpoint} if failpoint else {}
    command = ["archive", str(folder / "archive"), "--segment-events", "250", "--master", "local[2]"]
    return subprocess.Popen(
        [sys.executable, "-m", "eventjet.cli", *command, "--app", f"{book.ref.module}:app", "--app-dir", str(folder)],
        env={**own, **armed, "EVENTJET_SERVERS": book.settings.servers[0]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def writes_begun(folder: Path) -> Callable[[], Awaitable[bool]]:
    async def begun() -> bool:
        return any(folder.glob("archive/events/*/_temporary/0/*"))

    return begun


def check_integrity(book: Book, folder: Path) -> int:
    """Check that the archive's records are those of the log; return its last position."""
    reader = opened(folder / "archive")
    last = reader.manifest.last
    reader.check(1, last)
    if last:
        assert [record for batch in reader.records(1, last + 1) for record in batch] == log_records(book, last)
    return last


async def test_a_killed_archive_run_is_resumed(eventjet_nats: NatsServer, tmp_path: Path) -> None:
    book = book_of(eventjet_nats, tmp_path)
    book.fill(EVENTS)
    process = run(book, tmp_path)
    await eventually(writes_begun(tmp_path), "the first file was begun", timeout_s=BOUND_S)
    process.kill()
    process.communicate(timeout=BOUND_S)
    reached = [check_integrity(book, tmp_path)]
    for failpoint in KILLS:
        process = run(book, tmp_path, failpoint)
        output = process.communicate(timeout=BOUND_S)
        assert process.returncode == -signal.SIGKILL, output
        reached.append(check_integrity(book, tmp_path))
    assert reached == [0, 0, 250, 500]
    out, err = run(book, tmp_path).communicate(timeout=BOUND_S)
    assert "sealed 501 to 750: 250 events in 1 file" in out, err
    assert "holds positions 1 to 1,000" in " ".join(out.split())
    assert check_integrity(book, tmp_path) == EVENTS
    again = run(book, tmp_path)
    assert "Up to date" in again.communicate(timeout=BOUND_S)[0]
    assert again.returncode == 0
