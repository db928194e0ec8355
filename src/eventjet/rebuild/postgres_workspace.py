"""`PostgresWorkspace`: the schema of one run, whose tables are moved to the place of the live tables."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from psycopg import sql
from sqlalchemy import Column, Connection, Engine, Table, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet import failpoints
from eventjet.observability import logs
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import runs
from eventjet.rebuild.runs import PURPOSE, Target, columns_in_words, refusals
from eventjet.sql.checkpoint import names_of
from eventjet.sql.database import BULK, Database
from eventjet.sql.dialect import comments, qualified, verbatim
from eventjet.sql.locations import recorded
from eventjet.sql.own_tables import projections, quarantine, rebuilds
from eventjet.sql.postgres import make
from eventjet.sql.table_moves import Exchange, Move, bounded
from eventjet.text import listed

_log = logging.getLogger(__name__)

_OUTSIDE_WRITES = text(
    "select schemaname || '.' || relname from pg_stat_xact_user_tables "
    "where n_tup_ins + n_tup_upd + n_tup_del > 0 and schemaname <> :schema and schemaname !~ '^pg_temp' order by 1"
)
_LIVE_COPY = re.compile(r"eventjet_live_[0-9]+")
_SCHEMA_COMMENT = text("select obj_description(oid, 'pg_namespace') from pg_namespace where nspname = :schema")
_TABLES = text("select tablename from pg_tables where schemaname = :schema order by 1")
_ALL_PUBLISHED = text("select pubname from pg_publication where puballtables order by 1")
_IS_LOGGED = text("select relpersistence = 'p' from pg_class where oid = to_regclass(:name)")
_CONSTRAINTS = text("""
select conname, pg_get_constraintdef(oid), case contype when 'c' then pg_get_expr(conbin, conrelid) end
  from pg_constraint where conrelid = to_regclass(:name) and contype in ('p', 'u', 'x', 'c')
 order by contype <> 'p', conname
""")
_INDEXES = text("""
select indexrelid::regclass, pg_get_indexdef(indexrelid)
  from pg_index where indrelid = to_regclass(:name) order by indexrelid::regclass::text
