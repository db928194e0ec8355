"""The tables of a `SqlProjection` on PostgreSQL: made in a schema of the run's own, and all swapped at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, MetaData, Table, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet import failpoints
from eventjet.errors import RebuildRefused
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.rebuild import decided, runs
from eventjet.rebuild.catchup import begin, begun
from eventjet.rebuild.compare import Pair
from eventjet.rebuild.obstacles import check_obstacles_together
from eventjet.rebuild.postgres import StepBackError, advance, create_enums, locked, running
from eventjet.rebuild.run_schema import RunSchema
from eventjet.rebuild.shadow import TAIL_MAX, NotYet, Swapped, check_kept
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import DECLARED, Checkpoint
from eventjet.sql.database import BULK, Database
from eventjet.sql.location_assignment import create_tables
from eventjet.sql.locations import located_tables
from eventjet.sql.postgres_tables import LOCKED, Found, default_schema, find, inherit, lock_table, move, patiently
from eventjet.sql.stored_tables import creation

T = TypeVar("T")

_WRITTEN = text(
    "select schemaname || '.' || relname from pg_stat_xact_user_tables "
    "where n_tup_ins + n_tup_upd + n_tup_del > 0 and schemaname <> :schema and schemaname !~ '^pg_temp' order by 1"
)


class PostgresTables:
    """See the module. Handlers find its tables by the search path, so the declared ones name no schema."""

    def __init__(self, database: Database, resolved: ResolvedSql, run: str) -> None:
        self.resolved = resolved
        self.run = run
        self._schemas = RunSchema(database, run)
        self._engine = database.sync_engine(self._schemas.purpose)
        self._quote = self._engine.dialect.identifier_preparer.quote_identifier
        self._tables = located_tables(resolved, self._schemas.schema, POSTGRESQL)

    def create(self, *, to_swap: bool = True) -> None:
        with self._engine.begin() as connection:
            create_tables(connection, [self.resolved] if to_swap else ())
            if to_swap:
                self.check_swappable(connection)
            for table in self.resolved.tables:
                create_enums(connection, table)
            runs.open_run(connection, self.run, self.resolved)
        failpoints.reach("rebuild.announced")
        with self._engine.begin() as connection:
            for schema in (self._schemas.schema, self._schemas.old):
                connection.execute(text(f"create schema {self._quote(schema)}"))
            for statement in creation(self._tables):
                connection.execute(statement)
            own = f"{self._quote(self._schemas.schema)}.eventjet_projection"
            # A crash of the server empties it, and the next batch finds that out.
            connection.execute(text(f"create unlogged table {own} (like eventjet_projection including all)"))
        with self._schemas.database(self._engine).sync_engine(self._schemas.purpose).begin() as connection:
            begin(connection, begun(self.resolved))

    def check_swappable(self, connection: Connection) -> None:
        self._check_obstacles(connection, self._live(connection)[0])

    def handlers_engine(self) -> AsyncEngine:
        # A shadow whose last batches a crash undoes is made again.
        return self._schemas.database(self._engine, "-c synchronous_commit=off").engine(self._schemas.purpose, BULK)

    def check_confined(self, connection: Connection) -> None:
        written = list(connection.scalars(_WRITTEN, {"schema": self._schemas.schema}))
        if written:
            raise RebuildRefused(
                self.resolved.name,
                f"its handlers write to {', '.join(map(str, written))}, which it does not declare",
                "Declare these tables, or leave them alone, and name no schema. What was tried is undone.",
            )

    def copy_live(self) -> Checkpoint | None:
        engine = self._engine.execution_options(isolation_level="REPEATABLE READ")
        with engine.begin() as connection:
            found = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
            live, _ = self._live(connection)
            if found is None or not found.log or len(live) < len(self._tables):
                return None
            for _, copied, made in self.pairs():
                columns = ", ".join(self._quote(column.name) for column in made.columns)
                source = live[made].quoted(connection)
                target = f"{self._quote(self._schemas.schema)}.{self._quote(copied.name)}"
                connection.execute(text(f"create unlogged table {target} as select {columns} from {source}"))
            return found

    def pairs(self) -> list[Pair]:
        return [
            (declared, copy_of(made, f"eventjet_live_{number}", self._schemas.schema), made)
            for number, (declared, made) in enumerate(zip(self.resolved.tables, self._tables, strict=True))
        ]

    def numbered(self) -> set[Column[Any]]:
        """Those whose sequence has given a number."""
        found: set[Column[Any]] = set()
        query = text("select pg_sequence_last_value(to_regclass(pg_get_serial_sequence(:name, :column)))")
        with self._engine.begin() as connection:
            for declared, made in zip(self.resolved.tables, self._tables, strict=True):
                for column in declared.columns:
                    values = {"name": self._qualified(made), "column": column.name}
                    if connection.scalar(query, values) is not None:
                        found.add(column)
        return found

    def compare(self, look: Callable[[Connection], T]) -> T:
        with self._engine.begin() as connection:
            return look(connection)

    def count(self) -> int:
        with self._engine.begin() as connection:
            return sum(connection.scalar(select(func.count()).select_from(table)) or 0 for table in self._tables)

    def finish(self) -> None:
        with self._engine.begin() as connection:
            for table in self._tables:
                connection.execute(text(f"analyze {self._qualified(table)}"))

    def live_checkpoint(self) -> Checkpoint | None:
        with self._engine.begin() as connection:
            return checkpoint.read(connection, self.resolved.name, self.resolved.revision)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Swapped | NotYet:
        try:
            with self._engine.begin() as connection:
                return self._swap(connection, log, tail)
        except StepBackError as back:
            return NotYet(str(back))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in LOCKED:
                raise
            return NotYet("another transaction holds a table or the checkpoint")

    def _swap(self, connection: Connection, log: str, tail: Callable[[int], None] | None) -> Swapped:
        """Locks are taken in the order in which a worker takes them: checkpoint first, then whatever handlers touch.

        Up to the last step the tables' locks keep writers out and let readers in.
        """
        runs.hold(connection, self.run)
        live = patiently(connection, lambda: locked(connection, self.resolved))
        check_kept(self.resolved, live)
        tables, location = self._live(connection)
        for table in tables.values():
            lock_table(connection, table, "exclusive")
        if self._live(connection) != (tables, location):
            raise StepBackError("its tables were swapped or moved meanwhile")
        own = self._schemas.checkpoint(connection, self.resolved)
        if tail is not None and own.position < live.position:
            if live.position - own.position > TAIL_MAX:
                raise StepBackError(f"the live read model is {live.position - own.position} events ahead")
            tail(live.position)
            own = self._schemas.checkpoint(connection, self.resolved)
        assert tail is None or own.position >= live.position
        self._check_obstacles(connection, tables)
        decided.forget(running(connection), decided.TABLE, self.resolved)
        schema = location or default_schema(connection)
        for table in tables.values():
            lock_table(connection, table, "access exclusive")
        for table in self._tables:
            self._exchange(connection, table, tables.get(table), schema)
        return advance(connection, self.resolved, live, own, log)

    def _exchange(self, connection: Connection, table: Table, live: Found | None, schema: str) -> None:
        """The live table out, the new one in; sequences that columns own go with their tables."""
        new = self._qualified(table)
        if live is not None:
            schema = live.schema
            inherit(connection, live.oid, new)
            move(connection, live, self._schemas.old)
        connection.execute(text(f"alter table {new} set schema {self._quote(schema)}"))

    def interrupt(self) -> None:
        self._schemas.interrupt()

    def drop(self) -> None:
        self._schemas.drop()

    def _check_obstacles(self, connection: Connection, live: Mapping[Table, Found]) -> None:
        oids = {table: live[table].oid if table in live else None for table in self._tables}
        check_obstacles_together(connection, self.resolved.name, oids)

    def _live(self, connection: Connection) -> tuple[dict[Table, Found], str]:
        """(the live tables that are there, their location)."""
        held = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
        location = held.location if held else DECLARED
        found = {table: find(connection, None, table.name, location) for table in self._tables}
        return {table: one for table, one in found.items() if one is not None}, location

    def _qualified(self, table: Table) -> str:
        return f"{self._quote(self._schemas.schema)}.{self._quote(table.name)}"


def copy_of(table: Table, name: str, schema: str | None) -> Table:
    """A table of the same columns without any constraint."""
    columns: list[Column[object]] = [Column(column.name, column.type, key=column.key) for column in table.columns]
    return Table(name, MetaData(), *columns, schema=schema)
