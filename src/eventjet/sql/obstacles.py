"""What hangs on a table in the database and would not follow when another one takes its place, by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, TextClause, text

from eventjet.projections.columns import POSTGRESQL

_POSTGRES = text("""
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

_POSTGRES_INDEXES = text("""
select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid
 where i.indrelid = :oid and not exists (select from pg_constraint k where k.conindid = i.indexrelid)
 order by 1
""")

_SQLITE = text("""
select 'the trigger ' || name from sqlite_master where type = 'trigger' and lower(tbl_name) = lower(:name) order by 1
""")

_SQLITE_INDEXES = text("""
select name from sqlite_master where type = 'index' and sql is not null and lower(tbl_name) = lower(:name) order by 1
""")


def obstacles(connection: Connection, name: str, oid: int | None, along: Collection[int] = ()) -> list[str]:
    """What another table could not take over from this one; `oid` is PostgreSQL's.

    Foreign keys between tables `along`, which move together, are no obstacle.
    """
    return _named(connection, _POSTGRES.bindparams(along=list(along)), _SQLITE, name, oid)


def undeclared_indexes(connection: Connection, name: str, oid: int | None, declared: Sequence[str]) -> list[str]:
    """Indexes of a table that its declaration does not have."""
    there = _named(connection, _POSTGRES_INDEXES, _SQLITE_INDEXES, name, oid)
    return [one for one in there if one not in declared]


def listed(found: Sequence[str]) -> str:
    """At most ten of them in words."""
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")


def _named(
    connection: Connection, on_postgres: TextClause, on_sqlite: TextClause, name: str, oid: int | None
) -> list[str]:
    if connection.dialect.name != POSTGRESQL:
        return [str(one) for one in connection.scalars(on_sqlite, {"name": name})]
    return [] if oid is None else [str(one) for one in connection.scalars(on_postgres, {"oid": oid})]