""")
_LAST_NUMBER = text("select pg_sequence_last_value(to_regclass(pg_get_serial_sequence(:name, :column)))")


class PostgresWorkspace:
    """A schema of the run's own, whose comment lists the tables that the run makes there.

    Every method blocks. A parameter `connection` is a connection to the live database unless its method says otherwise.
    """

    suffixes = ("",)
    """What may follow `ej_<run>` in the name of a run's schema or file."""
    copied_as = "unlogged table"
    """The kind of table, in SQL, for copies that need not survive a crash of the server."""

    def __init__(self, database: Database, run: str) -> None:
        self.run = run
        self.database = database
        """The database into which rows are loaded: the live database here, the run's file on SQLite."""
        self.schema = f"ej_{run}"
        """The schema of the run's tables in connections to the live database, after `attach`."""
        self.location = self.schema
        """The table slot by which the run's tables are named."""
        self.description = f"a schema {self.schema}"
        self._purpose = _purpose(run)
        self.live = database.sync_engine(self._purpose)
        """Connections to the live database."""
        self._claim = {"claim": f"eventjet-run-{run}"}
        self._stripped: dict[str, _Stripped] = {}

    @staticmethod
    def names(connection: Connection, database: Database) -> list[str]:  # noqa: ARG004 - as SQLite's
        """Return the names of all schemas (files, on SQLite) in a database that may belong to a run."""
        return [str(name) for name in connection.scalars(text("select nspname from pg_namespace"))]

    @contextmanager
    def claimed(self) -> Generator[None]:
        """Hold a lock that shows other processes that the run's process lives; it is released when the process ends."""
        with self.database.sync_engine(PURPOSE).connect() as connection:
            connection.execute(text("select pg_advisory_lock(hashtextextended(:claim, 0))"), self._claim)
            connection.commit()
            yield

    def is_claimed(self, connection: Connection) -> bool:
        """Tell whether the run's process lives; if not, hold its claim until the transaction ends."""
        return not connection.scalar(text("select pg_try_advisory_xact_lock(hashtextextended(:claim, 0))"), self._claim)

    def engine(self) -> Engine:
        """Return an engine whose connections find the run's tables, and its copies of eventjet's, by name alone."""
        return self._first_in_path().sync_engine(self._purpose)

    def handlers_engine(self) -> AsyncEngine:
        """Return such an engine for handlers, whose commits do not wait for the disk: a shadow need not be durable."""
        return self._first_in_path("-c synchronous_commit=off").engine(self._purpose, BULK)

    def create(self, tables: Sequence[Table], *, bare: bool) -> None:
        """Create the tables, empty, and the run's copies of eventjet's tables.

        `bare` tables are unlogged and without constraints and indexes until `finish`, because constraints and indexes
        are cheaper to create after the load.
        """
        own_names = (projections.name, rebuilds.name, quarantine.name)
        with self.live.begin() as connection:
            schema = qualified(None, self.schema)
            table_names = json.dumps([*(table.name for table in tables), *own_names]).replace("'", "''")
            connection.execute(verbatim(f"create schema {schema}"))
            connection.execute(verbatim(f"comment on schema {schema} is '{table_names}'"))
            make(connection, tables)
            if bare:
                self._stripped = {table.name: _strip(connection, self._qualified(table.name)) for table in tables}
            published = connection.scalars(_ALL_PUBLISHED).all()
            if published:
                logs.RUN_PUBLISHED.log(_log, name=self.schema, publications=listed(published))
            # A crash of the server empties unlogged tables; the next batch notices that.
            for name in own_names:
                connection.execute(
                    verbatim(f"create unlogged table {self._qualified(name)} (like {name} including all)")
                )

    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        """Give the loaded tables what the declared tables have; raises `RowsRefused` for rows that break a rule."""
        with self.live.begin() as connection:
            for table in tables if bare else ():
                self._stripped[table.name].restore(connection, projection, self._qualified(table.name), table)
            for statement in comments(tables):
                connection.execute(statement)
            failpoints.reach("rebuild.keys_made")
        with self.live.begin() as connection:
            for table in tables:
                connection.execute(verbatim(f"analyze {self._qualified(table.name)}"))

    @contextmanager
    def snapshot(self) -> Generator[Connection]:
        """Begin a transaction on one snapshot of the live database, with the run's tables attached."""
        with self.live.execution_options(isolation_level="REPEATABLE READ").begin() as connection:
            yield connection

    @contextmanager
    def swapping(self) -> Generator[Connection]:
        """Begin the transaction of a swap; raises `NotNow` when locks are not available in time."""
        with self.live.begin() as connection, bounded(connection):
            yield connection

    def attach(self, connection: Connection) -> None:
        """Let a connection to the live database see the run's tables; here they are in the same database."""

    def exchange(self, connection: Connection, resolved: AnyResolved, location: str) -> Exchange:
        """Return the moves that replace the live tables, which are in the slot `location`, with the run's tables."""
        names = names_of(recorded(resolved))
        leaving = [Move(name, location, None) for name in names]
        return Exchange(connection, leaving, [Move(name, self.schema, location) for name in names])

    def carry_out(self, exchange: Exchange, resolved: AnyResolved, location: str) -> None:  # noqa: ARG002 - SQLite's
        """Put the run's tables, or their rows, in the place of the live tables, which are locked."""
        exchange.carry_out()

    def outside_writes(self, connection: Connection) -> list[str]:
        """Return the tables outside the run to which the open transaction of a handler has written."""
        return list(map(str, connection.scalars(_OUTSIDE_WRITES, {"schema": self.schema})))

    def numbered(self, tables: Sequence[Table]) -> set[Column[Any]]:
        """Return the columns filled by a sequence, which loses numbers when a transaction is rolled back."""
        with self.live.begin() as connection:

            def is_numbered(table: Table, column: Column[Any]) -> bool:
                name = {"name": self._qualified(table.name), "column": column.name}
                return connection.scalar(_LAST_NUMBER, name) is not None

            return {column for table in tables for column in table.columns if is_numbered(table, column)}

    def interrupt(self) -> None:
        """End the run's database sessions, from another thread. Never raises."""
        with suppress(SQLAlchemyError), self.database.sync_engine(PURPOSE).begin() as connection:
            self._end_sessions(connection)

    def drop(self) -> None:
        """Remove the run's tables, or the live tables that they replaced, and the run's row. Never raises.

        If a table cannot be dropped, because it is still read for example, the run's lease is ended and the next run
        removes the table.
        """
        engine = self.database.sync_engine(PURPOSE)
        try:
            with engine.begin() as connection:
                self.clear(connection)
                runs.close_run(connection, self.run)
        except SQLAlchemyError as error:
            runs.log_leftover(self.schema, error)
            with suppress(SQLAlchemyError), engine.begin() as connection:
                runs.release(connection, self.run)

    def clear(self, connection: Connection) -> None:
        """Drop the tables that the run made, and the schema if it is empty then.

        Objects of others in the schema, or dependent on its tables, are not dropped; then the statement fails. The
        run's own sessions are ended first, so that the drop does not wait for tasks that still write.
        """
        self._end_sessions(connection)
        run_tables = set(json.loads(connection.scalar(_SCHEMA_COMMENT, {"schema": self.schema}) or "[]"))
        schema_tables = connection.scalars(_TABLES, {"schema": self.schema}).all()
        names = [self._qualified(name) for name in schema_tables if name in run_tables or _LIVE_COPY.fullmatch(name)]
        if names:
            connection.execute(verbatim(f"drop table {', '.join(names)} restrict"))
        connection.execute(verbatim(f"drop schema if exists {qualified(None, self.schema)} restrict"))

    def _qualified(self, table: str) -> str:
        return qualified(self.schema, table)

    def _end_sessions(self, connection: Connection) -> None:
        query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = :purpose"
        connection.execute(text(query), {"purpose": self._purpose})

    def _first_in_path(self, *options: str) -> Database:
        """Return the database with the run's schema first in the search path, and with other session options."""
        path = ",".join(qualified(None, schema) for schema in (self.schema, *self._search_path))
        option = f"-c search_path={path}".replace("\\", "\\\\").replace(" ", "\\ ").replace("-c\\ ", "-c ", 1)
        url = make_url(self.database.url)
        query_options = url.query.get("options", "")
        url_options = query_options if isinstance(query_options, str) else " ".join(query_options)
        url = url.update_query_dict({"options": " ".join([url_options, option, *options]).strip()})
        return Database(url.render_as_string(hide_password=False))

    @cached_property
    def _search_path(self) -> Sequence[str]:
        with self.live.begin() as connection:
            return connection.scalar(text("select current_schemas(false)")) or ()


