"""Row classes with times, decimals and enums as keys are projected, rebuilt, verified and shown."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import delete, select, update

from eventjet.operations.events import rows_touched
from eventjet.operations.rows import live_row
from eventjet.operations.tables import revision_tables
from eventjet.projections.app_ref import AppRef
from eventjet.rebuild import rebuild, verify
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from eventjet.testing import on, projected, running
from tests.integration import keyed
from tests.integration.keyed import NAMES, Booked, Kind, Price, Size, Visit, kinds, prices, slots, visits

PATIENT_S = 300.0
NINE = datetime(2030, 7, 1, 9, tzinfo=ZoneInfo("Europe/Berlin"))
BOOKED = [
    (NINE, Kind.van, Size.large, Decimal("9.5")),
    (NINE.astimezone(UTC), Kind.car, Size.small, Decimal(10)),
    (NINE + timedelta(hours=1), Kind.car, Size.small, Decimal("100.25")),
    (NINE + timedelta(days=9), Kind.van, Size.small, Decimal("9.50")),
]
REF = AppRef.parse(f"{keyed.__name__}:visits")
UTC_NINE = "2030-07-01T07:00:00"


def rows_of(database: Database) -> dict[str, set[Any]]:
    with database.sync_engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        tables = {name: visits.projections[name].tables[0] for name in NAMES}
        return {name: set(map(tuple, connection.execute(select(table)))) for name, table in tables.items()}


async def assert_keys_are_shown_and_accepted(database: Database) -> None:
    """Assert that the keys on a page of each table lead to their rows and to the next page."""
    with database.sync_engine().connect() as connection:
        for name in NAMES:
            page = revision_tables(connection, visits, name, 1).page
            assert page is not None
            keys = [key for key, _ in page.rows]
            assert len(set(keys)) == len(keys) > 1
            after = revision_tables(connection, visits, name, 1, after=str(keys[0])).page
            assert after is not None
            assert [key for key, _ in after.rows] == keys[1:]
    for name in NAMES[:3]:
        for key in keys_of(database, name):
            with database.sync_engine().connect() as connection:
                assert live_row(connection, visits.projections[name], key)[1].row is not None, (name, key)


def keys_of(database: Database, name: str) -> list[str]:
    with database.sync_engine().connect() as connection:
        page = revision_tables(connection, visits, name, 1).page
    assert page is not None
    return [str(key) for key, _ in page.rows]


def change_rows(database: Database) -> None:
    """Change rows by hand. Not in the loop: a worker of it may have begun a transaction, which then could not end."""
    with database.sync_engine().begin() as connection:
        connection.execute(delete(kinds.table).where(kinds.table.c.kind == Kind.van))
        connection.execute(update(prices.table).values(n=7).where(prices.table.c.price == Decimal(-10)))
        connection.execute(update(slots.table).values(n=7))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("postgres", [False, True], ids=["sqlite", "postgres"])
async def test_times_decimals_and_enums_are_keys_in_every_engine(postgres: bool, engine: Any) -> None:
    async with running(visits, postgres=postgres) as jet:
        repository = jet.repository(Visit)
        for number, arguments in enumerate(BOOKED):
            result = await repository.execute(f"v-{number}", Visit.book, *arguments)
            for name in NAMES:
                await jet.caught_up(name, position=result.position, timeout_s=PATIENT_S)
        database = Database(jet.settings.database)
        live = rows_of(database)
        assert live["slots"] == {
            (NINE, 2),
            (NINE + timedelta(hours=1), 1),
            (NINE + timedelta(days=9), 1),
        }
        assert {(kind, size, wall.isoformat(), n) for kind, size, wall, n in live["kinds"]} == {
            (Kind.van, Size.large, UTC_NINE, 1),
            (Kind.car, Size.small, UTC_NINE, 1),
            (Kind.car, Size.small, "2030-07-01T08:00:00", 1),
            (Kind.van, Size.small, "2030-07-10T07:00:00", 1),
        }
        assert {price for price, _ in live["prices"]} == {
            Decimal(price) for price in ("10", "-10", "100.25", "-100.25")
        }
        await assert_keys_are_shown_and_accepted(database)

        await rebuild(REF, NAMES, jet.settings, engine=engine)
        assert rows_of(database) == live
        if engine == "spark":
            return  # the verification is the same in every session
        for name in NAMES:
            assert (await verify(REF, name, jet.settings, engine="local")).differences == 0

        await asyncio.to_thread(change_rows, database)
        for name, keys in {
            "kinds": [
                ("van", "small", (NINE + timedelta(days=9)).astimezone(UTC).replace(tzinfo=None)),
                ("van", "large", NINE.astimezone(UTC).replace(tzinfo=None)),
            ],
            "prices": [(Decimal("-10.00"),)],
            "slots": [(NINE,), (NINE + timedelta(hours=1),), (NINE + timedelta(days=9),)],
        }.items():
            report = await verify(REF, name, jet.settings, engine="local")
            assert sorted(map(str, (example.key for example in report.examples))) == sorted(
                str(tuple(part.astimezone(UTC) if isinstance(part, datetime) and part.tzinfo else part for part in key))
                for key in keys
            )
            assert report.differences == len(keys)


def test_the_rows_that_an_event_touches_have_readable_keys() -> None:
    (event,) = on("v", Booked(slot=NINE, kind=Kind.van, size=Size.large, price=Decimal(3)))
    touched = {touch.model: touch.keys for touch in rows_touched(visits, event)}
    assert touched["kinds"] == ['["van", "large", "2030-07-01 07:00:00"]']
    assert touched["prices"] == ['["3.00"]', '["-3.00"]']
    assert touched["slots"] == ['["2030-07-01 07:00:00+00:00"]']


def test_a_row_is_deleted_by_a_decimal_key() -> None:
    book = Booked(slot=NINE, kind=Kind.van, size=Size.large, price=Decimal(3))
    projected(prices, on("v", book)).rows(Price(Decimal(3), 1), Price(Decimal(-3), 1))
    projected(prices, on("v", book, book)).rows()
