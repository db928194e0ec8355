"""Connections to SQLite: their pragmas, how their transactions begin, and the check of which file is open.

A file that is replaced or deleted stays open in processes that had it open, and could be written to for ever. Therefore
each transaction begins with a check that the path still names the open file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

import aiosqlite
from aiosqlite.core import _STOP_RUNNING_SENTINEL  # pyright: ignore[reportPrivateUsage]
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError

from eventjet.runtime import try_lock
from eventjet.sql.dialect import READ_ONLY

BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for another writer; it polls, so a busy worker makes it wait for several batches."""

_OPEN_FILE = "eventjet_opened"
"""The key of a connection's `_OpenFile` in SQLAlchemy's `info` of that connection."""
_SET_ASIDE_S = 2.0
_POLL_S = 0.01

_FileId: TypeAlias = tuple[int, int]
_Queue: TypeAlias = "SimpleQueue[tuple[asyncio.Future[Any] | None, Callable[[], Any]]]"


class FileReplaced(sqlite3.OperationalError):
    """The path of the database no longer names the open file; a new connection opens the file that is there now."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the file {path} was replaced or deleted while it was open")
        self.sqlite_errorcode = sqlite3.SQLITE_READONLY_DBMOVED


class FileMissing(sqlite3.OperationalError):
    """There is no file at the path of the database, and this connection must not make one."""

    def __init__(self) -> None:
        super().__init__("there is no such file")


@dataclass(slots=True)
class _OpenFile:
    """The database file and the write-ahead log that a connection has open."""

    path: str
    file: _FileId | None
    """The open file; None where the path names no file."""
    log: _FileId | None = None
    """The file's write-ahead log, which is not replaced for as long as anybody has the file open."""

    def connected(self) -> None:
        """Note the files that connecting has created."""
        log = _file_id(_log_of(self.path))
        self.file = self.file or _file_id(self.path)
        if _file_id(self.path) == self.file:  # otherwise the log may be another file's
            self.log = log

    def check(self, connection: Connection) -> None:
        """Raise `OperationalError` where the path names another file or log by now."""
        if self.file is None:
            return
        is_there = _file_id(self.path) == self.file
        if is_there and _file_id(_log_of(self.path)) == self.log:
            return
        if not is_there and self.log is not None:
            self._set_log_aside(connection, self.log)
        raise OperationalError(None, None, FileReplaced(self.path))

    def _set_log_aside(self, connection: Connection, log: _FileId) -> None:
        """Remove the write-ahead log of the replaced file, which would be mistaken for the log of the new file.

        A log that somebody has begun for the new file is kept: under the lock, one process at a time compares.
        """
        deadline = time.monotonic() + _SET_ASIDE_S
        while _file_id(_log_of(self.path)) == log and time.monotonic() < deadline:
            with suppress(FileNotFoundError), Path(_log_of(self.path)).open("rb") as file:
                if _id_of(os.fstat(file.fileno())) != log or not try_lock(file):
                    time.sleep(_POLL_S)
                elif _file_id(_log_of(self.path)) == log:
                    with suppress(OperationalError):  # for those who have moved the old file elsewhere
                        connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
                    for leftover in (f"{self.path}-shm", _log_of(self.path)):
                        Path(leftover).unlink(missing_ok=True)


def connect(url: URL) -> sqlite3.Connection:
    """Open a blocking sqlite3 connection that begins no transaction by itself."""
    with ExitStack() as unwanted:
        connection = sqlite3.connect(str(url.database), isolation_level=None)
        unwanted.callback(connection.close)
        _set_pragmas(connection)
        unwanted.pop_all()
    return connection