def _purpose(run: str) -> str:
    """Return the application name of a run's own sessions, by which `clear` ends them."""
    return f"{PURPOSE} {run}"


def load_part(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """Copy the rows and note the part in the ledger, in one transaction, unless an earlier try has done so."""
    schema = f"ej_{target.run}"
    ledger = sql.Identifier(schema, rebuilds.name)
    part = (target.run, number)
    connection = target.database.connect(_purpose(target.run))
    with refusals(target.projection), connection, connection.cursor() as cursor:
        cursor.execute(
            sql.SQL(
                "insert into {} (run, part, projection, revision) values (%s, %s, %s, %s) on conflict do nothing"
            ).format(ledger),
            (*part, target.projection, target.revision),
        )
        if not cursor.rowcount:
            cursor.execute(sql.SQL("select rows from {} where run = %s and part = %s").format(ledger), part)
            ledger_row = cursor.fetchone()
            assert ledger_row is not None
            return int(ledger_row[0])
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
        cursor.execute(sql.SQL("update {} set rows = %s where run = %s and part = %s").format(ledger), (count, *part))
    failpoints.reach("rebuild.part_loaded")
    return count


@dataclass(frozen=True, slots=True)
class _Stripped:
    """The logging, constraints and indexes that were removed from a table for the load."""

    is_logged: bool
    rules: Sequence[tuple[str, str, str | None]]
    """(name, definition, expression of a check), keys first."""
    indexes: Sequence[str]

    def restore(self, connection: Connection, projection: str, name: str, table: Table) -> None:
        """Give a table its logging, constraints and indexes back; raises `RowsRefused` for rows that break them."""
        if self.is_logged:
            connection.execute(verbatim(f"alter table {name} set logged"))
        for rule, definition, check in self.rules:
            add = verbatim(f"alter table {name} add constraint {qualified(None, rule)} {definition}")
            with refusals(projection, partial(_violating_row, connection, table, check)), connection.begin_nested():
                connection.execute(add)
        for index in self.indexes:
            with refusals(projection):
                connection.execute(verbatim(index))


def _strip(connection: Connection, name: str) -> _Stripped:
    """Remove what would slow a load from an empty table: its logging, constraints and indexes."""
    is_logged = bool(connection.scalar(_IS_LOGGED, {"name": name}))
    rules = [
        (str(rule), str(definition), check)
        for rule, definition, check in connection.execute(_CONSTRAINTS, {"name": name})
    ]
    for rule, _, _ in rules:
        connection.execute(verbatim(f"alter table {name} drop constraint {qualified(None, rule)}"))
    indexes = connection.execute(_INDEXES, {"name": name}).all()
    for index, _ in indexes:
        connection.execute(verbatim(f"drop index {index}"))
    if is_logged:
        connection.execute(verbatim(f"alter table {name} set unlogged"))
    return _Stripped(is_logged, rules, [str(definition) for _, definition in indexes])


def _violating_row(connection: Connection, table: Table, check: str | None) -> str:
    """Return the key of one row that breaks a check, as text; empty if there is none."""
    if check is None:
        return ""
    keys = list(table.primary_key.columns)
    values = connection.execute(select(*keys).where(verbatim(f"not ({check})")).limit(1)).first()
    return "" if values is None else f"the row of {columns_in_words(keys, tuple(values))}"
