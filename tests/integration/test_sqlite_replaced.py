"""A file of SQLite that is replaced by a backup, or deleted, while programs have it open."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from eventjet.dev.nats import NatsServer
from eventjet.errors import Unreachable
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.sqlite_connections import configure, connect_async
from eventjet.sql.waiting import Checkpoints, Waiting
from eventjet.subscriptions.context import WorkerOptions
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, database_with, folded, rows_of
from tests.tables import reading

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "read.db"


@pytest.fixture
def ledger(nats: NatsServer, path: Path) -> Ledger:
    """Return an app with its tables on SQLite."""
    url = f"sqlite:///{path}"
    database_with(url, BALANCES, MOVEMENTS)
    ledger = Ledger(Settings(servers=(nats.url,), database=url))
    ledger.create()
    return ledger


def back_up(path: Path) -> Path:
    backup = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(backup)) as copy:
        live.backup(copy)
    return backup


def count(connection: Connection) -> int:
    with connection.begin():
        return int(connection.scalar(text("select count(*) from kept")) or 0)


def add(connection: Connection, rows: int) -> None:
    for _ in range(rows):
        with connection.begin():
            connection.execute(text("insert into kept values (1)"))


@pytest.mark.parametrize("replace", [lambda backup, path: backup.replace(path), lambda _, path: path.unlink()])
def test_no_transaction_begins_on_a_replaced_or_deleted_file(
    path: Path, replace: Callable[[Path, Path], object]
) -> None:
    engine = Database(f"sqlite:///{path}").sync_engine()
    with engine.connect() as connection, connection.begin():
        connection.execute(text("create table kept (n integer)"))
    with engine.connect() as first, engine.connect() as second:
        add(first, 3)
        backup = back_up(path)
        add(first, 4)
        assert count(second) == 7
        replace(backup, path)
        for _ in range(2):
            with pytest.raises(OperationalError, match=r"read\.db was replaced or deleted while it was open"):
                count(first)
        with pytest.raises(OperationalError, match="replaced or deleted"):
            add(second, 1)
    engine.dispose()


def test_writes_to_a_replaced_file_do_not_get_into_the_new_file(path: Path) -> None:
    engine = Database(f"sqlite:///{path}").sync_engine()
    with engine.connect() as connection, connection.begin():
        connection.execute(text("create table kept (n integer)"))
    with ExitStack() as stack:
        olds = [stack.enter_context(engine.connect()) for _ in range(2)]
        add(olds[0], 3)
        backup = back_up(path)
        add(olds[1], 40)
        backup.replace(path)
        with pytest.raises(OperationalError):
            count(olds[0])
        with engine.connect() as new:
            assert count(new) == 3
            add(new, 2)
            # A connection that notices later does not touch the files of the new database.
            with pytest.raises(OperationalError):
                count(olds[1])
            for old in olds:
                old.close()
            add(new, 2)
            with engine.connect() as other:
                assert count(other) == count(new) == 7
    with closing(sqlite3.connect(path)) as reopened:
        assert reopened.execute("pragma integrity_check").fetchone() == ("ok",)
        assert reopened.execute("select count(*) from kept").fetchone() == (7,)


def test_a_database_with_a_deleted_wal_file_is_not_written(path: Path) -> None:
    engine = Database(f"sqlite:///{path}").sync_engine()
    with engine.connect() as connection:
        with connection.begin():
            connection.execute(text("create table kept (n integer)"))
        path.with_name("read.db-wal").unlink()
        with pytest.raises(OperationalError, match="replaced or deleted"):
            add(connection, 1)


async def test_a_worker_continues_from_a_backup_that_replaced_its_file(
    ledger: Ledger, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(ledger.settings.database)
    waiting = Waiting("", checkpoints)
    async with ledger.working("balances", options=QUICK):
        first = ledger.append(history(300))
        await waiting.caught_up(BALANCES, first, 30)
        backup = back_up(path)
        last = ledger.append(history(300, seed=8))
        await waiting.caught_up(BALANCES, last, 30)
        backup.replace(path)

        async def is_logged() -> bool:
            return "was replaced or deleted while it was open" in caplog.text

        await eventually(is_logged, "the worker to notice")
        # The waiter has the old file open, too.
        await waiting.caught_up(BALANCES, last, 30)
        last = ledger.append(history(50, seed=9))
        await waiting.caught_up(BALANCES, last, 30)
    await waiting.close()
    await checkpoints.close()
    with reading(ledger.settings.database) as connection:
        assert rows_of(connection, BALANCES) == folded(ledger.recorded(last))


async def test_a_deleted_file_is_reported_until_there_is_another(
    ledger: Ledger, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ledger.working("balances", options=QUICK):
        last = ledger.append(history(100))
        await ledger.caught_up(last)
        backup = back_up(path)
        path.unlink()

        async def is_logged() -> bool:
            return "was replaced or deleted while it was open" in caplog.text

        await eventually(is_logged, "the worker to notice")
        with pytest.raises(Unreachable, match="there is no such file"):
            await ledger.status()
        await asyncio.to_thread(backup.replace, path)
        last = ledger.append(history(100, seed=8))

        async def caught_up() -> bool:
            try:
                return (await ledger.status()).position == last
            except Unreachable:
                return False

        await eventually(caught_up, "the worker to go on with the backup")


async def test_a_connection_is_closed_when_its_opening_is_cancelled_twice(tmp_path: Path) -> None:
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            begun.set()
            assert go_on.wait(90)
            super().__init__(*arguments, **options)

        def close(self) -> None:
            super().close()
            closed.set()

    opening = asyncio.create_task(connect_async(f"{tmp_path}/slow.db", factory=Slow))
    assert await asyncio.to_thread(begun.wait, 90)
    opening.cancel()
    await asyncio.sleep(0)  # it waits for the connection, to close it
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 90)


@pytest.mark.parametrize("cancellations", range(4))
def test_connections_are_closed_whatever_turn_of_the_loop_they_are_cancelled_at(
    tmp_path: Path, cancellations: int
) -> None:
    opened: list[int] = []
    closed: list[int] = []

    class Counted(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(id(self))

        def close(self) -> None:
            super().close()
            closed.append(id(self))

    async def use(engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
            await asyncio.sleep(90)

    async def cancel_at(turn: int) -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/db", connect_args={"factory": Counted})
        configure(engine.sync_engine)
        using = asyncio.ensure_future(use(engine))
        for _ in range(turn):
            await asyncio.sleep(0)
        for _ in range(cancellations):
            using.cancel()
            await asyncio.sleep(0)
        if cancellations > 1:
            await asyncio.wait({using})
            await engine.dispose()

    before = set(threading.enumerate())
    for turn in range(60):
        asyncio.run(cancel_at(turn))  # which cancels what is left
        for thread in set(threading.enumerate()) - before:
            thread.join(90)
            assert not thread.is_alive(), turn
        assert sorted(opened) == sorted(closed), turn
    assert opened
