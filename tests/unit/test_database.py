"""SQLite files that other programs use meanwhile, and connections to PostgreSQL without proof of the server."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from eventjet.errors import Unreachable
from eventjet.sql import postgres_connections, sqlite_connections
from eventjet.sql.database import Database, dialect_of, unusable


@contextmanager
def another(path: Path, statement: str) -> Iterator[sqlite3.Connection]:
    """Open a new file as another program does, and leave a transaction open in it."""
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
    with closing(database.connect()) as connection:
        return str(connection.execute("pragma journal_mode").fetchone()[0])


@pytest.mark.parametrize("statement", [WRITES, READS])
@pytest.mark.parametrize("opened", [by_engine, by_hand])
def test_opening_a_new_file_waits_for_another_program(
    tmp_path: Path, opened: Callable[[Database], str], statement: str
) -> None:
    path = tmp_path / "read.db"
    with another(path, statement) as other:
        timer = threading.Timer(0.3, other.commit)
        timer.start()
        assert opened(Database(f"sqlite:///{path}")) == "wal"
        timer.join()


async def test_opening_a_new_file_waits_without_a_thread_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "read.db"
    with another(path, WRITES) as other:
        timer = threading.Timer(0.3, other.commit)
        timer.start()
        engine = Database(f"sqlite:///{path}").engine()
        async with engine.begin() as connection:
            assert (await connection.execute(text("pragma journal_mode"))).scalar_one() == "wal"
        await engine.dispose()
        timer.join()


def test_a_full_disk_is_reported_by_name(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/read.db")

    def fill() -> None:
        with database.reaching_sync(), database.sync_engine().begin() as connection:
            connection.execute(text("create table filled (value blob)"))
            connection.execute(text("pragma max_page_count = 4"))  # to SQLite, a disk that is full
            connection.execute(text("insert into filled values (zeroblob(1000000))"))

    with pytest.raises(Unreachable, match=r"is full. Make room on its disk") as caught:
        fill()
    assert "folder" not in str(caught.value)


def test_a_lock_that_stays_is_reported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_connections, "BUSY_TIMEOUT_S", 0.1)
    path = tmp_path / "read.db"
    database = Database(f"sqlite:///{path}")
    with another(path, WRITES):
        with pytest.raises(Unreachable, match=r"is locked\. Another program has held it"):
            database.connect()
        with pytest.raises(Unreachable, match=r"is locked\. Another program"), database.reaching_sync():
            by_engine(database)


_NO_PROOF = "does not prove who answers"


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("postgresql://u:p@db.example/d", True),
        ("postgresql://u:p@db.example/d?sslmode=require", True),
        ("postgresql://u:p@db.example/d?sslmode=verify-ca", True),
        ("postgresql://u@/d?host=localhost&host=db.example", True),
        ("postgresql://u@localhost/d?hostaddr=10.0.0.1", True),
        ("postgresql://u:p@db.example/d?sslmode=verify-full", False),
        ("postgresql://u:p@db.example/d?sslrootcert=system", False),
        ("postgresql://u:p@127.0.0.1/d", False),
        ("postgresql://u:p@localhost/d", False),
        ("postgresql://u:p@[::1]/d", False),
        ("postgresql:///d?host=/run/postgresql", False),
        ("postgresql:///d", False),
        ("sqlite:////tmp/x.db", False),
    ],
)
def test_a_connection_to_postgresql_without_proof_of_the_server_warns_once(
    url: str, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGSSLMODE"):
        monkeypatch.delenv(name, raising=False)
    postgres_connections.warn_once.cache_clear()
    for _ in range(3):
        Database(url).sync_engine()
    messages = [record.getMessage() for record in caplog.records]
    assert [_NO_PROOF in message and "sslmode=verify-full" in message for message in messages] == [True] * warned
    assert "p@" not in "".join(messages)


def test_the_environment_variables_of_libpq_are_respected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres_connections.warn_once.cache_clear()
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    Database("postgresql:///d").sync_engine()
    assert not caplog.records
    monkeypatch.setenv("PGSSLMODE", "require")
    Database("postgresql:///d").sync_engine()
    assert len(caplog.records) == 1


def test_a_connection_that_was_cancelled_while_it_opened_is_closed(tmp_path: Path) -> None:
    """Otherwise Python 3.13 warns of it, and its thread calls a loop that is closed."""

    async def open_and_cancel(steps: int) -> None:
        engine = Database(f"sqlite:///{tmp_path}/read.db").engine()
        opening = asyncio.ensure_future(engine.connect().__aenter__())
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()
        await engine.dispose()

    for steps in range(8):
        asyncio.run(open_and_cancel(steps))
    gc.collect()


def test_a_sqlite_file_that_was_opened_to_read_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "read #1.db"
    file.write_bytes(b"no page")
    engine = create_engine(f"sqlite:///{file}")
    read_only = dialect_of(engine).read_only(engine)
    assert read_only is not None
    for opened in (engine, read_only):
        assert str(unusable(opened, "it is old", "Upgrade it.")).startswith(f"The database sqlite:///{file}: it is old")


def test_a_file_that_is_no_database_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no database at all\n" * 100)
    database = Database(f"sqlite:///{path}")
    with (
        pytest.raises(Unreachable, match=r"notes.txt: file is not a database. Name the file that has the read models"),
        database.reaching_sync(),
        database.sync_engine().begin() as connection,
    ):
        connection.execute(text("select * from eventjet_projection"))


def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "read.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table begun (n text)")
        connection.executemany("insert into begun values (?)", [("x" * 1_000,)] * 100)
        connection.commit()
    content = bytearray(path.read_bytes())
    content[4_096:] = b"\xff" * (len(content) - 4_096)
    path.write_bytes(content)
    database = Database(f"sqlite:///{path}")
    with (
        pytest.raises(Unreachable, match=r"malformed. Put a backup of it in its place; or move it away"),
        database.reaching_sync(),
        database.sync_engine().begin() as connection,
    ):
        connection.execute(text("select * from begun"))


def test_an_error_of_the_disk_sends_people_to_the_disk() -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    assert str(Database("sqlite:///read.db").unreachable(error)).endswith(
        "read.db: disk I/O error. Look at its disk, which may be full or broken, and try again."
    )
