"""Deploys of one app for the tests of revisions, and a worker process of any: `python -m tests.integration.deploys
<deploy> <nats> <database> <app>`. It prints `ready` once it works or stands by, and ends in good order on SIGTERM.

`old` is the ledger of `projecting`. In `fold` its balances are at revision 2, with another fold, another column and
another index. `schema` has besides a new schema of one event, which `old` cannot read.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, Numeric, String, Table

from eventjet.codec.catalog import Catalog, upcaster
from eventjet.domain.aggregate import event
from eventjet.domain.recorded import Recorded
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.forked import ForkedWorker
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import (
    BALANCES,
    CATALOG,
    MOVEMENTS,
    Added,
    Closed,
    Movement,
    Noted,
    Opened,
    balances,
    movements_table,
)

ROOT = Path(__file__).parents[2]
OPTIONS = WorkerOptions(batch_max=200, lease_s=2.0, poll_s=0.1, backoff_s=(0.1, 0.5))

newer_table = Table(
    "balances",
    MetaData(),
    Column("account_id", String(40), primary_key=True),
    Column("owner", String(20)),
    Column("amount", Numeric(12, 2), nullable=False),
    Column("events", Integer, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("cents", Integer, nullable=False),
    Index("ix_balances_owner", "owner"),
    Index("ix_balances_last", "last"),
)


@dataclass(frozen=True, slots=True)
class NewerBalance:
    account_id: str
    owner: str | None = None
    amount: Decimal = Decimal(0)
    events: int = 1_000
    last: int = 0
    cents: int = 0


@event("ledger.added", schema=2)
class NewerAdded:
    amount: Decimal
    currency: str


@upcaster("ledger.added", schema=1)
def to_currency(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "currency": "EUR"}


NEWER_CATALOG = Catalog([Opened, NewerAdded, Closed, Noted], [to_currency])


def changed(row: NewerBalance | None, event: Recorded[Any]) -> NewerBalance | None:
    """Count from a thousand, write the owner in capitals, and keep cents."""
    row = row or NewerBalance(event.aggregate_id)
    row = replace(row, events=row.events + 1, last=event.position)
    match event.data:
        case Opened(owner=owner):
            return replace(row, owner=owner.upper())
        case Added(amount=amount) | NewerAdded(amount=amount):
            total = row.amount + amount
            return replace(row, amount=total, cents=int(total * 100))
        case _:
            return None


@projection("balances", table=newer_table, revision=2)
def balances_2(row: NewerBalance | None, event: Recorded[Opened | Added | Closed]) -> NewerBalance | None:
    return changed(row, event)


@projection("balances", table=newer_table, revision=2)
def balances_2_schema_2(row: NewerBalance | None, event: Recorded[Opened | NewerAdded | Closed]) -> NewerBalance | None:
    return changed(row, event)


@entries("movements", table=movements_table)
def movements_schema_2(event: Recorded[NewerAdded]) -> Movement | None:
    return Movement(event.position, event.aggregate_id, event.data.amount)


NEWER = resolve(balances_2, CATALOG)
NEWER_SCHEMA = resolve(balances_2_schema_2, NEWER_CATALOG)
MOVEMENTS_SCHEMA = resolve(movements_schema_2, NEWER_CATALOG)

DEPLOYS: dict[str, tuple[Catalog, tuple[ResolvedProjection, ...]]] = {
    "old": (CATALOG, (BALANCES, MOVEMENTS)),
    "fold": (CATALOG, (NEWER, MOVEMENTS)),
    "schema": (NEWER_CATALOG, (NEWER_SCHEMA, MOVEMENTS_SCHEMA)),
}


def as_before(row: Any, event: Recorded[Any]) -> Any:
    """Fold as revision 1 does, over events of both schemas."""
    data = event.data
    return balances(row, replace(event, data=Added(amount=data.amount)) if isinstance(data, NewerAdded) else event)


FOLDS: dict[int, Callable[[Any, Recorded[Any]], Any]] = {1: as_before, 2: changed}


def deployed(deploy: str, settings: Settings, name: str) -> Ledger:
    """Return the app as this deploy declares it."""
    catalog, resolved = DEPLOYS[deploy]
    return Ledger(
        settings,
        name=name,
        catalog=catalog,
        projections={resolved_projection.name: resolved_projection for resolved_projection in resolved},
    )


class Worker(ForkedWorker):
    """A worker process of a deploy."""

    def __init__(self, deploy: str, ledger: Ledger, **more: str) -> None:
        place = (deploy, ledger.settings.servers[0], ledger.settings.database, ledger.name)
        super().__init__("tests.integration.deploys", place, **more)

    def drain(self) -> str:
        """End the process with SIGTERM; return what it logged."""
        self.process.send_signal(signal.SIGTERM)
        logged = self.ended()
        assert self.process.returncode == 0, logged
        return logged


async def main(deploy: str, server: str, database: str, name: str) -> None:
    """Work until SIGTERM."""
    settings = Settings(servers=(server,), database=database)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_workers(
        deployed(deploy, settings, name),
        settings,
        stop=stop,
        on_ready=lambda: print("ready", flush=True),  # noqa: T201
        options=OPTIONS,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(main(*sys.argv[1:]))
