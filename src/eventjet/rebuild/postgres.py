"""A run on PostgreSQL: declared names in a schema of the run's own, swapped in by `SET SCHEMA` both ways."""

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
from eventjet.rebuild.runs import PURPOSE, RunSpace, Target, refusals, shown
from eventjet.sql.checkpoint import names_of
from eventjet.sql.database import BULK, Database
from eventjet.sql.dialect import comments, listed, qualified, verbatim
from eventjet.sql.locations import recorded
from eventjet.sql.own_tables import projections, quarantine, rebuilds
from eventjet.sql.postgres_tables import make
from eventjet.sql.table_moves import Exchange, Move, bounded

_log = logging.getLogger(__name__)
_STRANGE_WRITES = text(
    "select schemaname || '.' || relname from pg_stat_xact_user_tables "
    "where n_tup_ins + n_tup_upd + n_tup_del > 0 and schemaname <> :schema and schemaname !~ '^pg_temp' order by 1"
)
_COPY = re.compile(r"eventjet_live_[0-9]+")
_MADE = text("select obj_description(oid, 'pg_namespace') from pg_namespace where nspname = :schema")
_TABLES = text("select tablename from pg_tables where schemaname = :schema order by 1")
_ALL_PUBLISHED = text("select pubname from pg_publication where puballtables order by 1")
_IS_LOGGED = text("select relpersistence = 'p' from pg_class where oid = to_regclass(:name)")
_RULES = text("""
select conname, pg_get_constraintdef(oid), case contype when 'c' then pg_get_expr(conbin, conrelid) end
  from pg_constraint where conrelid = to_regclass(:name) and contype in ('p', 'u', 'x', 'c')
 order by contype <> 'p', conname
""")
_INDEXES = text("""
select indexrelid::regclass, pg_get_indexdef(indexrelid)
  from pg_index where indrelid = to_regclass(:name) order by indexrelid::regclass::text
""")
_LAST_NUMBER = text("select pg_sequence_last_value(to_regclass(pg_get_serial_sequence(:name, :column)))")


class PostgresSpace(RunSpace):
    """A schema of the run's own, whose comment lists the tables that the run makes there."""

    suffixes = ("",)
    copied_as = "unlogged table"

    def __init__(self, database: Database, run: str) -> None:
        self.run = run
        self.database = database
        self.attached = self.location = f"ej_{run}"
        self._purpose = f"{PURPOSE} {run}"
        self.live = database.sync_engine(self._purpose)
        self._claim = {"claim": f"eventjet-run-{run}"}
        self._bare: dict[str, _Bare] = {}

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
        """Bare ones are unlogged, and have no rules or indexes: those are cheaper made at once, after the load."""
        own = (projections.name, rebuilds.name, quarantine.name)
        with self.live.begin() as connection:
            schema = qualified(None, self.attached)
            made = json.dumps([*(table.name for table in tables), *own]).replace("'", "''")
            connection.execute(verbatim(f"create schema {schema}"))
            connection.execute(verbatim(f"comment on schema {schema} is '{made}'"))
            make(connection, tables)
            if bare:
                self._bare = {table.name: _strip(connection, qualified(self.attached, table.name)) for table in tables}
            published = connection.scalars(_ALL_PUBLISHED).all()
            if published:
                logs.RUN_PUBLISHED.tell(_log, name=self.attached, publications=listed(published))
            # A crash of the server empties them, and the next batch finds that out.
            for name in own:
                copied = qualified(self.attached, name)
                connection.execute(verbatim(f"create unlogged table {copied} (like {name} including all)"))

    def finish(self, projection: str, tables: Sequence[Table], *, bare: bool) -> None:
        with self.live.begin() as connection:
            for table in tables if bare else ():
                self._bare[table.name].clothe(connection, projection, qualified(self.attached, table.name), table)
            for statement in comments(tables):
                connection.execute(statement)
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
        leaving = [Move(name, location, None) for name in names]
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
        except SQLAlchemyError as error:
            runs.say_left(self.attached, error)
            with suppress(SQLAlchemyError), engine.begin() as connection:
                runs.release(connection, self.run)

    def clear(self, connection: Connection) -> None:
        """Drop what the run made, and neither what others have put there nor what they have made depend on it.

        What its tasks are still writing would have to be waited for, so their sessions are ended.
        """
        self._end_sessions(connection)
        made = set(json.loads(connection.scalar(_MADE, {"schema": self.attached}) or "[]"))
        there = connection.scalars(_TABLES, {"schema": self.attached}).all()
        names = [qualified(self.attached, name) for name in there if name in made or _COPY.fullmatch(name)]
        if names:
            connection.execute(verbatim(f"drop table {', '.join(names)} restrict"))
        connection.execute(verbatim(f"drop schema if exists {qualified(None, self.attached)} restrict"))

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


@dataclass(frozen=True, slots=True)
class _Bare:
    """What a table was stripped of for the load."""

    is_logged: bool
    rules: Sequence[tuple[str, str, str | None]]
    """(name, definition, expression of a check), keys first."""
    indexes: Sequence[str]

    def clothe(self, connection: Connection, projection: str, name: str, table: Table) -> None:
        """Give it back; raises `RowsRefused` for rows that break a rule."""
        if self.is_logged:
            connection.execute(verbatim(f"alter table {name} set logged"))
        for rule, definition, check in self.rules:
            add = verbatim(f"alter table {name} add constraint {qualified(None, rule)} {definition}")
            with refusals(projection, partial(_breaker, connection, table, check)), connection.begin_nested():
                connection.execute(add)
        for index in self.indexes:
            with refusals(projection):
                connection.execute(verbatim(index))


def _strip(connection: Connection, name: str) -> _Bare:
    """Take from an empty table what would slow a load."""
    is_logged = bool(connection.scalar(_IS_LOGGED, {"name": name}))
    rules = [(str(rule), str(made), check) for rule, made, check in connection.execute(_RULES, {"name": name})]
    for rule, _, _ in rules:
        connection.execute(verbatim(f"alter table {name} drop constraint {qualified(None, rule)}"))
    indexes = connection.execute(_INDEXES, {"name": name}).all()
    for index, _ in indexes:
        connection.execute(verbatim(f"drop index {index}"))
    if is_logged:
        connection.execute(verbatim(f"alter table {name} set unlogged"))
    return _Bare(is_logged, rules, [str(made) for _, made in indexes])


def _breaker(connection: Connection, table: Table, check: str | None) -> str:
    """One row that breaks a check."""
    if check is None:
        return ""
    keys = list(table.primary_key.columns)
    values = connection.execute(select(*keys).where(verbatim(f"not ({check})")).limit(1)).first()
    return "" if values is None else f"the row of {shown(keys, tuple(values))}"
