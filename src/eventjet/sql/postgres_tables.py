"""Tables in schemas of PostgreSQL, for `eventjet.sql.tables`: a location is a schema, and tables keep their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, PoolProxiedConnection, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from eventjet.sql.tables import TableName, TableRef, qualified

T = TypeVar("T")

LOCK_TIMEOUT_MS = 500
"""How long an exchange of tables may make readers queue behind it before it steps back."""
CHECKPOINT_LOCK_MS = 10_000
"""How long it waits for the batch that handlers have in hand: only their next one waits behind it."""
_LOCKED_OUT = ("55P03", "40P01", "57014")
"""SQLSTATEs of a lock that was not to be had: timeout, deadlock, cancelled statement."""
_FORBIDDEN = "42501"
_NOT_EMPTY = "2BP01"


def find(connection: Connection, name: TableName, location: str) -> TableRef | None:
    """The search path says where declared tables without a schema are."""
    schema, table = name
    query = text("select c.oid, n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace "
                 "where c.oid = to_regclass(:name)")  # fmt: skip
    found = connection.execute(query, {"name": qualified(connection, location or schema, table)}).one_or_none()
    return None if found is None else TableRef(int(found[0]), str(found[1]), str(found[2]))


def bound_waits(connection: Connection, timeout_ms: int = LOCK_TIMEOUT_MS) -> None:
    """Whoever wants the table after a waiting lock waits behind it, even to read."""
    connection.execute(text(f"set local lock_timeout = {timeout_ms}"))


def patiently(connection: Connection, lock: Callable[[], T]) -> T:
    """Nobody who reads tables waits behind a lock of checkpoints, so it may take longer."""
    bound_waits(connection, CHECKPOINT_LOCK_MS)
    found = lock()
    bound_waits(connection)
    return found


def lock(connection: Connection, tables: Iterable[TableRef], *, readers: bool) -> None:
    """One after the other, in the order given."""
    mode = "exclusive" if readers else "access exclusive"
    for table in tables:
        connection.execute(text(f"lock table {table.quoted(connection)} in {mode} mode"))


def is_locked_out(error: Exception) -> bool:
    return _sqlstate(error) in _LOCKED_OUT


def is_forbidden(error: Exception) -> bool:
    return _sqlstate(error) == _FORBIDDEN


def move(connection: Connection, table: TableRef, name: TableName, location: str, schema: str | None) -> None:
    """Its indexes, constraints and sequences go with it, and keep their names."""
    target = schema or location or name[0] or str(connection.scalar(text("select current_schema()")))
    quoted = connection.dialect.identifier_preparer.quote_identifier(target)
    connection.execute(text(f"alter table {table.quoted(connection)} set schema {quoted}"))


def ensure_location(connection: Connection, location: str) -> None:
    """Create the schema if it is missing.

    Not IF NOT EXISTS, which asks for the right to create it even when it exists.
    """
    query = text("select 1 from pg_namespace where nspname = :name")
    if location and connection.scalar(query, {"name": location}) is None:
        connection.execute(CreateSchema(location))


def drop_location(connection: Connection, location: str) -> None:
    """Drop the schema if nothing is in it."""
    quoted = connection.dialect.identifier_preparer.quote_identifier(location)
    try:
        with connection.begin_nested():
            connection.execute(text(f"drop schema if exists {quoted} restrict"))
    except DBAPIError as error:
        if _sqlstate(error.orig) != _NOT_EMPTY:
            raise


def look_first_in(connection: PoolProxiedConnection | DBAPIConnection, schema: str) -> None:
    """For the rest of a session of the driver: names without a schema mean this one's tables."""
    cursor = connection.cursor()
    path = "quote_ident(%s) || ', ' || current_setting('search_path')"
    cursor.execute(f"select set_config('search_path', {path}, false)", (schema,))
    cursor.close()
    connection.commit()


def inherit(connection: Connection, old: TableRef, heir: TableRef) -> None:
    """Rights on columns, and on the sequences of columns, go to the columns of the same names."""
    name = heir.quoted(connection)
    for statement in connection.scalars(text(_INHERITED), {"oid": old.oid, "new": name}).all():
        connection.execute(text(str(statement).replace("%TABLE%", name)))


def obstacles(connection: Connection, table: TableRef, along: Sequence[TableRef]) -> list[str]:
    query = _OBSTACLES.bindparams(along=[one.oid for one in along])
    return [str(one) for one in connection.scalars(query, {"oid": table.oid})]


def indexes(connection: Connection, table: TableRef) -> list[str]:
    return [str(one) for one in connection.scalars(_INDEXES, {"oid": table.oid})]


def count(connection: Connection, table: TableRef) -> int:
    """As the last ANALYZE had it, or exactly where there was none."""
    about = connection.scalar(text("select reltuples::bigint from pg_class where oid = :oid"), {"oid": table.oid})
    if about and about > 0:
        return int(about)
    return connection.scalar(text(f"select count(*) from {table.quoted(connection)}")) or 0  # noqa: S608 - of a known table


def drop(connection: Connection, tables: Sequence[TableRef]) -> None:
    """All in one statement, as foreign keys may be between them."""
    if tables:
        connection.execute(text(f"drop table {', '.join(one.quoted(connection) for one in tables)}"))


def _sqlstate(error: BaseException | None) -> str | None:
    return getattr(error, "sqlstate", None)


_OBSTACLES = text("""
select 'the view ' || (pg_identify_object('pg_class'::regclass, r.ev_class, 0)).identity
  from pg_depend d join pg_rewrite r on r.oid = d.objid
 where d.classid = 'pg_rewrite'::regclass and d.refclassid = 'pg_class'::regclass
   and d.refobjid = :oid and r.ev_class <> :oid
union
select 'the rule ' || rulename from pg_rewrite where ev_class = :oid and rulename <> '_RETURN'
union
select 'the foreign key ' || conname || ' of ' || conrelid::regclass from pg_constraint
 where contype = 'f' and (conrelid = :oid or confrelid = :oid)
   and not (conrelid = any(:along) and confrelid = any(:along))
union
select 'the trigger ' || tgname from pg_trigger where tgrelid = :oid and not tgisinternal
union
select 'the policy ' || polname from pg_policy where polrelid = :oid
union
select 'row-level security' from pg_class where oid = :oid and relrowsecurity
union
select 'the publication ' || p.pubname from pg_publication_tables p
  join pg_class c on c.oid = :oid join pg_namespace n on n.oid = c.relnamespace
 where p.schemaname = n.nspname and p.tablename = c.relname
union
select 'the inheritance of ' || inhrelid::regclass from pg_inherits where inhrelid = :oid or inhparent = :oid
union
select 'the extended statistics ' || stxname from pg_statistic_ext where stxrelid = :oid
union
select 'the function ' || objid::regprocedure from pg_depend
 where classid = 'pg_proc'::regclass and refclassid = 'pg_class'::regclass and refobjid = :oid
order by 1
""")

_INDEXES = text("""
select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid
 where i.indrelid = :oid and not exists (select from pg_constraint k where k.conindid = i.indexrelid)
 order by 1
""")

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
