"""`Gathered`: statements of handlers that wait to be sent together; `GatheringConnection`: what handlers get instead.

A statement that only writes is kept, and its handler goes on. Whatever reads, and whatever else reaches the database,
is preceded by all that was kept, so it sees what it would have seen. Where that does not do, everything since the batch
began is undone and its handlers run again: at once for a result that is asked for after all, and statement by statement
when the database refused one, so that the error is raised where it belongs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from sqlalchemy import CursorResult, event
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import await_only, greenlet_spawn

from eventjet.sql.dialect import dialect_named, is_transient
from eventjet.sql.rendering import ROWS_MAX, rendered
from eventjet.sql.together import Last, Run
from eventjet.writers.driver import is_over

_BYTES_MAX = 1 << 20
"""Text and bytes that wait, about."""
_WAIT_S = 0.05
"""How long the database may hear nothing for statements that wait: it ends a transaction that is idle."""
KNOWN_MAX = 1_000
"""Statements of which it is remembered that their results are asked for; beyond, all are executed one by one."""
_UNCHANGING = frozenset(
    {type(None), bool, int, float, str, bytes, Decimal, datetime, date, clock_time, timedelta, UUID}
)
"""Types of values that stay as they are."""
_GATHERED = "eventjet_gathered"
"""Among what SQLAlchemy keeps beside a connection."""
_MARK: Run = ("savepoint eventjet_batch", None)
_UNDO: Run = ("rollback to savepoint eventjet_batch", None)


class RunAgain(Exception):
    """The handlers of a batch have to run again; what they did since it began is to be undone."""


class Gathered:
    """Of one connection and one batch at a time, begun by `begin`. Used by one task at a time."""

    def __init__(self, connection: AsyncConnection, asked: set[str], allows: Callable[[Any], bool]) -> None:
        """`asked` are texts of statements that are never kept; `allows` says of a statement whether it may be."""
        sync = connection.sync_connection
        assert sync is not None
        self.sync = sync
        self.fault: DBAPIError | None = None
        """Why the connection, a lock or the server failed while statements were sent."""
        self.must_run_again = self.was_refused = False
        """Why `RunAgain` was raised, whatever the handler made of it: for either reason, or for the second one."""
        self.was_cut = False
        """Whether a timeout or a cancellation ended the wait for what was sent: what was executed is not known."""
        self.driver: Any = None
        """The driver's connection, which SQLAlchemy may replace."""
        self._asked = asked
        self._allows = allows
        self._asked_alone: set[str] = set()
        """Statements that were refused together with others, and may not have been the cause."""
        self._dialect = dialect_named(sync.dialect.name)
        self._waiting: list[Run] = []
        self._rows = self._bytes = 0
        self._is_marked = self._is_together = self._is_bypassed = False
        self._heard_at = 0.0
        event.listen(sync, "before_cursor_execute", self._before)
        # Of the engine alone; SQLAlchemy keeps one of the same listeners.
        event.listen(sync.engine, "do_execute", _execute_with_what_waits)

    def begin(self, *, together: bool) -> None:
        """Start a batch; not `together`, every statement is executed when its handler says so."""
        self.end()
        self.fault, self.must_run_again, self.was_refused, self._is_marked = None, False, False, False
        self.was_cut = False
        self._is_together = together
        self._heard_at = time.monotonic()
        if together:
            self.sync.info[_GATHERED] = self

    def end(self) -> None:
        """The batch has been sent, or given up."""
        self._waiting, self._rows, self._bytes, self._is_together = [], 0, 0, False
        if not self.sync.closed and not self.sync.invalidated:
            self.sync.info.pop(_GATHERED, None)

    @property
    def takes(self) -> bool:
        """Whether statements are kept now: not in a savepoint of a handler, which is for what may fail."""
        if not self._is_together or self._is_bypassed or len(self._asked) >= KNOWN_MAX:
            return False
        return not self.sync.in_nested_transaction()

    @property
    def is_due(self) -> bool:
        """Whether what waits should wait no longer."""
        return bool(self._waiting) and (
            self._rows >= ROWS_MAX or self._bytes > _BYTES_MAX or time.monotonic() - self._heard_at > _WAIT_S
        )

    def keep(self, statement: Any, parameters: Any) -> Unread | None:
        """Keep a statement; None when it has to be executed at once."""
        if not self._allows(statement):
            return None
        try:
            found = rendered(self.sync, statement, parameters)
            if found is not None:
                found = found[0], [_frozen(row) for row in found[1]]
        except Exception:  # noqa: BLE001 - executed at once it raises the same, as SQLAlchemy words it
            return None
        if found is None or found[0] in self._asked:
            return None
        text, rows = found
        last, known = self._waiting[-1] if self._waiting else ("", None)
        if known is None or last != text:
            known = list[Any]()
            self._waiting.append((text, known))
        known.extend(rows)
        self._rows += len(rows)
        self._bytes += sum(map(_size, rows))
        return Unread(self, text)

    async def send(self) -> None:
        """Execute what waits; raises `RunAgain` when the database, or its driver, refused anything of it.

        Raises `DBAPIError` for a fault of the connection, of a lock or of the server.
        """
        if self._waiting and not self.must_run_again:
            await self._execute(self._taken(), None)

    async def give_way(self, *, for_good: bool = False) -> None:
        """Send what waits, before something that is not seen from here; `for_good`, nothing is kept any more."""
        self._is_bypassed = self._is_bypassed or for_good
        if self._precedes:
            await self._execute(self._taken(), None)

    async def undo(self) -> None:
        """Undo what the handlers of the batch have done; raises `DBAPIError`."""
        self._waiting = []
        while (nested := self.sync.get_nested_transaction()) is not None:
            await greenlet_spawn(nested.rollback)
        if self._is_marked:
            await self._execute([_UNDO], None)

    def ask(self, text: str) -> None:
        """A result is asked for that is not there: from now on the statement is executed at once."""
        self._asked.add(text)
        self.must_run_again = self.must_run_again or self._is_together

    def _taken(self) -> list[Run]:
        """What waits, after the mark to which `undo` goes back."""
        taken = self._waiting if self._is_marked else [_MARK, *self._waiting]
        self._waiting, self._rows, self._bytes, self._is_marked = [], 0, 0, True
        return taken

    @property
    def _precedes(self) -> bool:
        """Whether something has to precede a statement that is executed at once: the mark, even if nothing waits."""
        return self._is_together and (not self._is_marked or (bool(self._waiting) and not self.must_run_again))

    def _before(self, _connection: Any, cursor: Any, text: str, _parameters: Any, context: Any, many: bool) -> None:
        can_be_last = not many and not context.no_parameters and self._dialect.can_be_last(cursor)
        if self._precedes and (not can_be_last or text in self._asked_alone):
            await_only(self._execute(self._taken(), None))
        self._heard_at = time.monotonic()

    def execute_last(self, last: Last) -> bool:
        """Execute what waits and a statement whose result is wanted; False when that has to be executed by itself."""
        if not self._precedes or not self._dialect.can_be_last(last.cursor):
            return False
        await_only(self._execute(self._taken(), last))
        return True

    async def _execute(self, runs: list[Run], last: Last | None) -> None:
        if is_over(self.driver):
            raise InvalidRequestError("The transaction is over, so what waited to be executed is not")
        try:
            await self._dialect.send_together(self.driver, runs, last)
        except Exception as error:
            dbapi: Any = self.sync.dialect.dbapi
            if isinstance(error, dbapi.Error):
                text, given = (None, None) if last is None else (last.text, last.parameters)
                told = DBAPIError.instance(
                    text, given, error, dbapi.Error, hide_parameters=True, dialect=self.sync.dialect
                )
                if isinstance(told, DBAPIError) and is_transient(told):
                    self.fault = self.fault or told
                    raise told from error
            self.must_run_again = self.was_refused = True
            if last is not None and len(self._asked_alone) < KNOWN_MAX:
                self._asked_alone.add(last.text)
            raise RunAgain from error
        except BaseException:
            self.was_cut = True
            raise
        self._heard_at = time.monotonic()