class _AsyncConnection(aiosqlite.Connection):
    """A connection that is closed whatever is cancelled or ends while it opens, works or closes.

    aiosqlite loses a connection whose opening is cancelled and one whose loop ends while it works, and waits for ever
    where a cancelled `close` or another one waits for a thread that has ended.
    """

    _tx: _Queue
    _closed: asyncio.Future[Any] | None = None

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=64)
        self._thread = Thread(target=_work, args=(self._tx,), daemon=True)

    async def _connect(self) -> _AsyncConnection:
        opened = asyncio.get_running_loop().create_future()
        self._tx.put_nowait((opened, self._open))
        try:
            await opened
        except BaseException:
            await self.close()
            raise
        return self

    def _open(self) -> None:
        self._connection = self._connector()  # here, in its thread, so that `close` finds it in any case

    def stop(self) -> asyncio.Future[Any] | None:
        """Close the connection in its thread after all that is queued; return a future that is done afterwards."""
        if self._closed is None:
            self._closed = super().stop()  # pyright: ignore[reportUnknownMemberType]
        return None if self._closed is None else asyncio.shield(self._closed)

    async def close(self) -> None:
        """Close the connection, and wait for that."""
        if (closed := self.stop()) is not None:
            await closed


def _work(queue: _Queue) -> None:
    """Run the functions that are queued for a connection until it is closed, also for a loop that has ended."""
    result: Any = None
    while result is not _STOP_RUNNING_SENTINEL:
        future, function = queue.get()
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001  it is the caller's
            result, error = None, raised
        if future is not None:
            with suppress(RuntimeError):  # the loop is closed
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # nobody waits for it any more
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


async def connect_async(*arguments: Any, **options: Any) -> aiosqlite.Connection:
    """Open a connection for SQLAlchemy."""
    return await _AsyncConnection(partial(sqlite3.connect, *arguments, **options))


def configure(engine: Engine) -> None:
    """Configure an engine: pragmas for its connections, how transactions begin, and the check of the file."""

    @event.listens_for(engine, "do_connect")
    def on_do_connect(dialect: Any, record: Any, arguments: Any, options: Any) -> None:  # pyright: ignore[reportUnusedFunction]  a listener
        path = str(arguments[0])
        record.info[_OPEN_FILE] = _OpenFile(path, _file_id(path))
        if dialect.is_async:
            options["async_creator_fn"] = connect_async

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: Any) -> None:  # pyright: ignore[reportUnusedFunction]  a listener
        # The driver must not begin transactions by itself: it would begin them deferred, and a writer that
        # read first could then find the database locked with no way to wait.
        connection.isolation_level = None
        _set_pragmas(connection)
        record.info[_OPEN_FILE].connected()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]  a listener
        opened: _OpenFile = connection.info[_OPEN_FILE]
        opened.check(connection)
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def require_file(_dialect: Any, _record: Any, arguments: Any, _options: Any) -> None:
    """Raise `FileMissing` where connecting would make a new file; a listener."""
    path = str(arguments[0])
    # A missing folder is another fault, of which SQLite itself tells.
    if not Path(path).exists() and Path(path).parent.is_dir():
        raise FileMissing


def enforce_foreign_keys(connection: Any, _record: Any) -> None:
    """Enforce foreign keys on a new connection; a listener."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def is_busy(error: object) -> bool:
    """Whether an error says that another program has locked the database."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _set_pragmas(connection: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    _switch_to_wal(cursor)
    cursor.execute("PRAGMA schema_version")  # which opens the write-ahead log
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _switch_to_wal(cursor: Any) -> None:
    """Switch the database to WAL mode, and wait for other programs that do so at the same time.

    SQLite switches a new file in a transaction that reads before it writes, where its busy timeout does not apply.
    Programs that open a new file at the same time would find it locked. Instead, each waits for the other's transaction
    as a writer does, and tries again.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        else:
            return
        cursor.execute("BEGIN EXCLUSIVE")
        cursor.execute("ROLLBACK")


def _log_of(path: str) -> str:
    return f"{path}-wal"


def _file_id(path: str) -> _FileId | None:
    try:
        return _id_of(os.stat(path))  # noqa: PTH116  at the beginning of each transaction
    except OSError:
        return None


def _id_of(stat: os.stat_result) -> _FileId:
    return stat.st_dev, stat.st_ino
