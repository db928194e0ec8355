"""SQL by hand with more parameters than one statement may have: gathered they cross, in one they are an error."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from decimal import Decimal
from typing import Any

from sqlalchemy import event as sa_event
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from tests.integration.by_hand import QUICK, bound_with, changed
from tests.integration.by_hand_writing import added, caught_up, closed, opened, rows, written
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Opened

POSTGRES_MAX = 65_535
WIDTH = 900
"""Parameters of one row: more than a thousand are executed by themselves."""
ROWS = 150
"""Of one statement, of which the second one is the last that waits."""
SUM = " + ".join(f":b{number}" for number in range(1, WIDTH))
WIDE = text(f"insert into totals (name, n) values (:name, {SUM})")
ONES = {f"b{number}": 1 for number in range(1, WIDTH)}


def sqlite_max() -> int:
    with closing(sqlite3.connect(":memory:")) as connection:
        return connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)


async def test_statements_that_wait_may_have_more_parameters_than_one_statement_can(log: Ledger) -> None:
    executed: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        executed.append(statement)

    async def wide(event: Recorded[Added], connection: AsyncConnection) -> None:
        sync = connection.sync_connection
        assert sync is not None
        if not sa_event.contains(sync, "after_cursor_execute", note):
            sa_event.listen(sync, "after_cursor_execute", note)
        for half in range(2):
            own = range(half * ROWS, (half + 1) * ROWS)
            await connection.execute(WIDE, [ONES | {"name": f"{number:03}", "b1": number} for number in own])

    assert max(POSTGRES_MAX, sqlite_max()) < 2 * ROWS * WIDTH
    last = log.append([("a-0", Opened(owner="ada")), ("a-0", Added(amount=Decimal(1)))])
    await caught_up(log, bound_with(opened, wide, closed), last)
    assert rows(log)["totals"] == [(f"{number:03}", number + WIDTH - 2) for number in range(2 * ROWS)]
    assert [one for one in executed if "totals" in one] == [], "none was executed by itself"


async def test_one_statement_of_more_parameters_than_the_database_takes_stops_the_projection(log: Ledger) -> None:
    is_postgres = log.where.dialect.is_concurrent
    many = (POSTGRES_MAX if is_postgres else sqlite_max()) + 1
    statement = f"delete from totals where n in ({', '.join(['%s' if is_postgres else '?'] * many)})"

    async def too_many(event: Recorded[Added], connection: AsyncConnection) -> None:
        await added(event, connection)
        if event.data.amount:
            await connection.exec_driver_sql(statement, tuple(range(many)))

    log.append([("a-0", Opened(owner="ada")), *[("a-0", Added(amount=Decimal(0)))] * 3])
    bad = log.append([("a-0", Added(amount=Decimal(1)))])
    log.append([("a-0", Added(amount=Decimal(0)))])
    async with changed(log, bound_with(opened, too_many, closed)).working(options=QUICK):
        stopped = await log.failed()
    assert stopped.position == bad - 1
    assert f"position {bad} of 'a-0'" in str(stopped.reason)
    assert rows(log) == written(log.recorded(bad - 1))
