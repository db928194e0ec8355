"""A run on PostgreSQL: declared names in a schema of the run's own, swapped in by `SET SCHEMA` both ways."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

from psycopg import sql
from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Engine,
    Enum,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import AddConstraint, CreateIndex, CreateTable

from eventjet import failpoints
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import runs
from eventjet.rebuild.runs import PURPOSE, RunSpace, Target, columns_alone, refusals, shown
from eventjet.sql.checkpoint import names_of
from eventjet.sql.database import BULK, Database
from eventjet.sql.dialect import qualified, verbatim
from eventjet.sql.exchange import Exchange, Move, bounded
from eventjet.sql.locations import creation, recorded
from eventjet.sql.own_tables import projections, quarantine, rebuilds

_STRANGE_WRITES = text(
    "select schemaname || '.' || relname from pg_stat_xact_user_tables "
    "where n_tup_ins + n_tup_upd + n_tup_del > 0 and schemaname <> :schema and schemaname !~ '^pg_temp' order by 1"
)
_AS_WRITTEN = postgresql.dialect(paramstyle="named")
"""Doubles no percent signs for a driver."""
_LAST_NUMBER = text("select pg_sequence_last_value(to_regclass(pg_get_serial_sequence(:name, :column)))")


class PostgresSpace(RunSpace):
    """Two schemas, of the run's tables and of those they replace."""

    suffixes = ("", "_old")
    copied_as = "unlogged table"

    def __init__(self, database: Database, run: str) -> None:
        self.run = run
        self.database = database
        self.attached = self.location = f"ej_{run}"
        self._purpose = f"{PURPOSE} {run}"
        self.live = database.sync_engine(self._purpose)
        self._replaced = f"ej_{run}_old"
        self._claim = {"claim": f"eventjet-run-{run}"}

    @staticmethod
    def names(connection: Connection, database: Database) -> list[str]:  # noqa: ARG004 - as SQLite's
        return [str(name) for name in connection.scalars(text("select nspname from pg_namespace"))]

    @staticmethod
    def described(database: Database) -> str:  # noqa: ARG004 - as SQLite's
        return "a schema ej_<run>"

    @staticmethod
    def load(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
        """In one transaction with the row in the ledger, which says whether another try has done it already."""
        space = PostgresSpace(target.database, target.run)
        schema = space.location
        ledger = sql.Identifier(schema, rebuilds.name)
        connection = target.database.connect_postgres(space._purpose)
        with refusals(target.projection), connection, connection.cursor() as cursor:
            cursor.execute(
                sql.SQL(
                    "insert into {} (run, part, projection, revision) values (%s, %s, %s, %s) on conflict do nothing"
                ).format(ledger),
                (target.run, number, target.projection, target.revision),
            )
            this_part = (target.run, number)
            if not cursor.rowcount:
                cursor.execute(sql.SQL("select rows from {} where run = %s and part = %s").format(ledger), this_part)
                found = cursor.fetchone()
                assert found is not None
                return int(found[0])
            failpoints.reach("rebuild.part_begun")
            statement = sql.SQL("copy {} ({}) from stdin").format(
                sql.Identifier(schema, target.table), sql.SQL(", ").join(map(sql.Identifier, target.columns))
            )
            count = 0
            with cursor.copy(statement) as copy:
                write_row = copy.write_row
                for row in rows:
                    write_row(row)
                    count += 1
            failpoints.reach("rebuild.rows_copied")
            cursor.execute(
                sql.SQL("update {} set rows = %s where run = %s and part = %s").format(ledger), (count, *this_part)
            )
        failpoints.reach("rebuild.part_loaded")
        return count

    @contextmanager
    def claimed(self) -> Generator[None]:
        with self.database.sync_engine(PURPOSE).connect() as connection:
            connection.execute(text("select pg_advisory_lock(hashtextextended(:claim, 0))"), self._claim)
            connection.commit()
            yield

    def is_claimed(self, connection: Connection) -> bool:
        return not connection.scalar(text("select pg_try_advisory_xact_lock(hashtextextended(:claim, 0))"), self._claim)

    def engine(self) -> Engine:
        """The run's schema comes first, so eventjet's own tables are found there; the rest serves types only."""
        return self._first_in_path().sync_engine(self._purpose)

    def handlers_engine(self) -> AsyncEngine:
        """A shadow whose last batches a crash of the server undoes is made again, so no commit waits for the disk."""
        return self._first_in_path("-c synchronous_commit=off").engine(self._purpose, BULK)

    def create(self, tables: Sequence[Table], *, bare: bool) -> None:
        """Bare ones are unlogged, and have no keys or indexes: those are cheaper made at once, after the load."""
        with self.live.begin() as connection:
            for column in (column for table in tables for column in table.columns):
                if isinstance(column.type, Enum) and column.type.native_enum:
                    column.type.create(connection, checkfirst=True)
            for schema in (self.attached, self._replaced):
                connection.execute(verbatim(f"create schema {qualified(None, schema)}"))
            for statement in (
                [CreateTable(columns_alone(table, table.name, "UNLOGGED")) for table in tables]
                if bare
                else creation(tables)
            ):
                connection.execute(statement)
            # A crash of the server empties them, and the next batch finds that out.
            for own in (projections.name, rebuilds.name, quarantine.name):
                name = qualified(self.attached, own)
                connection.execute(verbatim(f"create unlogged table {name} (like {own} including all)"))

    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        if bare:
            with self.live.begin() as connection:
                for table in tables:
                    connection.execute(verbatim(f"alter table {qualified(self.attached, table.name)} set logged"))
                    _add_keys(connection, projection, table)
                failpoints.reach("rebuild.keys_made")
        with self.live.begin() as connection:
            for table in tables:
                connection.execute(verbatim(f"analyze {qualified(self.attached, table.name)}"))

    @contextmanager
    def snapshot(self) -> Generator[Connection]:
        with self.live.execution_options(isolation_level="REPEATABLE READ").begin() as connection:
            yield connection

    @contextmanager
    def swapping(self) -> Generator[Connection]:
        with self.live.begin() as connection, bounded(connection):
            yield connection

    def attach(self, connection: Connection) -> None:
        """It is the same database."""

    def exchange(self, connection: Connection, resolved: AnyResolved, location: str) -> Exchange:
        names = names_of(recorded(resolved))
        leaving = [Move(name, location, self._replaced) for name in names]
        return Exchange(connection, leaving, [Move(name, self.attached, location) for name in names])

    def strange_writes(self, connection: Connection) -> list[str]:
        return list(map(str, connection.scalars(_STRANGE_WRITES, {"schema": self.attached})))

    def numbered(self, tables: Sequence[Table]) -> set[Column[Any]]:
        with self.live.begin() as connection:
            return {
                column
                for table in tables
                for column in table.columns
                if connection.scalar(
                    _LAST_NUMBER, {"name": qualified(self.attached, table.name), "column": column.name}
                )
                is not None
            }

    def interrupt(self) -> None:
        with suppress(SQLAlchemyError), self.database.sync_engine(PURPOSE).begin() as connection:
            self._end_sessions(connection)

    def drop(self) -> None:
        """What a reader still holds is left, with its lease ended, to the next run."""
        engine = self.database.sync_engine(PURPOSE)
        try:
            with engine.begin() as connection:
                self.clear(connection)
                runs.close_run(connection, self.run)
        except SQLAlchemyError:
            with suppress(SQLAlchemyError), engine.begin() as connection:
                runs.release(connection, self.run)

    def clear(self, connection: Connection) -> None:
        """What its tasks are still writing would have to be waited for, so their sessions are ended."""
        self._end_sessions(connection)
        for schema in (self.attached, self._replaced):
            connection.execute(verbatim(f"drop schema if exists {qualified(None, schema)} cascade"))

    def _end_sessions(self, connection: Connection) -> None:
        query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = :purpose"
        connection.execute(text(query), {"purpose": self._purpose})

    def _first_in_path(self, *options: str) -> Database:
        """The same database with the run's schema first in the search path, and other options of the session."""
        path = ",".join(qualified(None, schema) for schema in (self.attached, *self._search_path))
        option = f"-c search_path={path}".replace("\\", "\\\\").replace(" ", "\\ ").replace("-c\\ ", "-c ", 1)
        url = make_url(self.database.url)
        given = url.query.get("options", "")
        own = given if isinstance(given, str) else " ".join(given)
        url = url.update_query_dict({"options": " ".join([own, option, *options]).strip()})
        return Database(url.render_as_string(hide_password=False))

    @cached_property
    def _search_path(self) -> Sequence[str]:
        with self.live.begin() as connection:
            return connection.scalar(text("select current_schemas(false)")) or ()


def _add_keys(connection: Connection, projection: str, table: Table) -> None:
    """The constraints and indexes that a bare table lacks; raises `RowsRefused` for rows that break one."""
    for constraint in sorted(table.constraints, key=lambda one: not isinstance(one, PrimaryKeyConstraint)):
        if isinstance(constraint, CheckConstraint):
            with refusals(projection, partial(_breaker, connection, table, constraint)), connection.begin_nested():
                connection.execute(AddConstraint(constraint))
        elif isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint):
            with refusals(projection):
                connection.execute(AddConstraint(constraint))
    for index in sorted(table.indexes, key=lambda one: str(one.name)):
        with refusals(projection):
            connection.execute(CreateIndex(index))


def _breaker(connection: Connection, table: Table, rule: CheckConstraint) -> str:
    """One row that breaks a check."""
    keys = list(table.primary_key.columns)
    said = rule.sqltext.compile(dialect=_AS_WRITTEN, compile_kwargs={"literal_binds": True})
    broken = verbatim(f"not ({said})")
    values = connection.execute(select(*keys).where(broken).limit(1)).first()
    return "" if values is None else f"the row of {shown(keys, tuple(values))}"
