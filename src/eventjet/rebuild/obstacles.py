"""What hangs on a live table and would not follow a swap, by name: a rebuild refuses it before it reads an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, ForeignKeyConstraint, Table, text

from eventjet.errors import RebuildRefused
from eventjet.projections.bound import BoundProjection
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
union
select 'the index ' || c.relname || ', which the table does not declare' from pg_index i
  join pg_class c on c.oid = i.indexrelid
 where i.indrelid = :oid and c.relname <> all(:declared)
   and not exists (select from pg_constraint k where k.conindid = i.indexrelid)
order by 1
""")

_SQLITE = text("""
select 'the trigger ' || name from sqlite_master where type = 'trigger' and lower(tbl_name) = lower(:name)
union
select 'the index ' || name || ', which the table does not declare' from sqlite_master
 where type = 'index' and sql is not null and lower(tbl_name) = lower(:name)
   and name not in (select value from json_each(:declared))
order by 1
""")


def check_obstacles(connection: Connection, bound: BoundProjection, live: Table, oid: int | None) -> None:
    """Raise `RebuildRefused` with everything that a swap of `live` could not carry; `oid` is PostgreSQL's."""
    found = [
        f"the foreign key to {key.referred_table.name}, which it declares"
        for key in bound.table.constraints
        if isinstance(key, ForeignKeyConstraint)
    ]
    found += _in_database(connection, live, oid, ())
    _refuse(bound.name, live, found)


def check_obstacles_together(connection: Connection, name: str, live: Mapping[Table, int | None]) -> None:
    """The same for tables that are swapped together, with their oids: foreign keys between them are no obstacle."""
    along = [oid for oid in live.values() if oid is not None]
    for table, oid in live.items():
        _refuse(name, table, _in_database(connection, table, oid, along))


def _refuse(name: str, live: Table, found: Sequence[str]) -> None:
    if found:
        raise RebuildRefused(
            name,
            f"the table {live.name} has {_listed(found)}, which a swap cannot carry over",
            "Drop it and create it again after the rebuild, or declare it on the table if it is an index.",
        )


def _in_database(connection: Connection, live: Table, oid: int | None, along: Sequence[int]) -> list[str]:
    declared = [str(index.name) for index in live.indexes]
    values: dict[str, Any]
    if connection.dialect.name == POSTGRESQL:
        if oid is None:
            return []
        query, values = _POSTGRES, {"oid": oid, "declared": declared, "along": list(along)}
    else:
        from eventjet.projections.json_values import dumps

        query, values = _SQLITE, {"name": live.name, "declared": dumps(declared)}
    return [str(name) for name in connection.scalars(query, values)]


def _listed(found: Sequence[str]) -> str:
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
