"""The shadow on PostgreSQL: declared names in a schema of the run's own, swapped in by `SET SCHEMA` both ways."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Engine,
    Enum,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    func,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import AddConstraint, CreateIndex, CreateTable

from eventjet import failpoints
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import decided, runs
from eventjet.rebuild.decided import Remembered, remembered
from eventjet.rebuild.load import LEDGER, Target
from eventjet.rebuild.obstacles import check_obstacles
from eventjet.rebuild.refused import breaker_of_check, refusals
from eventjet.rebuild.run_schema import RunSchema, drop_schemas, end_sessions
from eventjet.rebuild.shadow import TAIL_MAX, NotYet, Swapped, check_kept
from eventjet.sql import checkpoint, transitions
from eventjet.sql.checkpoint import DECLARED, Checkpoint, revisions
from eventjet.sql.database import Database
from eventjet.sql.location_assignment import create_tables
from eventjet.sql.locations import located, recorded
from eventjet.sql.postgres_tables import LOCKED, Found, bound_waits, default_schema, find, inherit, lock_table, move

_ALIVE = "eventjet-run-"


class PostgresShadow:
    """See the module. `oid` and schema of the live table are looked up when it is created and again at the swap."""

    def __init__(self, database: Database, resolved: ResolvedProjection, run: str) -> None:
        self.resolved = resolved
        self.run = run
        self._schemas = RunSchema(database, run)
        self.schema = self._schemas.schema
        self._old = self._schemas.old
        self._purpose = self._schemas.purpose
        self._engine = database.sync_engine(self._purpose)
        self._remembered: Remembered | None = None
        self._quote = self._engine.dialect.identifier_preparer.quote_identifier
        self.table = located(resolved.table, self.schema, POSTGRESQL)
        self.target = Target(
            run=run,
            purpose=self._purpose,
            projection=resolved.name,
            revision=resolved.revision,
            database=database,
            schema=self.schema,
            table=self.table.name,
            columns=tuple(column.name for column in self.table.columns),
        )

    def create(self, *, to_swap: bool = True) -> None:
        with self._engine.begin() as connection:
            create_tables(connection, [self.resolved] if to_swap else ())
            if to_swap:
                self.check_swappable(connection)
            create_enums(connection, self.resolved.table)
            runs.open_run(connection, self.run, self.resolved)
        failpoints.reach("rebuild.announced")
        with self._engine.begin() as connection:
            for schema in (self.schema, self._old):
                connection.execute(text(f"create schema {self._quote(schema)}"))
            connection.execute(CreateTable(_bare(self.table)))
            for own in ("eventjet_projection", LEDGER, decided.TABLE):
                connection.execute(
                    text(f"create unlogged table {self._quote(self.schema)}.{own} (like {own} including all)")
                )

    def check_swappable(self, connection: Connection) -> None:
        live, _ = self._live(connection)
        check_obstacles(connection, self.resolved, self.table, live.oid if live else None)

    def remember(self) -> None:
        engine = self._engine.execution_options(isolation_level="REPEATABLE READ")
        with engine.begin() as connection:
            run = running(connection)
            decided.copy(run, decided.TABLE, self._own_quarantine(), self.resolved)
            self._remembered = remembered(run, decided.TABLE, self.resolved)
        self.target = replace(self.target, known=self._remembered.known)

    def copy_live(self) -> Checkpoint | None:
        engine = self._engine.execution_options(isolation_level="REPEATABLE READ")
        with engine.begin() as connection:
            found = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
            live, _ = self._live(connection)
            if found is None or not found.log or live is None:
                return None
            columns = ", ".join(map(self._quote, self.target.columns))
            name = live.quoted(connection)
            connection.execute(text(f"create unlogged table {self.copied()} as select {columns} from {name}"))
            if self.resolved.quarantines:
                found_there = remembered(running(connection), decided.TABLE, self.resolved)
                self.target = replace(self.target, known=found_there.known)
            return found

    def copied(self) -> str:
        return f"{self._quote(self.schema)}.{self._quote('eventjet_live')}"

    def made(self) -> str:
        return self._qualified(self.schema)

    def count(self) -> int:
        with self._engine.begin() as connection:
            return connection.scalar(select(func.count()).select_from(self.table)) or 0

    def finish(self) -> None:
        name = self._qualified(self.schema)
        with self._engine.begin() as connection:
            connection.execute(text(f"alter table {name} set logged"))
            for constraint in sorted(self.table.constraints, key=lambda one: not isinstance(one, PrimaryKeyConstraint)):
                if isinstance(constraint, CheckConstraint):
                    broken = partial(breaker_of_check, connection, self.table, constraint)
                    with refusals(self.resolved.name, broken), connection.begin_nested():
                        connection.execute(AddConstraint(constraint))
                elif isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint):
                    with refusals(self.resolved.name):
                        connection.execute(AddConstraint(constraint))
            for index in sorted(self.table.indexes, key=lambda one: str(one.name)):
                with refusals(self.resolved.name):
                    connection.execute(CreateIndex(index))
            failpoints.reach("rebuild.keys_made")
        with self._engine.begin() as connection:
            connection.execute(text(f"analyze {name}"))

    def engine(self) -> Engine:
        """The run's schema comes first, so eventjet's own tables are found there; the rest serves types only."""
        return self._schemas.database(self._engine).sync_engine(self._purpose)

    def live_checkpoint(self) -> Checkpoint | None:
        with self._engine.begin() as connection:
            return checkpoint.read(connection, self.resolved.name, self.resolved.revision)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Swapped | NotYet:
        try:
            with self._engine.begin() as connection:
                bound_waits(connection)
                return self._swap(connection, log, tail)
        except StepBackError as back:
            return NotYet(str(back))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in LOCKED:
                raise
            return NotYet("another transaction holds the table or its checkpoint")

    def _swap(self, connection: Connection, log: str, tail: Callable[[int], None] | None) -> Swapped:
        """Locks are taken in the order in which a worker's one statement takes them: table first, then checkpoint.

        Up to the last step the table's lock keeps writers out and lets readers in.
        """
        runs.hold(connection, self.run)
        live_table, location = self._live(connection)
        if live_table is not None:
            lock_table(connection, live_table, "exclusive")
        live = locked(connection, self.resolved)
        check_kept(self.resolved, live)
        if self._live(connection) != (live_table, location):
            raise StepBackError("its table was swapped or moved meanwhile")
        position = live.position
        own = self._schemas.checkpoint(connection, self.resolved)
        if tail is not None and own.position < position:
            if position - own.position > TAIL_MAX:
                raise StepBackError(f"the live read model is {position - own.position} events ahead")
            tail(position)
            own = self._schemas.checkpoint(connection, self.resolved)
        assert tail is None or own.position >= position
        before = None if tail is None else self._remembered
        decided.give_back(running(connection), self._own_quarantine(), decided.TABLE, self.resolved, before)
        schema = location or self.resolved.table.schema or default_schema(connection)
        if live_table is not None:
            schema = live_table.schema
            check_obstacles(connection, self.resolved, self.table, live_table.oid)
            lock_table(connection, live_table, "access exclusive")
            inherit(connection, live_table.oid, self._qualified(self.schema))
            move(connection, live_table, self._old)
        connection.execute(text(f"alter table {self._qualified(self.schema)} set schema {self._quote(schema)}"))
        return advance(connection, self.resolved, live, own, log)

    def interrupt(self) -> None:
        self._schemas.interrupt()

    def drop(self) -> None:
        self._schemas.drop()

    def _live(self, connection: Connection) -> tuple[Found | None, str]:
        """(the live table, its location); None when there is none, as before the first worker of an older eventjet."""
        held = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
        location = held.location if held else DECLARED
        return find(connection, self.resolved.table.schema, self.resolved.table.name, location), location

    def _own_quarantine(self) -> str:
        return f"{self._quote(self.schema)}.{decided.TABLE}"

    def _qualified(self, schema: str) -> str:
        return f"{self._quote(schema)}.{self._quote(self.table.name)}"


class StepBackError(Exception):
    """Roll the swap back and try it again later."""


@contextmanager
def claimed(database: Database, run: str) -> Generator[None]:
    """Hold what tells other processes that this run's process lives: a lock of a session."""
    engine = database.sync_engine("eventjet rebuild")
    with engine.connect() as connection:
        connection.execute(text("select pg_advisory_lock(hashtextextended(:run, 0))"), {"run": _ALIVE + run})
        connection.commit()
        yield


