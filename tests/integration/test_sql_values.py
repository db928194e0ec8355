"""Values that handlers write through the declared tables come back equal, or are refused."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from tests.integration import by_hand
from tests.integration.by_hand import QUICK, accounts_table, bound_with, kinds_table, log_of, table_rows, totals_table
from tests.integration.projecting import Added, Opened


async def test_values_of_every_type_are_read_back_equal_through_the_declared_table(
    eventjet_nats: NatsServer, database: str
) -> None:
    values: dict[str, Any] = {
        "money": Decimal("1234567890123456.7891"),
        "any": Decimal("0.10"),
        "at": datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=2))),
        "wall": datetime(2026, 3, 1, 12, 30, 15, 123456),  # noqa: DTZ001 - a wall time
        "day": date(2026, 3, 1),
        "doc": {"b": [1, 2.5, None], "a": "ü"},
        "id": UUID(int=7),
        "raw": b"\0\xff",
        "flag": True,
    }

    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        own: dict[str, Any] = {"position": event.position, "seen": event.recorded_at}
        await connection.execute(insert(kinds_table).values(**own, **values))
        row = (await connection.execute(select(kinds_table).where(kinds_table.c.position == event.position))).one()
        assert row._asdict() == own | values
        await connection.execute(insert(kinds_table).values(position=-event.position, seen=event.recorded_at))

    resolved = bound_with(opened, tables=[kinds_table])
    log = log_of(eventjet_nats, database, resolved)
    last = log.append([("a", Opened(owner="ada"))] * 2)
    async with log.working(options=QUICK):
        await log.caught_up(last, resolved)
    rows = table_rows(log.where, tables=[kinds_table])["kinds"]
    assert len(rows) == 4
    nothing = (None,) * (len(values) - 1)  # `table_rows` leaves ids out
    recorded_times = {event.position: event.recorded_at for event in log.recorded(last)}
    stored_values = tuple(value for name, value in values.items() if name != "id")
    assert rows == [
        *[(-position, *nothing, recorded_times[position]) for position in (2, 1)],
        *[(position, *stored_values, recorded_times[position]) for position in (1, 2)],
    ]
    assert rows[2][3].utcoffset() == timedelta(0)


LONG = "x" * 25


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (insert(totals_table).values(name=LONG, n=1), "totals.name holds 20 characters, and 25 were given"),
        (
            insert(totals_table).values([{"name": "short", "n": 1}, {"name": LONG, "n": 1}]),
            "totals.name holds 20 characters, and 25 were given",
        ),
        (
            update(totals_table).values(name=LONG).where(totals_table.c.name == "seen"),
            "totals.name holds 20 characters, and 25 were given",
        ),
        (
            update(totals_table).values(name=totals_table.c.name + LONG),
            "holds 40, accounts.owner holds 40; the longest text given is 'name_1' with 25",
        ),
        (
            text("insert into totals (name, n) values (:given, 1)").bindparams(given=LONG),
            "totals.name holds 20, accounts.account_id holds 40",
        ),
    ],
    ids=["a row", "several rows", "a change", "computed", "text by hand"],
)
async def test_a_text_that_is_too_long_is_reported_with_its_column(
    eventjet_nats: NatsServer, eventjet_database: str, statement: Any, problem: str
) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        await connection.execute(insert(totals_table).values(name="seen", n=1))
        await connection.execute(statement)

    resolved = bound_with(opened, tables=[totals_table, by_hand.accounts_table])
    log = log_of(eventjet_nats, eventjet_database, resolved)
    log.append([("a", Opened(owner="ada"))])
    async with log.working(options=QUICK):
        stopped = await log.failed()
    assert "position 1 of 'a': StringDataRightTruncation: " in str(stopped.reason)
    assert problem in str(stopped.reason)
    assert LONG not in str(stopped.reason)


@pytest.mark.parametrize("value", [Decimal("0.00005"), Decimal("1e20")])
async def test_a_value_that_sqlite_cannot_store_exactly_is_refused(
    eventjet_nats: NatsServer, tmp_path: Path, value: Any
) -> None:
    async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
        own = {"position": event.position, "seen": event.recorded_at}
        await connection.execute(insert(kinds_table).values(**own, money=value))

    resolved = bound_with(opened, tables=[kinds_table])
    log = log_of(eventjet_nats, f"sqlite:///{tmp_path}/read.db", resolved)
    log.append([("a", Opened(owner="ada"))])
    async with log.working(options=QUICK):
        stopped = await log.failed()
    assert f"position 1 of 'a': UnfitValue: {kinds_table.name}.money: it " in str(stopped.reason)


async def test_inexact_sums_of_sqlite_are_refused(eventjet_nats: NatsServer, tmp_path: Path) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        own = accounts_table.c.account_id == event.aggregate_id
        by = accounts_table.c.amount + event.data.amount
        result = await connection.execute(update(accounts_table).where(own).values(amount=by))
        assert result.rowcount == 1

    log = log_of(eventjet_nats, f"sqlite:///{tmp_path}/read.db", bound_with(by_hand.opened, added, by_hand.closed))
    amounts = [Decimal("0.11"), Decimal("0.22"), Decimal("0.07")]
    log.append([("a", Opened(owner="ada")), *[("a", Added(amount=amount)) for amount in amounts]])
    async with log.working(options=QUICK):
        stopped = await log.failed()
    assert "position 4 of 'a': IntegrityError: CHECK constraint failed" in str(stopped.reason)
    assert table_rows(log.where)["accounts"][0][2] == Decimal("0.33")