def _execute_with_what_waits(cursor: Any, text: str, parameters: Any, context: Any) -> bool:
    """A listener to `do_execute`: True when that was done."""
    gathered = context.root_connection.info.get(_GATHERED)
    return gathered is not None and gathered.execute_last(Last(cursor, text, parameters))


def _values(row: Any) -> Iterable[Any]:
    return cast("Any", row).values() if isinstance(row, dict) else row


def _size(row: Any) -> int:
    return sum(len(value) for value in _values(row) if isinstance(value, str | bytes))


def _frozen(row: Any) -> Any:
    """The row as it is now: its handler may go on to change a list or a document that it has given."""
    return row if all(type(value) in _UNCHANGING for value in _values(row)) else deepcopy(row)


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

    def __next__(self) -> Any:
        return self.__getattr__("fetchone")

    def __enter__(self) -> Any:
        return self.__getattr__("rowcount")

    def __exit__(self, *_: object) -> None:
        """Never entered."""


class GatheringConnection(AsyncConnection):
    """Hands what handlers execute to `Gathered`; all else is as before."""

    def __init__(self, connection: AsyncConnection, gathered: Gathered) -> None:
        super().__init__(connection.engine, connection.sync_connection)
        self._gathered = gathered

    async def execute(
        self, statement: Any, parameters: Any = None, *, execution_options: Any = None
    ) -> CursorResult[Any]:
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
        await self._gathered.give_way(for_good=True)
        return await super().get_raw_connection()

    async def run_sync(self, fn: Any, *arg: Any, **kw: Any) -> Any:
        """What it runs may reach for the driver's connection."""
        await self._gathered.give_way()
        return await super().run_sync(fn, *arg, **kw)