def clear_abandoned(database: Database) -> list[str]:
    """Drop the shadows of runs whose lease has ended or whose process is gone; return their names."""
    engine = database.sync_engine("eventjet rebuild")
    quote = engine.dialect.identifier_preparer.quote_identifier
    with engine.begin() as connection:
        create_tables(connection)
        found = runs.known_runs(connection)
    cleared: list[str] = []
    for run, ended in found:
        # What its tasks are still writing would have to be waited for.
        with suppress(SQLAlchemyError), engine.begin() as connection:
            if is_free(connection, run) or ended:
                end_sessions(connection, f"eventjet rebuild {run}")
                drop_schemas(connection, run, quote)
                runs.close_run(connection, run)
                cleared.append(run)
    return cleared


def running(connection: Connection) -> decided.Run:
    return lambda statement, values: connection.execute(text(statement), values)


def is_free(connection: Connection, run: str) -> bool:
    """Whether the run's process is gone; if so nobody else will find that out until this transaction ends."""
    query = text("select pg_try_advisory_xact_lock(hashtextextended(:run, 0))")
    return bool(connection.scalar(query, {"run": _ALIVE + run}))


def drop_run(database: Database, run: str) -> None:
    """Remove what is left of a run that is over."""
    engine = database.sync_engine("eventjet rebuild")
    with engine.begin() as connection:
        drop_schemas(connection, run, engine.dialect.identifier_preparer.quote_identifier)


def locked(connection: Connection, resolved: AnyResolved) -> Checkpoint:
    """This revision's checkpoint, locked with those of the others, which may be about to exchange places with it."""
    found = revisions(connection, resolved.name, lock=True)
    return next(one for one in found if one.revision == resolved.revision)


def advance(connection: Connection, resolved: AnyResolved, live: Checkpoint, own: Checkpoint, log: str) -> Swapped:
    """The live checkpoint says what the shadow's does, and whoever held it is deposed."""
    transitions.swap_in(connection, live, own, log, recorded(resolved))
    failpoints.reach("rebuild.inside_swap")
    return Swapped(own.position, live.generation + 1, live.location)


def _bare(table: Table) -> Table:
    """Columns only, and unlogged: keys and indexes are cheaper made at once, after the load."""
    columns: list[Column[Any]] = []
    for column in table.columns:
        default: Any = column.server_default
        columns.append(
            Column(
                column.name,
                column.type,
                key=column.key,
                nullable=column.nullable,
                server_default=getattr(default, "arg", None),
                comment=column.comment,
            )
        )
    return Table(table.name, MetaData(), *columns, schema=table.schema, prefixes=["UNLOGGED"])


def create_enums(connection: Connection, declared: Table) -> None:
    for column in declared.columns:
        if isinstance(column.type, Enum) and column.type.native_enum:
            column.type.create(connection, checkfirst=True)
