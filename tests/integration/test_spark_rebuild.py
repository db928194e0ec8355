"""A rebuild on Spark gives the same rows as the local engine and the live fold."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from eventjet.dev.nats import NatsServer
from eventjet.errors import RebuildError
from eventjet.jetstream.reader import Range, split
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.spark.session import Started, spark_session
from eventjet.spark.source import log_frame
from eventjet.sql.locations import create_tables
from tests.integration.rebuild_log import ALL, Book, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVENTS = int(os.environ.get("EVENTJET_TEST_SPARK_EVENTS", "10000"))
SLOW_EVENTS = 50_000
"""The number of events with which a run takes long enough to be interrupted."""
LARGE = pytest.mark.skipif("EVENTJET_TEST_SPARK_EVENTS" not in os.environ, reason="every day one database is enough")


async def test_spark_the_local_engine_and_the_live_worker_make_the_same_tables(book: Book, spark: Started) -> None:
    last = book.fill(EVENTS, accounts=EVENTS // 25)
    create_tables(book.where.sync_engine(), book.projections.values())
    async with book.working():
        for resolved in book.projections.values():
            await book.caught_up(last, resolved, timeout_s=60)
    live = {name: book.rows(name) for name in ALL}
    on_spark = await rebuild(book.ref, ALL, book.settings, engine="spark")
    assert {name: book.rows(name) for name in ALL} == live
    await rebuild(book.ref, ALL, book.settings, engine="local")
    assert {name: book.rows(name) for name in ALL} == live
    assert live["balances"] == book.folded(last)
    assert (on_spark.events, on_spark.position) == (EVENTS, last)
    assert {projection.projection: projection.rows for projection in on_spark.projections} == {
        name: len(live[name]) for name in ALL
    }
    assert remains(book.where) == []


async def test_a_verification_on_spark_finds_no_difference_in_a_correct_table(book: Book, spark: Started) -> None:
    book.fill(2_000)
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    report = await verify(book.ref, "balances", book.settings, engine="spark")
    assert (report.engine, report.differences, report.rows) == ("spark", 0, book.count())


@pytest.mark.parametrize("name", ["balances", "owners"])
async def test_a_failing_event_is_named_once(book: Book, spark: Started, name: str) -> None:
    book.fill(100)
    opened = next(event_type for event_type in book.projections["balances"].events if event_type.__name__ == "Opened")
    position = book.append([("a-1", opened(owner="x" * 61))])
    with pytest.raises(RebuildError, match=rf"(?s)position {position}\b") as caught:
        await rebuild(book.ref, [name], book.settings, engine="spark")
    assert "Traceback" not in str(caught.value)
    assert remains(book.where) == []


async def test_a_task_whose_process_is_killed_is_repeated(book: Book, spark: Started, tmp_path: Path) -> None:
    last = book.fill(5_000)
    marker = tmp_path / "killed"
    first = "    row = replace(row, events=row.events + 1,"
    die_once = (
        f"    if event.position == {last // 2} and not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close()\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    dying = book.altered((first, die_once + first), ("from dataclasses", "import os\nfrom dataclasses"))
    await rebuild(dying, ["balances", "movements"], book.settings, engine="spark")
    assert marker.exists()
    for name in ("balances", "movements"):
        assert book.rows(name) == book.folded(last, name)


async def test_a_session_of_the_user_is_unchanged_and_its_pages_name_the_job(book: Book, spark: Started) -> None:
    last = book.fill(200)
    session, context = spark.spark, spark.spark.sparkContext
    session.range(3).createOrReplaceTempView("theirs")
    context.setJobDescription("their own")
    loggers = [logging.getLogger(name) for name in ("", "py4j", "pyspark")]

    def state() -> list[Any]:
        logging_state = [
            (logger.level, list(logger.handlers), list(logger.filters), logger.disabled) for logger in loggers
        ]
        views = [table.name for table in session.catalog.listTables()]
        description = context.getLocalProperty("spark.job.description")
        return [
            session.conf.getAll,
            session.catalog.currentDatabase(),
            views,
            description,
            logging_state,
            dict(os.environ),
        ]

    before = state()
    try:
        # In this thread, as a notebook would.
        with spark_session() as started:
            assert started.spark is session
        await rebuild(book.ref, ["balances"], book.settings, engine="spark")
        assert state() == before
    finally:
        context.setJobDescription(None)
        session.catalog.dropTempView("theirs")
    jobs: Any = context._jsc.sc().statusStore().jobsList(None)
    names = {str(jobs.apply(number).description().toString()) for number in range(jobs.size())}
    assert f"Some(eventjet: fold balances up to position {last})" in names


def test_ranges_are_read_as_the_data_source_reads_them(nats: NatsServer, spark: Started, tmp_path: Path) -> None:
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    last = book.fill(3_000)
    options = {"servers": nats.url, "stream": book.name}
    cut = split(1_001, 2_500, 3)
    frame = log_frame(spark.spark, options, cut)
    part = {"fromPosition": "1001", "toPosition": "2500"}
    source: Any = spark.spark.read.format("jetstream").options(**options, **part).load()
    assert frame.dtypes == source.dtypes
    rows: list[Any] = frame.withColumn("part", F.spark_partition_id()).collect()
    assert sorted(tuple(row)[:-1] for row in rows) == sorted(tuple(row) for row in source.collect())
    read = {number: [row.position for row in rows if row.part == number] for number in range(3)}
    assert read == {number: list(range(part_range.start, part_range.end)) for number, part_range in enumerate(cut)}
    with pytest.raises(PySparkException, match=rf"the log ends at {last}|position {last + 1}\b"):
        log_frame(spark.spark, options, [Range(last - 5, last + 6)]).collect()


RUN = """
import asyncio, json, sys
from pathlib import Path
from typing import Any
from eventjet.rebuild import AppRef, EngineOptions, rebuild
from eventjet.settings import Settings

