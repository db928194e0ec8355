"""SQL by hand with a handler of many events, and a worker process for it.

`python -m tests.faults.writing <nats> <database> <app> <batch_max> <lease_s>`: as `tests.faults.worker`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from tests.faults.worker import work
from tests.integration import by_hand_writing
from tests.integration.by_hand import TableRows, accounts_table, bound_with
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import Added, Closed, Opened

_COUNT = text(
    "insert into totals (name, n) values (:name, 1) on conflict (name) do update set n = totals.n + excluded.n"
)


async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
    """None of them can be repeated: an event taken twice, or not at all, shows."""
    values: dict[str, Any] = {"owner": None, "amount": Decimal(0), "last_at": event.recorded_at, "notes": []}
    await connection.execute(insert(accounts_table).values(account_id=event.aggregate_id, **values))
    await connection.execute(_COUNT, {"name": "opened"})


async def added(events: Sequence[Recorded[Added]], connection: AsyncConnection) -> None:
    await by_hand_writing.added_all(events, connection)
    await connection.execute(_COUNT, [{"name": "added"}] * len(events))


async def closed(event: Recorded[Closed], connection: AsyncConnection) -> None:
    await by_hand_writing.closed(event, connection)
    await connection.execute(_COUNT, {"name": "closed"})


WRITING = bound_with(opened, added, closed)


def truth(events: list[Recorded[Any]]) -> TableRows:
    """What the tables must hold, by the plainest loop."""
    accounts: dict[str, tuple[Any, ...]] = {}
    lines: list[tuple[int, str, Decimal]] = []
    for event in events:
        own = event.aggregate_id
        if isinstance(event.data, Closed):
            lines = [line for line in lines if line[1] != own]
            del accounts[own]
            continue
        accounts[own] = (own, None, Decimal(0), event.recorded_at, [])
        if isinstance(event.data, Added):
            lines.append((event.position, own, event.data.amount))
    totals = Counter(type(event.data).__name__.lower() for event in events)
    return {"accounts": sorted(accounts.values()), "lines": lines, "totals": sorted(totals.items())}


def writing(settings: Settings, name: str) -> Ledger:
    """The log of this name with the read model over it."""
    return Ledger(settings, name=name, projections={"ledger": WRITING})


async def main(server: str, database: str, name: str, options: WorkerOptions) -> None:
    """Work until SIGTERM."""
    settings = Settings(servers=(server,), database=database)
    await work(writing(settings, name), settings, options)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    server, database, name, batch_max, lease_s = sys.argv[1:]
    options = WorkerOptions(batch_max=int(batch_max), lease_s=float(lease_s), poll_s=0.1)
    asyncio.run(main(server, database, name, options))
