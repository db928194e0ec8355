"""A killed `eventjet lake sync` neither loses nor repeats events, unlike the control."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.lake import verify
from eventjet.lake.store import open_store
from tests.forked import Forked
from tests.integration.archived import book_of
from tests.integration.lake_log import FORMATS, positions_of
from tests.integration.rebuild_log import Book

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

KILLS = int(os.environ.get("EVENTJET_TEST_LAKE_KILLS", "6"))
PATIENCE_S = 200
STEPS = ("lake.created", "lake.read", "lake.committed")
NAIVE = """
import sys
from pathlib import Path

import pyarrow as pa

from eventjet import failpoints
from tests.integration.lake_log import iceberg_of

table_format, folder = sys.argv[1], Path(sys.argv[2])
noted = folder / "position"
before = int(noted.read_text()) if noted.exists() else 0
rows = pa.table({"position": pa.array(range(before + 1, before + 11), pa.int64())})
if table_format == "delta":
    from deltalake import write_deltalake

    write_deltalake(folder / "events", rows, mode="append")
else:
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("eventjet", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace_if_not_exists(("naive",))
    catalog.create_table_if_not_exists(("naive", "events"), rows.schema).append(rows)
failpoints.reach("lake.committed")
noted.write_text(str(before + 10))
"""
"""The control program appends rows, then writes the position elsewhere."""


def environment(failpoint: str | None, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
    return {**own, **({"EVENTJET_FAILPOINT": failpoint} if failpoint else {}), **more}


def run(book: Book, folder: Path, table_format: str, failpoint: str | None = None) -> Forked:
    """Start the command in another process."""
    command = ["lake", "sync", str(folder / "lake"), "--format", table_format, "--batch-events", "20"]
    return Forked(
        "eventjet.cli",
        [*command, "--app", f"{book.ref.module}:app", "--app-dir", str(folder)],
        folder=folder,
        environ=environment(failpoint, EVENTJET_SERVERS=book.settings.servers[0]),
        out=folder / "out",
        err=folder / "err",
    )


def kill_after(process: Forked, folder: Path, files: int) -> None:
    """Kill the process when the number of files is reached, or let it end."""
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        if sum(1 for path in folder.rglob("*") if path.is_file()) >= files:
            process.kill()
            return
        time.sleep(0.001)


def check_tables(book: Book, url: Path, table_format: str) -> int:
    """Check that each table has each row up to its position once; return the position of the first table."""
    last_positions: dict[str, int] = {}
    with open_store(str(url), table_format, book.name, None) as store:
        for kind in ("events", *(f"account_{name}" for name in ("opened", "deposited", "sent", "closed"))):
            if (table := store.table(kind)) is None:
                continue
            last_positions[kind] = table.mark.position
            positions = positions_of(url, kind, table_format)
            expected = {
                event.position
                for event in book.recorded(table.mark.position)
                if kind in ("events", f"account_{type(event.data).__name__.lower()}")
            }
            assert positions == sorted(expected), kind
    return last_positions.get("events", 0)


@pytest.mark.parametrize("table_format", FORMATS)
async def test_syncs_that_are_killed_at_random_steps_write_each_event_once(
    eventjet_nats: NatsServer, tmp_path: Path, table_format: str
) -> None:
    chance = random.Random(time.time_ns())
    book = book_of(eventjet_nats, tmp_path)
    url, killed, last = tmp_path / "lake", 0, 0
    while killed < KILLS:
        last = book.fill(60, seed=killed)
        by_step = chance.random() < 0.5
        step = f"{chance.choice(STEPS)}:kill:{chance.randrange(1, 6)}" if by_step else None
        before = sum(1 for path in url.rglob("*") if path.is_file())
        process = run(book, tmp_path, table_format, step)
        if not by_step:
            kill_after(process, url, before + chance.randrange(1, 40))
        process.wait(PATIENCE_S)
        assert process.returncode in (0, -signal.SIGKILL), (step, (tmp_path / "err").read_text())
        killed += process.returncode != 0
        check_tables(book, url, table_format)
    process = run(book, tmp_path, table_format)
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "err").read_text()
    assert check_tables(book, url, table_format) == last
    outcome = await verify(book.ref, str(url), book.settings, table_format=table_format)
    assert outcome.sound
    assert {table.position for table in outcome.tables} == {last}


@pytest.mark.parametrize("table_format", FORMATS)
def test_the_control_repeats_rows_that_were_appended_before_the_kill(tmp_path: Path, table_format: str) -> None:
    for failpoint, status in ((None, 0), ("lake.committed:kill", -signal.SIGKILL), (None, 0)):
        done = subprocess.run(
            [sys.executable, "-c", NAIVE, table_format, str(tmp_path)],
            env=environment(failpoint), capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
    assert positions_of(tmp_path, "events", table_format) == sorted([*range(1, 21), *range(11, 21)])
