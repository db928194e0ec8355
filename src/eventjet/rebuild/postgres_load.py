"""Rows into a shadow on PostgreSQL, by COPY."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from psycopg import sql

from eventjet import failpoints
from eventjet.rebuild.refused import refusals
from eventjet.sql.own_tables import rebuilds

if TYPE_CHECKING:
    from eventjet.rebuild.load import Target


def load(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """In one transaction with the row in the ledger, which says whether another try has done it already."""
    assert target.schema is not None
    ledger = sql.Identifier(target.schema, rebuilds.name)
    connection = target.database.connect_postgres(target.purpose)
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
            sql.Identifier(target.schema, target.table), sql.SQL(", ").join(map(sql.Identifier, target.columns))
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
