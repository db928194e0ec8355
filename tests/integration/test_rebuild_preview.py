"""`eventjet rebuild --dry-run` shows what a rebuild would do or refuse, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from sqlalchemy import text

from eventjet.rebuild import EngineOptions, preview, rebuild
from tests import forked
from tests.integration.rebuild_log import ALL, Book, remains


def run(book: Book, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the real program on the book's app."""
    environ = {
        **os.environ,
        "EVENTJET_SERVERS": book.settings.servers[0],
        "EVENTJET_DATABASE": book.settings.database,
        "COLUMNS": "80",
        **more,
    }
    where = ["--app", f"{book.ref.module}:app", "--app-dir", book.ref.path[0]]
    return forked.run("eventjet.cli", [*arguments, *where], folder=Path.cwd(), environ=environ, timeout_s=100)


def contents(book: Book) -> Any:
    """Return the tables and row counts of a database, or the digests of its files."""
    if book.where.dialect.name == "sqlite":
        folder = Path(book.ref.path[0])
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("read.db*")}
    queries = (
        "select nspname from pg_namespace order by 1",
        "select schemaname, tablename from pg_tables order by 1, 2",
        "select n_tup_ins, n_tup_upd, n_tup_del, relname from pg_stat_user_tables order by relid",
    )
    with book.where.sync_engine().connect() as connection:
        # A session adds its writes to the statistics only at its end.
        others = (
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() "
            "and backend_type = 'client backend'"
        )
        deadline = time.monotonic() + 30
        while connection.scalar(text(others)):
            assert time.monotonic() < deadline, "sessions outlive those who opened them"
            connection.rollback()
            time.sleep(0.02)
        connection.rollback()
        return [[tuple(row) for row in connection.execute(text(query))] for query in queries]


async def test_a_preview_changes_nothing_in_an_empty_or_complete_database(book: Book) -> None:
    last = book.fill(200)
    before = contents(book)
    first = await preview(book.ref, ALL, book.settings, engine="local")
    assert contents(book) == before
    assert (first.upgrades, first.refusals, {candidate.position for candidate in first.candidates}) == (
        True,
        [],
        {None},
    )
    await rebuild(book.ref, ALL, book.settings, engine="local")
    before = contents(book)
    second = await preview(book.ref, ALL, book.settings, engine="local")
    assert contents(book) == before
    assert (second.upgrades, second.refusals, {candidate.position for candidate in second.candidates}) == (
        False,
        [],
        {last},
    )
    assert (second.plan.events, second.leftovers, remains(book.where)) == (200, (), [])


async def test_a_preview_shows_routes_and_shared_passes(book: Book) -> None:
    book.fill(100)
    spark_preview = await preview(book.ref, ALL, book.settings, engine=EngineOptions("spark", "local[2]"))
    assert [candidate.route.value for candidate in spark_preview.candidates] == [
        "by aggregate",
        "by key",
        "by key",
        "as read",
    ]
    shared = [log_pass.projections for log_pass in spark_preview.plan.passes]
    assert shared == [("balances", "movements"), ("owners",), ("turnover",)]
    local_preview = await preview(book.ref, ALL, book.settings, engine="local")
    assert (len(local_preview.plan.passes), local_preview.master, spark_preview.master) == (1, None, "local[2]")


async def test_a_preview_names_what_would_refuse_the_rebuild(book: Book) -> None:
    book.fill(100)
    await rebuild(book.ref, ["balances", "owners"], book.settings, engine="local")
    with book.where.sync_engine().begin() as connection:
        connection.execute(text("create index by_hand on balances (events)"))
    process = run(book, "rebuild", "balances", "owners", "--engine", "local", "--dry-run")
    assert (process.returncode, process.stderr) == (1, "")
    assert "the index by_hand, which the table does not declare" in " ".join(process.stdout.split())
    assert all(len(line) <= 80 or " " not in line for line in process.stdout.splitlines())
    report = json.loads(run(book, "rebuild", "balances", "owners", "--engine", "local", "--dry-run", "--json").stdout)
    assert [bool(projection["refusal"]) for projection in report["projections"]] == [True, False]
    assert (report["events"], report["first"], report["last"], len(report["refusals"])) == (100, 1, 100, 1)
