"""A file of SQLite that others use meanwhile: a first opener waits for its turn, and a lock that stays is told so."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from eventjet.errors import Unreachable
from eventjet.sql import sqlite_connections
from eventjet.sql.database import Database


@contextmanager
def another(path: Path, statement: str) -> Iterator[sqlite3.Connection]:
    """The first program that opens a new file, within a transaction."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("create table begun (n integer)")
        other.execute("begin")
        other.execute(statement)
        yield other


WRITES, READS = "insert into begun values (1)", "select count(*) from begun"


def by_engine(database: Database) -> str:
    with database.sync_engine().begin() as connection:
        return str(connection.execute(text("pragma journal_mode")).scalar_one())


def by_hand(database: Database) -> str:
    with closing(database.connect_sqlite()) as connection:
        return str(connection.execute("pragma journal_mode").fetchone()[0])


@pytest.mark.parametrize("statement", [WRITES, READS])
@pytest.mark.parametrize("opened", [by_engine, by_hand])
def test_a_first_opener_waits_for_another_one(
    tmp_path: Path, opened: Callable[[Database], str], statement: str
) -> None:
    path = tmp_path / "read.db"
    with another(path, statement) as other:
        timer = threading.Timer(0.3, other.commit)
        timer.start()
        assert opened(Database(f"sqlite:///{path}")) == "wal"
        timer.join()


async def test_a_first_opener_waits_for_another_one_without_a_thread_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "read.db"
    with another(path, WRITES) as other:
        timer = threading.Timer(0.3, other.commit)
        timer.start()
        engine = Database(f"sqlite:///{path}").engine()
        async with engine.begin() as connection:
            assert (await connection.execute(text("pragma journal_mode"))).scalar_one() == "wal"
        await engine.dispose()
        timer.join()


def test_a_lock_that_stays_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_connections, "BUSY_TIMEOUT_S", 0.1)
    path = tmp_path / "read.db"
    database = Database(f"sqlite:///{path}")
    with another(path, WRITES):
        with pytest.raises(Unreachable, match=r"is locked\. Another program has held it"):
            database.connect_sqlite()
        with pytest.raises(Unreachable, match=r"is locked\. Another program"), database.reaching_sync():
            by_engine(database)
