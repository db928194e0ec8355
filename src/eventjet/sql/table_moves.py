"""`Exchange` moves tables out of a location and others of the same names into it, in the caller's transaction.

Readers see either table, never none. Promotions use it, and on PostgreSQL the swaps of rebuilds.
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
from eventjet.sql.database import dialect_of
from eventjet.sql.dialect import Fault, Feature, TableName, TableRef

T = TypeVar("T")

_PAUSE_S = 0.3
UNDECLARED_REMEDY = "Declare it on the table as it is, or drop it, or have a migration make it as it is declared."
_CAST = re.compile(
    r"""::(?:"[^"]*"|[a-z_][\w.]*)+(?: varying| precision)?(?:\([\d, ]+\))?(?: with(?:out)? time zone)?(?:\[\])*"""
    "|[()']"
)
"""A cast in a definition, and the parentheses and quotes that the database adds because of it."""


class NotNow(Exception):
    """Nothing was changed, and another try may succeed soon: a lock was not granted, or another change came first."""


@dataclass(frozen=True, slots=True)
class Move:
    """The change of one table's location, from `before` to `after`."""

    name: TableName
    before: str
    after: str | None
    """The new location; None for a table that is dropped."""


class Exchange:
    """Tables that leave a location, and tables that come into it.

    Call `lock` or `lock_leaving`, then `look_again`, check what may forbid the exchange, then call `carry_out`. The
    caller locks the checkpoints in between: see `lock_as_workers`.
    """

    def __init__(self, connection: Connection, leaving: Sequence[Move], coming: Sequence[Move]) -> None:
        self.connection = connection
        self._dialect = dialect_of(connection)
        self._leaving_moves, self._coming_moves = leaving, coming
        self.leaving: Mapping[TableName, TableRef] = {}
        """The leaving tables that exist, once they are locked."""
        self.coming: Mapping[TableName, TableRef] = {}

    def lock_leaving(self) -> None:
        """Lock the leaving tables against writers, but not against readers."""
        self.leaving, self.coming = self._find(self._leaving_moves), self._find(self._coming_moves)
        self._dialect.lock(self.connection, self.leaving.values(), readers=True)

    def lock(self) -> None:
        """Lock the leaving and the coming tables against writers, but not against readers."""
        self.lock_leaving()
        self._dialect.lock(self.connection, self.coming.values(), readers=True)

    def look_again(self) -> None:
        """Raise `NotNow` when the tables are no longer those that were locked: another exchange may have moved them."""
        if (self._find(self._leaving_moves), self._find(self._coming_moves)) != (self.leaving, self.coming):
            raise NotNow("its tables were swapped or moved meanwhile")

    def carry_out(self) -> None:
        """Lock readers out, let coming tables inherit, move or drop the leaving ones, and move the coming ones in."""
        connection, dialect = self.connection, self._dialect
        leaving = [(move, self.leaving[move.name]) for move in self._leaving_moves if move.name in self.leaving]
        dialect.lock(connection, (*self.leaving.values(), *self.coming.values()), readers=False)
        for name, table in self.coming.items():
            if name in self.leaving:
                dialect.inherit(connection, self.leaving[name], table)
        dialect.drop(connection, [table for move, table in leaving if move.after is None])
        for move, table in leaving:
            if move.after is not None:
                dialect.ensure_location(connection, move.after)
                dialect.move(connection, table, move.name, move.after, None)
        for move in self._coming_moves:
            replaced = self.leaving.get(move.name)
            assert move.after is not None, "what comes stays"
            schema = replaced.schema if replaced else None
            dialect.move(connection, self.coming[move.name], move.name, move.after, schema)

    def _find(self, moves: Sequence[Move]) -> dict[TableName, TableRef]:
        """Return the tables of these moves that exist where they are before."""
        tables = {move.name: self._dialect.find_table(self.connection, move.name, move.before) for move in moves}
        return {name: table for name, table in tables.items() if table is not None}


def dependents(connection: Connection, tables: Mapping[TableName, TableRef], *, for_good: bool = False) -> list[str]:
    """Return, as text, what depends on tables and is lost if they move or (`for_good`) are dropped; only reads."""
    along, dialect = list(tables.values()), dialect_of(connection)
    return [
        f"{dependent} on {name[1]}"
        for name, table in tables.items()
        for dependent in dialect.dependents(connection, table, along, for_good=for_good)
    ]


def undeclared(old: Iterable[Feature], new: Iterable[Feature]) -> list[str]:
    """Return, as text, the features of an old table that the new one lacks and that cannot be carried over.

    A feature also cannot be carried over when it needs another one of a name that the new table lacks: the comment of a
    constraint, where the constraint has another name. A feature of the same kind with the same definition stands for
    it; one of the same name with another definition does not. Where columns get other types, the casts that the
    database writes into definitions do not count.
    """
    old, new_features = list(old), {feature.key: feature for feature in new}
    retyped = any(feature.key.startswith("type ") and feature.key not in new_features for feature in old)

    def identity(feature: Feature) -> tuple[str, str]:
        definition = _CAST.sub("", feature.definition) if retyped else feature.definition
        return (feature.key.partition(" ")[0], definition) if definition else (feature.key, "")

    identities = {identity(feature) for feature in new_features.values()}
    return [
        _in_words(feature, new_features.get(feature.key))
        for feature in old
        if feature.words
        and (feature.carried is None or (feature.needs and feature.needs not in new_features))
        and identity(feature) not in identities
    ]


def _in_words(feature: Feature, declared: Feature | None) -> str:
    if declared is None:
        return feature.words
    return f"{feature.words} (its definition `{feature.definition}` differs from the declared `{declared.definition}`)"


def lock_as_workers(
    connection: Connection,
    resolved: AnyResolved,
    tables: Callable[[], None],
    checkpoints: Callable[[], list[Checkpoint]],
) -> list[Checkpoint]:
    """Lock tables and checkpoints in the order of the projection's workers, so that no deadlock arises.

    The single statement of a fold locks its table before the checkpoint's row. A SQL projection locks its checkpoint
    first, and keeps it locked while handlers run. Returns the checkpoints.
    """
    if isinstance(resolved, ResolvedSql):
        waits = dialect_of(connection).bound_waits
        waits(connection, patient=True)
        locked = checkpoints()
        waits(connection)
        tables()
        return locked
    tables()
    return checkpoints()


def retried(attempt: Callable[[], T], patience_s: float = 60.0) -> T:
    """Call `attempt` again while it raises `NotNow`, for `patience_s` seconds; then raises `NotNow`. Blocks."""
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
    """Wait for no lock longer than readers may be kept waiting; raises `NotNow` instead."""
    dialect = dialect_of(connection)
    dialect.bound_waits(connection)
    try:
        yield
    except DBAPIError as error:
        if Fault.LOCKED_OUT not in dialect.faults(error):
            raise
        raise NotNow("another transaction holds, or has begun to use, one of the tables or checkpoints") from error
