"""Batches of 1, 7 and 1,000 give the same rows, and refuse the same event for the same reason after the same rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import text

from eventjet.dev.nats import NatsServer
from eventjet.errors import Unreachable
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.status import status
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, Added, Opened, database_with, folded, rows_of
from tests.tables import reading

SIZES = (1, 7, 1_000)
LARGEST = Decimal("9999999999.99")
MISFITS: dict[str, list[tuple[str, Any]]] = {
    "nothing": [],
    "a fraction of a cent": [("a-1", Added(amount=Decimal("0.005")))],
    "an amount of eleven digits": [("b-1", Added(amount=LARGEST + 1))],
    "a sum of eleven digits": [("b-1", Added(amount=LARGEST)), ("b-1", Added(amount=Decimal(1)))],
    "a name of 21 characters": [("a-1", Opened(owner="x" * 21))],
    "a NUL in a name": [("a-1", Opened(owner="a\0b"))],
    "a name that a unique index holds": [("u-1", Opened(owner="u")), ("u-2", Opened(owner="u"))],
}
"""Events of which the last one cannot be applied."""


async def worked(ledger: Ledger, size: int, last: int) -> tuple[Any, ...]:
    """Let a worker read the log in such batches to its end or to where it stops; return its state, reason and rows."""

    async def is_over() -> bool:
        try:
            balance = next(
                (projection for projection in await status(ledger, ledger.settings) if projection.name == "balances"),
                None,
            )
        except Unreachable:  # the database ends a session that is idle for long, and this machine may be busy
            return False
        return balance is not None and (
            balance.state == "failed" or (balance.state, balance.position) == ("active", last)
        )

    options = WorkerOptions(batch_max=size, lease_s=2.0, poll_s=0.1)
    async with ledger.working("balances", options=options):
        await eventually(is_over, f"the end of the log in batches of {size}")
    balance = next(projection for projection in await status(ledger, ledger.settings) if projection.name == "balances")
    return balance.state, balance.position, balance.reason, await asyncio.to_thread(rows, ledger)


def rows(ledger: Ledger) -> list[Any]:
    with reading(ledger.settings.database) as connection:
        return rows_of(connection, BALANCES)


@pytest.mark.parametrize("misfit", MISFITS)
async def test_batches_of_any_size_end_alike(
    misfit: str,
    eventjet_nats: NatsServer,
    new_database: Callable[[], str],
) -> None:
    ledger = Ledger(Settings(servers=(eventjet_nats.url,)))
    ledger.create()
    ledger.append(history(150, accounts=10))
    # A position is stored with its event's id, so events that nobody takes right before a bad one are not counted.
    last = bad = ledger.append([("a-1", Added(amount=Decimal(1))), *MISFITS[misfit]])
    if not MISFITS[misfit]:
        bad += 1
    last = ledger.append(history(20, seed=8))
    results: list[tuple[Any, ...]] = []
    for size in SIZES:
        url = new_database()
        engine = database_with(url, BALANCES, MOVEMENTS).sync_engine()
        with engine.begin() as connection:
            connection.execute(text("create unique index one_u on balances (owner) where owner = 'u'"))
        engine.dispose()
        own = replace(ledger, settings=replace(ledger.settings, database=url))
        results.append(await worked(own, size, last))
    assert results[0] == results[1] == results[2]
    state, position, reason, table = results[0]
    if misfit == "nothing":
        assert (state, position) == ("active", last)
    else:
        assert (state, position) == ("failed", bad - 1)
        assert f"position {bad} of " in reason
    assert table == folded(ledger.recorded(position))
