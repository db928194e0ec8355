"""`RunSchema`: where on PostgreSQL a run's shadow is, whatever it is a shadow of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import Connection, Engine, MetaData, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

from eventjet.projections.checkpoint import Checkpoint
from eventjet.projections.database import Database
from eventjet.projections.own_tables import projections
from eventjet.projections.sql import AnyBound
from eventjet.rebuild import runs


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

    def checkpoint(self, connection: Connection, bound: AnyBound) -> Checkpoint:
        """The shadow's."""
        own = projections.to_metadata(MetaData(), schema=self.schema)
        row = connection.execute(select(own).where(own.c.name == bound.name, own.c.revision == bound.revision)).one()
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


def live_table(connection: Connection, name: str) -> tuple[int | None, str]:
    """(oid of the live table of this quoted name, its schema); None and where it would be created if there is none."""
    query = text(
        "select c.oid, n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace "
        "where c.oid = to_regclass(:name)"
    )
    found = connection.execute(query, {"name": name}).one_or_none()
    if found is not None:
        return int(found[0]), str(found[1])
    return None, str(connection.scalar(text("select current_schema()")))


def inherited(connection: Connection, oid: int, new: str) -> list[str]:
    """Statements that give a shadow (its quoted name) the owner, rights and storage parameters of the live table."""
    found = connection.scalars(text(_INHERITED + _INHERITED_BY_SEQUENCES), {"oid": oid, "new": new})
    return [str(one).replace("%TABLE%", new) for one in found]


_INHERITED = """
select 'alter table %TABLE% owner to ' || quote_ident(pg_get_userbyid(relowner)) from pg_class
 where oid = :oid and pg_get_userbyid(relowner) <> current_user
union all
select 'alter table %TABLE% set (' || array_to_string(reloptions, ', ') || ')' from pg_class
 where oid = :oid and reloptions is not null
union all
select 'grant ' || a.privilege_type || ' on %TABLE% to '
       || case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
       || case when a.is_grantable then ' with grant option' else '' end
  from pg_class c cross join lateral aclexplode(c.relacl) a
 where c.oid = :oid and a.grantee <> c.relowner
union all
select 'grant ' || a.privilege_type || ' (' || quote_ident(t.attname) || ') on %TABLE% to '
       || case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
       || case when a.is_grantable then ' with grant option' else '' end
  from pg_attribute t cross join lateral aclexplode(t.attacl) a
 where t.attrelid = :oid and t.attnum > 0 and not t.attisdropped
"""

_INHERITED_BY_SEQUENCES = """
union all
select 'grant ' || a.privilege_type || ' on sequence ' || pg_get_serial_sequence(:new, t.attname) || ' to '
       || case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
       || case when a.is_grantable then ' with grant option' else '' end
  from pg_depend d
  join pg_class s on s.oid = d.objid and s.relkind = 'S'
  join pg_attribute t on t.attrelid = d.refobjid and t.attnum = d.refobjsubid
 cross join lateral aclexplode(s.relacl) a
 where d.classid = 'pg_class'::regclass and d.deptype in ('a', 'i') and d.refobjid = :oid
   and a.grantee <> s.relowner and pg_get_serial_sequence(:new, t.attname) is not null
"""
