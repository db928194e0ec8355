"""Read models of `App.in_memory` are up to date at once, with the rows that a worker would write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.pool import NullPool

from eventjet import App, NotCaughtUp, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.examples.bank.read_models import balances
from eventjet.examples.orders.goods import Shipment
from eventjet.testing import on, projected, world


async def test_rows_have_a_recorded_event_after_caught_up() -> None:
    async with bank.in_memory() as jet:
        accounts = jet.repository(Account)
        await accounts.execute("a-1", Account.open, "ada")
        for amount in (3, 4):
            done = await accounts.execute("a-1", Account.deposit, Decimal(amount))
            for name in bank.projections:
                await jet.caught_up(name, position=done.position)
        await jet.caught_up(balances, token=done.token)
        database = jet.settings.database
        with create_engine(database, poolclass=NullPool).connect() as connection:
            rows = connection.execute(select(balances.table)).all()
        history = [event.data for event in await accounts.history("a-1")]
    assert [tuple(row)[:2] for row in rows] == [("a-1", "ada")]
    row = projected(balances, on("a-1", *history)).row()
    assert rows[0].amount == row.amount == Decimal(7)
    assert not Path(database.removeprefix("sqlite:///")).exists()


async def test_a_position_beyond_the_log_is_never_reached() -> None:
    async with bank.in_memory() as other, bank.in_memory() as jet:
        done = await other.repository(Account).execute("a-1", Account.open, "ada")
        with pytest.raises(NotCaughtUp, match=r"is at position 0 and did not reach 1 .*the log ends at position 0"):
            await jet.caught_up(balances, position=done.position)
        await jet.repository(Account).execute("a-1", Account.open, "ada")
        with pytest.raises(NotCaughtUp, match="another log"):
            await jet.caught_up(balances, token=done.token)


async def test_a_world_has_read_models_and_events_with_their_recorded_time() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    async with world(bank, now=now) as here:
        accounts = here.jet.repository(Account)
        await accounts.execute("a-1", Account.open, "ada")
        await here.pass_time(timedelta(days=1, microseconds=3))
        done = await accounts.execute("a-1", Account.deposit, Decimal(2))
        await here.jet.caught_up(balances, position=done.position)
        with create_engine(here.jet.settings.database, poolclass=NullPool).connect() as connection:
            assert connection.execute(select(balances.table.c.amount)).scalars().all() == [Decimal(2)]
        times = [event.recorded_at for event in await accounts.history("a-1")]
    assert times == [now, now + timedelta(days=1, microseconds=3)]


async def test_caught_up_is_refused_for_an_app_without_read_models() -> None:
    async with App("empty", aggregates=[Shipment]).in_memory() as jet:
        with pytest.raises(UsageError, match="has no"):
            await jet.caught_up("balances", position=1)
