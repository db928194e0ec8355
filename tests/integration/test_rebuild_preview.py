"""`eventjet rebuild --dry-run`: what a rebuild would do, and what would refuse it, and nothing at all is changed."""

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
    """The real program on the book's app."""
    environ = {
        **os.environ,
        "EVENTJET_SERVERS": book.settings.servers[0],
        "EVENTJET_DATABASE": book.settings.database,
        "COLUMNS": "80",
        **more,
    }
    where = ["--app", f"{book.ref.module}:app", "--app-dir", book.ref.path[0]]
    return forked.run("eventjet.cli", [*arguments, *where], folder=Path.cwd(), environ=environ, timeout_s=100)


def everything(book: Book) -> Any:
    """What a database holds: every row of the catalogue and of eventjet's tables, or the bytes of the files."""
    if book.where.dialect.name == "sqlite":
        folder = Path(book.ref.path[0])
        return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.glob("read.db*")}
    queries = (
        "select nspname from pg_namespace order by 1",
        "select schemaname, tablename from pg_tables order by 1, 2",
        "select n_tup_ins, n_tup_upd, n_tup_del, relname from pg_stat_user_tables order by relid",
    )
    with book.where.sync_engine().connect() as connection:
        # A session counts what it wrote as late as at its end.
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


async def test_it_changes_nothing_in_a_database_that_has_everything_or_nothing(book: Book) -> None:
    last = book.fill(200)
    before = everything(book)
    first = await preview(book.ref, ALL, book.settings, engine="local")
    assert everything(book) == before
    assert (first.upgrades, first.refusals, {one.position for one in first.candidates}) == (True, [], {None})
    await rebuild(book.ref, ALL, book.settings, engine="local")
    before = everything(book)
    then = await preview(book.ref, ALL, book.settings, engine="local")
    assert everything(book) == before
    assert (then.upgrades, then.refusals, {one.position for one in then.candidates}) == (False, [], {last})
    assert (then.plan.events, then.leftovers, remains(book.where)) == (200, (), [])


async def test_it_shows_how_events_travel_and_what_shares_a_reading_of_the_log(book: Book) -> None:
    book.fill(100)
    shown = await preview(book.ref, ALL, book.settings, engine=EngineOptions("spark", "local[2]"))
    assert [one.route.value for one in shown.candidates] == ["by aggregate", "by key", "by key", "as read"]
    together = [one.projections for one in shown.plan.passes]
    assert together == [("balances", "movements"), ("owners",), ("turnover",)]
    here = await preview(book.ref, ALL, book.settings, engine="local")
    assert (len(here.plan.passes), here.master, shown.master) == (1, None, "local[2]")


async def test_what_would_refuse_a_rebuild_is_named_beforehand(book: Book) -> None:
    book.fill(100)
    await rebuild(book.ref, ["balances", "owners"], book.settings, engine="local")
    with book.where.sync_engine().begin() as connection:
        connection.execute(text("create index by_hand on balances (events)"))
    done = run(book, "rebuild", "balances", "owners", "--engine", "local", "--dry-run")
    assert (done.returncode, done.stderr) == (1, "")
    assert "the index by_hand, which the table does not declare" in " ".join(done.stdout.split())
    assert all(len(line) <= 80 or " " not in line for line in done.stdout.splitlines())
    shown = json.loads(run(book, "rebuild", "balances", "owners", "--engine", "local", "--dry-run", "--json").stdout)
    assert [bool(one["refusal"]) for one in shown["projections"]] == [True, False]
    assert (shown["events"], shown["first"], shown["last"], len(shown["refusals"])) == (100, 1, 100, 1)
