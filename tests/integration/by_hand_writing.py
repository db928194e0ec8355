"""Handlers of an SQL projection that only write, with the rows they must give and a log for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from sqlalchemy import bindparam, delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from tests.integration.by_hand import (
    QUICK,
    accounts_table,
    bound_with,
    changed,
    lines_table,
    table_rows,
)
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Closed, Opened

INSERT_LINE = insert(lines_table)
TOUCH = (
    update(accounts_table).where(accounts_table.c.account_id == bindparam("own")).values(last_at=bindparam("seen_at"))
)


async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
    """Only writes."""
    values: dict[str, Any] = {"amount": Decimal(0), "last_at": event.recorded_at, "notes": []}
    await connection.execute(
        insert(accounts_table).values(account_id=event.aggregate_id, owner=event.data.owner, **values)
    )


async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
    """Handle a single event as `added_all` does."""
    await added_all([event], connection)


async def added_all(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
    """Handle a batch of events with two statements."""
    lines = [
        {"position": event.position, "account_id": event.aggregate_id, "amount": event.data.amount} for event in events
    ]
    await connection.execute(INSERT_LINE, lines)
    await connection.execute(TOUCH, [{"own": event.aggregate_id, "seen_at": event.recorded_at} for event in events])


async def closed(event: Recorded[Closed], connection: AsyncConnection) -> None:
    """Only writes."""
    await connection.execute(delete(lines_table).where(lines_table.c.account_id == event.aggregate_id))
    await connection.execute(delete(accounts_table).where(accounts_table.c.account_id == event.aggregate_id))


WRITING = bound_with(opened, added_all, closed)


async def caught_up(log: Ledger, resolved: Any, last: int, **options: Any) -> None:
    async with changed(log, resolved).working(options=replace(QUICK, **options)):
        await log.caught_up(last, resolved)


def rows(log: Ledger) -> Any:
    return table_rows(log.where)


def written(events: list[Recorded[Any]]) -> Any:
    """Return the rows that these handlers must give."""
    accounts: dict[str, tuple[Any, ...]] = {}
    lines: list[tuple[int, str, Decimal]] = []
    for event in events:
        account_id = event.aggregate_id
        match event.data:
            case Opened(owner=owner):
                accounts[account_id] = (account_id, owner, Decimal(0), event.recorded_at, [])
            case Added(amount=amount):
                lines.append((event.position, account_id, amount))
                accounts[account_id] = (*accounts[account_id][:3], event.recorded_at, [])
            case Closed():
                lines = [line for line in lines if line[1] != account_id]
                accounts.pop(account_id, None)
            case _:
                pass
    return {"accounts": sorted(accounts.values()), "lines": lines, "totals": []}


def writes(accounts: int, times: int) -> list[tuple[str, Any]]:
    """Return events that open accounts and add to them in turn; each third account is closed and reopened."""
    log: list[tuple[str, Any]] = [(f"a-{number}", Opened(owner=f"o-{number}")) for number in range(accounts)]
    for turn in range(times):
        for number in range(accounts):
            log.append((f"a-{number}", Added(amount=Decimal(turn * accounts + number))))
            if number % 3 == 0 and turn % 4 == 3:
                log += [(f"a-{number}", Closed()), (f"a-{number}", Opened(owner=f"o-{number}"))]
    return log