ref = AppRef.parse(sys.argv[1], Path(sys.argv[2]))
report = asyncio.run(rebuild(ref, ["balances"], Settings.load({}), engine=EngineOptions("spark", "local[2]")))
print(json.dumps([report.events, report.rows]))
"""


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_workers_started_elsewhere_import_the_app_on_a_machine_without_java(book: Book, tmp_path: Path) -> None:
    last = book.fill(5_000)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, tmp_path / "run.py", f"{book.ref.module}:app", book.ref.path[0]]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PYTHONPATH", "SPARK_HOME")
    } | {
        "PATH": str(path_without_java(tmp_path / "bin")),
        "EVENTJET_SERVERS": book.settings.servers[0],
        "EVENTJET_DATABASE": book.settings.database,
    }
    process = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [5_000, len(book.rows())]
    assert book.rows() == book.folded(last)
    assert process.stderr == ""
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("database", ["postgresql", pytest.param("sqlite", marks=LARGE)], indirect=True)
def test_an_interrupted_rebuild_ends_soon_and_leaves_no_process_or_shadow(book: Book, tmp_path: Path) -> None:
    book.fill(SLOW_EVENTS)
    (tmp_path / "run.py").write_text(RUN.replace("print(", "print(1, "))
    command = [sys.executable, tmp_path / "run.py", f"{book.ref.module}:app", book.ref.path[0]]
    environment = {
        **os.environ,
        "EVENTJET_SERVERS": book.settings.servers[0],
        "EVENTJET_DATABASE": book.settings.database,
    }
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as running:
        deadline = time.monotonic() + 150
        while "pyspark.daemon" not in commands_of(running.pid):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(60) != 0
    deadline = time.monotonic() + 30
    while commands_of(running.pid) and time.monotonic() < deadline:
        time.sleep(0.1)  # Spark's Python workers end by themselves
    assert commands_of(running.pid) == ""
    assert remains(book.where) == []


def commands_of(session: int) -> str:
    """Return the commands of a session's processes, without defunct ones."""
    listing = subprocess.run(["ps", "-o", "args=", "-s", str(session)], capture_output=True, text=True).stdout
    return "".join(line for line in listing.splitlines(keepends=True) if "<defunct>" not in line)


def path_without_java(folder: Path) -> Path:
    """Link the programs of this machine except Java into a folder, and return the folder."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    return folder
