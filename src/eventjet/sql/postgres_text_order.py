"""What PostgreSQL's collations and indexes say of the order of a column of text."""

from __future__ import annotations

from sqlalchemy import Connection, text

from eventjet.sql.text_order import TextOrder


def text_order(connection: Connection, oid: int | None, column: str) -> TextOrder | None:
    """The order in which an index of the table finds it; None where no index is in the order of code points.

    To the end of the transaction plans keep to such an index: of a table that was never analysed the planner believes
    that few rows match, and would read and sort all that do.
    """
    connection.execute(_KEEP_TO_INDEXES)
    found = connection.execute(_ORDER, {"oid": oid, "column": column}).scalar()
    return None if found is None else TextOrder[found]


_KEEP_TO_INDEXES = text(
    "select set_config(name, 'off', true) from unnest(array['enable_seqscan', 'enable_bitmapscan', 'enable_sort']) name"
)

# Of the index that costs least to ask: a primary key is there anyway. Only in UTF-8 are bytes in the order of code
# points; the columns that name providers came with PostgreSQL 15 and 17, hence the rows as JSON.
_ORDER = text("""
with here as (
  select pg_encoding_to_char(d.encoding) = 'UTF8' as is_utf8,
         coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'b'
         or (coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c'
             and d.datcollate in ('C', 'POSIX', 'C.UTF-8', 'C.utf8')) as by_bytes
    from pg_database d where d.datname = current_database()
), indexed as (
  select o.opcname as kind, k.collname as sorts
    from pg_index i
    join pg_class c on c.oid = i.indexrelid
    join pg_am m on m.oid = c.relam and m.amname = 'btree'
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
    join pg_opclass o on o.oid = i.indclass[0]
    left join pg_collation k on k.oid = i.indcollation[0]
   where i.indrelid = :oid and a.attname = :column and i.indisvalid and i.indpred is null
)
select case when kind in ('text_pattern_ops', 'varchar_pattern_ops') then 'PATTERN'
            when sorts = 'default' then 'PLAIN'
            else 'BYTES' end as found
  from indexed, here
 where is_utf8 and (kind in ('text_pattern_ops', 'varchar_pattern_ops')
                    or (kind in ('text_ops', 'varchar_ops')
                        and (sorts in ('C', 'POSIX') or (sorts = 'default' and by_bytes))))
 order by found desc limit 1
""")
