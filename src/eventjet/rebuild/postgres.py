"""The shadow on PostgreSQL: declared names in a schema of the run's own, swapped in by `SET SCHEMA` both ways."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
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
    update,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import AddConstraint, CreateIndex, CreateTable

from eventjet.projections import checkpoint
from eventjet.projections.bound import BoundProjection
from eventjet.projections.checkpoint import Checkpoint, create_tables
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.database import Database
from eventjet.projections.own_tables import projections
from eventjet.projections.sql import AnyBound
from eventjet.projections.tables import storage_table
from eventjet.rebuild import runs
from eventjet.rebuild.load import LEDGER, Target
from eventjet.rebuild.obstacles import check_obstacles
from eventjet.rebuild.run_schema import RunSchema, drop_schemas, end_sessions, inherited, live_table
from eventjet.rebuild.shadow import LOCK_TIMEOUT_MS, TAIL_MAX, NotYet, Swapped

LOCKED = ("55P03", "40P01", "57014")
"""SQLSTATEs of a lock that was not to be had: timeout, deadlock, cancelled statement."""
_ALIVE = "eventjet-run-"


class PostgresShadow:
    """See the module. `oid` and schema of the live table are looked up when it is created and again at the swap."""

    def __init__(self, database: Database, bound: BoundProjection, run: str) -> None:
        self.bound = bound
        self.run = run
        self._place = RunSchema(database, run)
        self.schema = self._place.schema
        self._old = self._place.old
        self._purpose = self._place.purpose
        self._engine = database.sync_engine(self._purpose)
        self._quote = self._engine.dialect.identifier_preparer.quote_identifier
        self.table = _shadow_of(bound.table, self.schema)
        self.target = Target(
            run=run,
            purpose=self._purpose,
            projection=bound.name,
            revision=bound.revision,
            database=database,
            schema=self.schema,
            table=self.table.name,
            columns=tuple(column.name for column in self.table.columns),
        )

    def create(self, *, to_swap: bool = True) -> None:
        with self._engine.begin() as connection:
            create_tables(connection)
            if to_swap:
                checkpoint.ensure(connection, self.bound.name, self.bound.revision)
                check_obstacles(connection, self.bound, self.table, self._live(connection)[0])
            create_enums(connection, self.bound.table)
            runs.open_run(connection, self.run, self.bound)
        with self._engine.begin() as connection:
            for schema in (self.schema, self._old):
                connection.execute(text(f"create schema {self._quote(schema)}"))
            connection.execute(CreateTable(_bare(self.table)))
            for own in ("eventjet_projection", LEDGER):
                connection.execute(
                    text(f"create unlogged table {self._quote(self.schema)}.{own} (like {own} including all)")
                )

    def copy_live(self) -> Checkpoint | None:
        engine = self._engine.execution_options(isolation_level="REPEATABLE READ")
        with engine.begin() as connection:
            found = checkpoint.read(connection, self.bound.name, self.bound.revision)
            oid, place = self._live(connection)
            if found is None or oid is None:
                return None
            live = f"{self._quote(place)}.{self._quote(self.table.name)}"
            columns = ", ".join(map(self._quote, self.target.columns))
            connection.execute(text(f"create unlogged table {self.copied()} as select {columns} from {live}"))
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
                if isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint | CheckConstraint):
                    connection.execute(AddConstraint(constraint))
            for index in sorted(self.table.indexes, key=lambda one: str(one.name)):
                connection.execute(CreateIndex(index))
        with self._engine.begin() as connection:
            connection.execute(text(f"analyze {name}"))

    def engine(self) -> Engine:
        """The run's schema comes first, so eventjet's own tables are found there; the rest serves types only."""
        return self._place.database(self._engine).sync_engine(self._purpose)

    def live_checkpoint(self) -> Checkpoint | None:
        with self._engine.begin() as connection:
            return checkpoint.read(connection, self.bound.name, self.bound.revision)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Swapped | NotYet:
        try:
            with self._engine.begin() as connection:
                connection.execute(text(f"set local lock_timeout = {LOCK_TIMEOUT_MS}"))
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
        oid, place = self._live(connection)
        live_table = f"{self._quote(place)}.{self._quote(self.table.name)}"
        if oid is not None:
            connection.execute(text(f"lock table {live_table} in exclusive mode"))
        live, position = lock_revisions(connection, self.bound)
        if self._live(connection) != (oid, place):
            raise StepBackError("another rebuild swapped its table in meanwhile")
        own = self._place.checkpoint(connection, self.bound)
        if tail is not None and own.position < position:
            if position - own.position > TAIL_MAX:
                raise StepBackError(f"the live read model is {position - own.position} events ahead")
            tail(position)
            own = self._place.checkpoint(connection, self.bound)
        assert tail is None or own.position >= position
        if oid is not None:
            check_obstacles(connection, self.bound, self.table, oid)
            connection.execute(text(f"lock table {live_table} in access exclusive mode"))
            for statement in inherited(connection, oid, self._qualified(self.schema)):
                connection.execute(text(statement))
            connection.execute(text(f"alter table {live_table} set schema {self._quote(self._old)}"))
        connection.execute(text(f"alter table {self._qualified(self.schema)} set schema {self._quote(place)}"))
        return advance(connection, live, own, log)

    def interrupt(self) -> None:
        self._place.interrupt()

    def drop(self) -> None:
        self._place.drop()

    def _live(self, connection: Connection) -> tuple[int | None, str]:
        """(oid of the live table, its schema); None and the schema it would be created in when there is none."""
        return live_table(connection, self._quote(self.table.name))

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
            free = connection.scalar(
                text("select pg_try_advisory_xact_lock(hashtextextended(:run, 0))"), {"run": _ALIVE + run}
            )
            if ended or free:
                end_sessions(connection, f"eventjet rebuild {run}")
                drop_schemas(connection, run, quote)
                runs.close_run(connection, run)
                cleared.append(run)
    return cleared


def lock_revisions(connection: Connection, bound: AnyBound) -> tuple[Checkpoint, int]:
    """(this revision's checkpoint, how far the table in use is): every revision that writes to it has to wait."""
    query = select(projections).where(projections.c.name == bound.name).order_by(projections.c.revision)
    found = [Checkpoint(*row) for row in connection.execute(query.with_for_update())]
    used = [one.position for one in found if one.revision == bound.revision or one.state != checkpoint.RETIRED]
    return next(one for one in found if one.revision == bound.revision), max(used)


def advance(connection: Connection, live: Checkpoint, own: Checkpoint, log: str) -> Swapped:
    """The live checkpoint says what the shadow's does, and whoever held it is deposed."""
    takeable = live.state in (checkpoint.NEW, checkpoint.BUILDING, checkpoint.FAILED)
    values: dict[str, Any] = {
        "position": own.position,
        "event_id": own.event_id,
        "log": log,
        "generation": live.generation + 1,
        "epoch": live.epoch + 1,
        "owner": None,
        "lease_until": 0,
    }
    if takeable:
        values |= {"state": checkpoint.ACTIVE, "reason": None}
    connection.execute(update(projections).where(checkpoint.is_row(live.name, live.revision)).values(**values))
    # They were made for the table that has just been replaced.
    others = (projections.c.name == live.name) & (projections.c.revision != live.revision)
    retired = {"state": checkpoint.RETIRED, "epoch": projections.c.epoch + 1, "owner": None, "lease_until": 0}
    connection.execute(update(projections).where(others).values(**retired))
    return Swapped(own.position, live.generation + 1)


def _shadow_of(declared: Table, schema: str) -> Table:
    """The declared table in the run's schema. Names of indexes and enum types are as in the live table's schema."""
    made = storage_table(declared, POSTGRESQL)
    made.schema = schema
    made.fullname = f"{schema}.{made.name}"
    return made


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
