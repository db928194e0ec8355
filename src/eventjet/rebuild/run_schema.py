"""`RunSchema`: where on PostgreSQL a run's shadow is, whatever it is a shadow of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import Connection, Engine, MetaData, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import runs
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.own_tables import projections


class RunSchema:
    """The schemas of one run: its own, and the one for what it replaces."""

    def __init__(self, database: Database, run: str) -> None:
        self.run = run
        self.schema = f"ej_{run}"
        self.old = f"ej_{run}_old"
        self.purpose = f"eventjet rebuild {run}"
        """What the database shows of the run's sessions."""
        self._database = database

    def database(self, engine: Engine, *options: str) -> Database:
        """The same database with the run's schema first in the search path, and other options of the session."""
        quote = engine.dialect.identifier_preparer.quote_identifier
        with engine.begin() as connection:
            schemas: Sequence[str] = connection.scalar(text("select current_schemas(false)")) or ()
        path = ",".join(quote(schema) for schema in (self.schema, *schemas))
        option = f"-c search_path={path}".replace("\\", "\\\\").replace(" ", "\\ ").replace("-c\\ ", "-c ", 1)
        url = make_url(self._database.url)
        given = url.query.get("options", "")
        own = given if isinstance(given, str) else " ".join(given)
        url = url.update_query_dict({"options": " ".join([own, option, *options]).strip()})
        return Database(url.render_as_string(hide_password=False))

    def checkpoint(self, connection: Connection, resolved: AnyResolved) -> Checkpoint:
        """The shadow's."""
        own = projections.to_metadata(MetaData(), schema=self.schema)
        row = connection.execute(
            select(own).where(own.c.name == resolved.name, own.c.revision == resolved.revision)
        ).one()
        return Checkpoint(*row)

    def interrupt(self) -> None:
        """End what this run's connections are doing, from another thread. Never raises."""
        with suppress(SQLAlchemyError), self._database.sync_engine("eventjet rebuild").begin() as connection:
            end_sessions(connection, self.purpose)

    def drop(self) -> None:
        """What a reader still holds is left, with its lease ended, to the next run. Never raises."""
        try:
            self._drop()
        except SQLAlchemyError:
            with suppress(SQLAlchemyError), self._database.sync_engine(self.purpose).begin() as connection:
                runs.release(connection, self.run)

    def _drop(self) -> None:
        engine = self._database.sync_engine("eventjet rebuild")
        with engine.begin() as connection:
            end_sessions(connection, self.purpose)
            drop_schemas(connection, self.run, engine.dialect.identifier_preparer.quote_identifier)
            runs.close_run(connection, self.run)


def end_sessions(connection: Connection, purpose: str) -> None:
    """End whatever runs under this name."""
    connection.execute(
        text("select pg_terminate_backend(pid) from pg_stat_activity where application_name = :purpose"),
        {"purpose": purpose},
    )


def drop_schemas(connection: Connection, run: str, quote: Callable[[str], str]) -> None:
    """Drop both schemas of a run with all that is in them."""
    for schema in (f"ej_{run}", f"ej_{run}_old"):
        connection.execute(text(f"drop schema if exists {quote(schema)} cascade"))
