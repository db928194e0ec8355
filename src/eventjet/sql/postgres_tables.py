"""Tables in schemas of PostgreSQL: found by declared name and location, moved, and given each other's rights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, PoolProxiedConnection, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.schema import CreateSchema

from eventjet.sql.checkpoint import DECLARED

T = TypeVar("T")

LOCK_TIMEOUT_MS = 500
"""How long an exchange of tables may make readers queue behind it before it steps back."""
CHECKPOINT_LOCK_MS = 10_000
"""How long it waits for the batch that handlers have in hand: only their next one waits behind it."""
LOCKED = ("55P03", "40P01", "57014")
"""SQLSTATEs of a lock that was not to be had: timeout, deadlock, cancelled statement."""
FORBIDDEN = "42501"


@dataclass(frozen=True, slots=True)
class Found:
    """A table that is there."""

    oid: int
    schema: str
    name: str

    def quoted(self, connection: Connection) -> str:
        """Its qualified name in SQL."""
        return qualified(connection, self.schema, self.name)


def qualified(connection: Connection, schema: str, name: str) -> str:
    """`"schema"."name"`."""
    quote = connection.dialect.identifier_preparer.quote_identifier
    return f"{quote(schema)}.{quote(name)}"


def find(connection: Connection, schema: str | None, name: str, location: str = DECLARED) -> Found | None:
    """A table of this declared schema and name, in a location; the search path says where those without a schema are."""
    within = location or schema
    quote = connection.dialect.identifier_preparer.quote_identifier
    wanted = quote(name) if within is None else qualified(connection, within, name)
    query = text("select c.oid, n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace "
                 "where c.oid = to_regclass(:name)")  # fmt: skip
    found = connection.execute(query, {"name": wanted}).one_or_none()
    return None if found is None else Found(int(found[0]), str(found[1]), str(found[2]))


def default_schema(connection: Connection) -> str:
    """Where a table without a schema is created."""
    return str(connection.scalar(text("select current_schema()")))


def ensure_schema(connection: Connection, name: str) -> None:
    """Create it if it is missing. Not IF NOT EXISTS, which asks for the right to create it even when it exists."""
    query = text("select 1 from pg_namespace where nspname = :name")
    if connection.scalar(query, {"name": name}) is None:
        connection.execute(CreateSchema(name))


def look_first_in(connection: PoolProxiedConnection | DBAPIConnection, schema: str) -> None:
    """For the rest of a session of the driver: names without a schema mean this one's tables."""
    cursor = connection.cursor()
    path = "quote_ident(%s) || ', ' || current_setting('search_path')"
    cursor.execute(f"select set_config('search_path', {path}, false)", (schema,))
    cursor.close()
    connection.commit()


def bound_waits(connection: Connection, timeout_ms: int = LOCK_TIMEOUT_MS) -> None:
    """Wait no longer than this for any lock, to the end of the transaction."""
    connection.execute(text(f"set local lock_timeout = {timeout_ms}"))


def patiently(connection: Connection, lock: Callable[[], T]) -> T:
    """Lock checkpoints whose rows workers of SQL by hand keep locked while their handlers run."""
    bound_waits(connection, CHECKPOINT_LOCK_MS)
    found = lock()
    bound_waits(connection)
    return found


def lock_table(connection: Connection, table: Found, mode: str) -> None:
    """To the end of the transaction. `exclusive` keeps writers out and lets readers in."""
    connection.execute(text(f"lock table {table.quoted(connection)} in {mode} mode"))


def move(connection: Connection, table: Found, schema: str) -> None:
    """Its indexes and constraints go with it, and keep their names."""
    quote = connection.dialect.identifier_preparer.quote_identifier
    connection.execute(text(f"alter table {table.quoted(connection)} set schema {quote(schema)}"))


def inherit(connection: Connection, oid: int, heir: str) -> None:
    """Give a table (its quoted name) the owner, the storage parameters and the rights of another one.

    Rights on columns, and on the sequences of columns, go to the columns of the same names.
    """
    for statement in connection.scalars(text(_INHERITED), {"oid": oid, "new": heir}).all():
        connection.execute(text(str(statement).replace("%TABLE%", heir)))


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
  join pg_attribute h on h.attrelid = to_regclass(:new) and h.attname = t.attname and not h.attisdropped
 where t.attrelid = :oid and t.attnum > 0 and not t.attisdropped
union all
select 'grant ' || a.privilege_type || ' on sequence ' || o.objid::regclass || ' to '
       || case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
       || case when a.is_grantable then ' with grant option' else '' end
  from pg_depend d
  join pg_class s on s.oid = d.objid and s.relkind = 'S'
  join pg_attribute t on t.attrelid = d.refobjid and t.attnum = d.refobjsubid
  join pg_attribute h on h.attrelid = to_regclass(:new) and h.attname = t.attname and not h.attisdropped
  join pg_depend o on o.classid = 'pg_class'::regclass and o.deptype in ('a', 'i')
   and o.refclassid = 'pg_class'::regclass and o.refobjid = h.attrelid and o.refobjsubid = h.attnum
  join pg_class n on n.oid = o.objid and n.relkind = 'S'
 cross join lateral aclexplode(s.relacl) a
 where d.classid = 'pg_class'::regclass and d.deptype in ('a', 'i') and d.refobjid = :oid
   and a.grantee <> s.relowner
"""
