"""`Gathered`: statements of handlers that wait to be sent together; `GatheringConnection`: what handlers get instead.

A statement that only writes is kept, and its handler goes on. Whatever reads, and whatever else reaches the database,
is preceded by all that was kept, so it sees what it would have seen. Where that does not do, everything since the batch
began is undone and its handlers run again: at once for a result that is asked for after all, and statement by statement
when the database refused one, so that the error is raised where it belongs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from sqlalchemy import CursorResult, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import await_only

from eventjet.sql.dialect import dialect_named, is_transient
from eventjet.sql.rendering import ROWS_MAX, rendered
from eventjet.sql.together import Run

_BYTES_MAX = 1 << 20
"""Text and bytes that wait, about."""
_WAIT_S = 0.05
"""How long the database may hear nothing for statements that wait: it ends a transaction that is idle."""
_KNOWN_MAX = 1_000
"""Statements of which it is remembered that their results are asked for; beyond, all are executed one by one."""
_MARK: Run = ("savepoint eventjet_batch", None)
_UNDO: Run = ("rollback to savepoint eventjet_batch", None)


class RunAgain(Exception):
    """The handlers of a batch have to run again; what they did since it began is to be undone."""


class Gathered:
    """Of one connection and one batch at a time, begun by `begin`. Used by one task at a time."""

    def __init__(
        self, connection: AsyncConnection, driver: Any, asked: set[str], allows: Callable[[Any], bool]
    ) -> None:
        """`asked` are texts of statements that are never kept; `allows` says of a statement whether it may be."""
        sync = connection.sync_connection
        assert sync is not None
        self.sync = sync
        self.fault: DBAPIError | None = None
        """Why the connection, a lock or the server failed while statements were sent."""
        self.must_run_again = False
        self._driver = driver
        self._asked = asked
        self._allows = allows
        self._dialect = dialect_named(sync.dialect.name)
        self._waiting: list[Run] = []
        self._rows = self._bytes = 0
        self._is_marked = self._is_together = False
        self._heard_at = 0.0
        event.listen(sync, "before_cursor_execute", self._send_first)

    def begin(self, *, together: bool) -> None:
        """Start a batch; not `together`, every statement is executed when its handler says so."""
        self._waiting, self._rows, self._bytes = [], 0, 0
        self.fault, self.must_run_again, self._is_marked, self._is_together = None, False, False, together
        self._heard_at = time.monotonic()

    def end(self) -> None:
        """The batch has been sent, or given up."""
        self.begin(together=False)

    @property
    def takes(self) -> bool:
        """Whether statements are kept now: not in a savepoint of a handler, which is for what may fail."""
        return self._is_together and not self.sync.in_nested_transaction() and len(self._asked) < _KNOWN_MAX

    @property
    def is_due(self) -> bool:
        """Whether more should not wait."""
        return bool(self._waiting) and (
            self._rows >= ROWS_MAX
            or self._bytes > _BYTES_MAX
            or time.monotonic() - self._heard_at > _WAIT_S
        )

    def keep(self, statement: Any, parameters: Any) -> Unread | None:
        """Keep a statement; None when it has to be executed at once."""
        if not self._allows(statement):
            return None
        try:
            found = rendered(self.sync, statement, parameters)
        except Exception:  # noqa: BLE001 - executed at once it raises the same, as SQLAlchemy words it
            return None
        if found is None or found[0] in self._asked:
            return None
        text, rows = found
        if self._waiting and self._waiting[-1][0] == text:
            self._waiting[-1][1].extend(rows)  # type: ignore[union-attr]
        else:
            self._waiting.append((text, list(rows)))
        self._rows += len(rows)
        for row in rows:
            for value in row.values() if isinstance(row, dict) else row:
                if isinstance(value, str | bytes):
                    self._bytes += len(value)
        return Unread(self, text)

    async def send(self) -> None:
        """Execute what waits; raises `RunAgain` when the database, or its driver, refused anything of it.

        Raises `DBAPIError` for a fault of the connection, of a lock or of the server.
        """
        if not self._waiting or self.must_run_again:
            return
        await self._execute(self._waiting if self._is_marked else [_MARK, *self._waiting])

    async def undo(self) -> None:
        """Undo what the handlers of the batch have done; raises `DBAPIError`."""
        while (nested := self.sync.get_nested_transaction()) is not None:
            await _in_greenlet(nested.rollback)
        if self._is_marked:
            self.must_run_again = False
            await self._execute([_UNDO])

    def ask(self, text: str) -> None:
        """A result is asked for that is not there: from now on the statement is executed at once."""
        self._asked.add(text)
        self.must_run_again = self.must_run_again or self._is_together

    def _send_first(self, *_: Any) -> None:
        # Marked whatever comes: a statement that is executed at once has to be undone as well.
        if self._is_together and not (self._waiting or self._is_marked):
            await_only(self._execute([_MARK]))
        elif self._waiting:
            await_only(self.send())

    async def _execute(self, runs: list[Run]) -> None:
        self._waiting, self._rows, self._bytes = [], 0, 0
        self._is_marked = True
        try:
            await self._dialect.send_together(self._driver, runs)
        except Exception as error:
            dbapi: Any = self.sync.dialect.dbapi
            if isinstance(error, dbapi.Error):
                told = DBAPIError.instance(None, None, error, dbapi.Error, dialect=self.sync.dialect)
                if isinstance(told, DBAPIError) and is_transient(told):
                    self.fault = self.fault or told
                    raise told from error
            self.must_run_again = True
            raise RunAgain from error
        self._heard_at = time.monotonic()


class Unread:
    """The result of a statement that was not sent yet. Whoever asks it anything is told the truth the next time."""

    __slots__ = ("_gathered", "_text")

    def __init__(self, gathered: Gathered, text: str) -> None:
        self._gathered = gathered
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._gathered.ask(self._text)
        raise RunAgain(f"`{name}` of a result is asked for, and its statement was not sent yet")

    def __iter__(self) -> Any:
        return self.__getattr__("all")


class GatheringConnection(AsyncConnection):
    """Hands what handlers execute to `Gathered`; all else is as before."""

    def __init__(self, connection: AsyncConnection, gathered: Gathered) -> None:
        super().__init__(connection.engine, connection.sync_connection)
        self._gathered = gathered

    async def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> CursorResult[Any]:
        gathered = self._gathered
        if execution_options is None and gathered.takes:
            kept = gathered.keep(statement, parameters)
            if kept is not None:
                if gathered.is_due:
                    await gathered.send()
                return cast("CursorResult[Any]", kept)
        return await super().execute(statement, parameters, execution_options=execution_options)

    async def get_raw_connection(self) -> Any:
        """Whoever has it passes everything else by."""
        await self._gathered.send()
        return await super().get_raw_connection()


async def _in_greenlet(call: Any) -> None:
    from sqlalchemy.util import greenlet_spawn

    await greenlet_spawn(call)
