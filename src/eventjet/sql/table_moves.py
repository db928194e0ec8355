"""`Exchange`: tables leave their location, and others of the same names may come into it, in the caller's transaction.

Readers see the one or the other, never none. Whatever moves a table is made of it: promotion, reset and retirement of
a revision, and on PostgreSQL the swap of a rebuild.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import Fault
from eventjet.sql.dialects import dialect_of
from eventjet.sql.tables import Feature, TableName, TableRef

T = TypeVar("T")

_PAUSE_S = 0.3
UNDECLARED_REMEDY = "Declare it on the table as it is, or drop it, or have a migration make it as it is declared."
_TYPED = re.compile(
    r"""::(?:"[^"]*"|[a-z_][\w.]*)+(?: varying| precision)?(?:\([\d, ]+\))?(?: with(?:out)? time zone)?(?:\[\])*"""
    "|[()']"
)
"""A cast, and what it has the database put around it."""


class NotNow(Exception):
    """Nothing has changed, and it is to be tried again soon: locks were not to be had, or something else came first."""


@dataclass(frozen=True, slots=True)
class Move:
    """One table's change of location."""

    name: TableName
    before: str
    after: str | None
    """None for one that is dropped."""


class Exchange:
    """Lock, look again, check, carry out: in this order, with the checkpoints locked in between."""

    def __init__(self, connection: Connection, leaving: Sequence[Move], coming: Sequence[Move]) -> None:
        self.connection = connection
        self._tables = dialect_of(connection).tables
        self._moves = leaving, coming
        self.leaving: Mapping[TableName, TableRef] = {}
        """Those that are there."""
        self.coming: Mapping[TableName, TableRef] = {}

    def lock_leaving(self) -> None:
        """Keep the writers of what leaves out, and let readers in."""
        self.look()
        self._tables.lock(self.connection, self.leaving.values(), readers=True)

    def lock(self) -> None:
        """The same, and keep the writers of what comes out."""
        self.lock_leaving()
        self._tables.lock(self.connection, self.coming.values(), readers=True)

    def look(self) -> None:
        """Find the tables."""
        self.leaving, self.coming = map(self._found, self._moves)

    def look_again(self) -> None:
        """Raise `NotNow` when other tables are there than those that were locked.

        What waited for a lock may have waited for another exchange.
        """
        before = self.leaving, self.coming
        self.look()
        if (self.leaving, self.coming) != before:
            raise NotNow("its tables were swapped or moved meanwhile")

    def carry_out(self) -> None:
        """Keep readers out, too; let those that come inherit; then out first, in afterwards."""
        connection, tables = self.connection, self._tables
        leaving, coming = self._moves
        tables.lock(connection, (*self.leaving.values(), *self.coming.values()), readers=False)
        for name, table in self.coming.items():
            if name in self.leaving:
                tables.inherit(connection, self.leaving[name], table)
        tables.drop(connection, [self.leaving[one.name] for one in leaving if self._is_dropped(one)])
        for one in leaving:
            if one.name in self.leaving and one.after is not None:
                tables.ensure_location(connection, one.after)
                tables.move(connection, self.leaving[one.name], one.name, one.after, None)
        for one in coming:
            left = self.leaving.get(one.name)
            assert one.after is not None, "what comes stays"
            tables.move(connection, self.coming[one.name], one.name, one.after, left.schema if left else None)

    def _is_dropped(self, one: Move) -> bool:
        return one.after is None and one.name in self.leaving

    def _found(self, moves: Iterable[Move]) -> dict[TableName, TableRef]:
        looked = {one.name: self._tables.find(self.connection, one.name, one.before) for one in moves}
        return {name: table for name, table in looked.items() if table is not None}


def dependents(connection: Connection, tables: Mapping[TableName, TableRef], *, for_good: bool = False) -> list[str]:
    """What keeps tables from being moved or dropped, in words: it would be lost, or stay with the table that leaves.

    Whatever moves or drops a table asks this before it begins, and again once the tables are locked. Only looks.
    """
    along, dialect = list(tables.values()), dialect_of(connection)
    return [
        f"{one} on {name[1]}"
        for name, table in tables.items()
        for one in dialect.tables.dependents(connection, table, along, for_good=for_good)
    ]


def undeclared(old: Iterable[Feature], new: Iterable[Feature]) -> list[str]:
    """What a table has that the one in its place lacks and that cannot be carried over, in words.

    Nor can what needs a thing of a name that it lacks: where a constraint has another name, its comment.
    One of the same kind with the same definition stands for it, and one of the same name with another does not. Where
    columns get other types, the casts that the database writes into definitions do not count.
    """
    old, named = list(old), {one.key: one for one in new}
    retyped = any(one.key.startswith("type ") and one.key not in named for one in old)

    def identity(one: Feature) -> tuple[str, str]:
        definition = _TYPED.sub("", one.definition) if retyped else one.definition
        return (one.key.partition(" ")[0], definition) if definition else (one.key, "")

    there = {identity(one) for one in named.values()}
    return [
        _in_words(one, named.get(one.key))
        for one in old
        if one.words and (one.carried is None or (one.needs and one.needs not in named)) and identity(one) not in there
    ]


def _in_words(one: Feature, declared: Feature | None) -> str:
    if declared is None:
        return one.words
    return f"{one.words} (its definition `{one.definition}` differs from the declared `{declared.definition}`)"


def lock_as_workers(
    connection: Connection,
    resolved: AnyResolved,
    tables: Callable[[], None],
    checkpoints: Callable[[], list[Checkpoint]],
) -> list[Checkpoint]:
    """Lock both in the order in which a projection's workers do, so that neither waits for the other; the checkpoints.

    The one statement of a fold locks its table before the checkpoint's row; SQL by hand locks its checkpoint first, and
    keeps it while handlers touch whatever they touch.
    """
    if isinstance(resolved, ResolvedSql):
        waits = dialect_of(connection).tables.bound_waits
        waits(connection, patient=True)
        locked = checkpoints()
        waits(connection)
        tables()
        return locked
    tables()
    return checkpoints()


def retried(attempt: Callable[[], T], patience_s: float = 60.0) -> T:
    """Try again for so long where it cannot be carried out now; then raises `NotNow`. Blocks."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return attempt()
        except NotNow:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


@contextmanager
def bounded(connection: Connection) -> Generator[None]:
    """Wait for no lock longer than readers may be kept; raises `NotNow` instead."""
    dialect = dialect_of(connection)
    dialect.tables.bound_waits(connection)
    try:
        yield
    except DBAPIError as error:
        if Fault.LOCKED_OUT not in dialect.faults(error):
            raise
        raise NotNow("another transaction holds, or has begun to use, one of the tables or checkpoints") from error
