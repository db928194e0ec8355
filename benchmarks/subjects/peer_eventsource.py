"""eventsource-py: `python -m benchmarks.subjects.peer_eventsource fill|run <store> <read model> <count>`.

Its fastest form that is exactly once: a batch handler by hand, whose rows are written in the same transaction as the
library's own checkpoint. (Its `SubscriptionManager` commits the two apart, so a crash between them repeats a batch.)
Needs Python 3.13, so it may run in an environment of its own; nothing of eventjet is imported here.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from decimal import Decimal
from importlib.metadata import version
from uuid import UUID

from eventsource import (
    DomainEvent,
    ExpectedVersion,
    FeedReadOptions,
    PostgreSQLEventStore,
    SQLCheckpointRepository,
    SQLiteEventStore,
    StreamId,
    create_async_engine,
    register_event,
)
from eventsource.adapters.serialization import json_dumps
from eventsource.adapters.sql.schemas import get_schema
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from benchmarks.postings import CURRENCY, Posting, postings
from benchmarks.readmodel import POSTGRESQL, SQLITE, cents, path_of
from benchmarks.subjects.clock import Clock

BATCH = 1_000
NAME = "balances"
_EXTENSION = 'CREATE EXTENSION IF NOT EXISTS "uuid-ossp";'
BY_STORE = 200
"""The first events go in through the store; the rest by SQL, as the store writes them but in one transaction."""


@register_event
class Deposited(DomainEvent):
    aggregate_type: str = "Account"
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


@register_event
class Withdrawn(DomainEvent):
    aggregate_type: str = "Account"
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


class Balances:
    """The batch handler: sums of the batch, added in one statement."""

    _POSTGRESQL = text(
        "insert into account_balance as b "
        "select * from unnest(cast(:ids as varchar[]), cast(:sums as numeric[]), cast(:counts as int[])) "
        "on conflict (account_id) do update "
        "set balance = b.balance + excluded.balance, postings = b.postings + excluded.postings"
    )
    _SQLITE = text(
        "insert into account_balance as b values (:id, :sum, :count) on conflict (account_id) do update "
        "set balance = b.balance + excluded.balance, postings = b.postings + excluded.postings"
    )

    async def handle_batch(self, connection: AsyncConnection, events: Sequence[DomainEvent]) -> None:
        sums: dict[UUID, Decimal] = {}
        counts: dict[UUID, int] = {}
        for event in events:
            account = event.aggregate_id
            amount = event.amount if isinstance(event, Deposited) else -event.amount
            sums[account] = sums[account] + amount if account in sums else amount
            counts[account] = counts.get(account, 0) + 1
        if connection.dialect.name == "postgresql":
            ids = [str(account) for account in sums]
            values = {"ids": ids, "sums": list(sums.values()), "counts": list(counts.values())}
            await connection.execute(self._POSTGRESQL, values)
        else:
            rows = [{"id": str(key), "sum": cents(value), "count": counts[key]} for key, value in sums.items()]
            await connection.execute(self._SQLITE, rows)


async def run(store_url: str, view_url: str, count: int) -> None:
    store, engine = open_store(store_url)
    view = create_async_engine(_driver(view_url))
    await _create_view(view)
    handler = Balances()
    options = FeedReadOptions(limit=BATCH)
    position, done = None, 0
    async for _ in store.read_all(None, FeedReadOptions(limit=1)):
        pass  # connected, and its schema looked at
    clock = Clock()
    clock.start()
    while done < count:
        batch = [envelope async for envelope in store.read_all(position, options)]
        async with view.begin() as connection:
            await handler.handle_batch(connection, [envelope.event for envelope in batch])
            last = batch[-1]
            checkpoints = SQLCheckpointRepository(connection, enable_tracing=False)
            await checkpoints.save_position(NAME, last.position, last.event.event_id, last.event.event_type)
        position = last.position
        done += len(batch)
    clock.stop(done)
    await view.dispose()
    await close(store, engine)


async def fill(store_url: str, count: int) -> None:
    store, engine = open_store(store_url)
    await create_schema(engine)
    versions: dict[UUID, int] = {}
    rows: list[dict[str, object]] = []
    for number, posting in enumerate(postings(count)):
        event = _event(posting)
        account = event.aggregate_id
        versions[account] = versions.get(account, 0) + 1
        if number < BY_STORE:
            expected = ExpectedVersion.exact(versions[account] - 1)
            await store.append(StreamId(aggregate_id=account, category="Account"), [event], expected)
        else:
            rows.append(_row(event, versions[account], lite=engine is None))
    created = "now()" if engine is not None else "strftime('%Y-%m-%dT%H:%M:%f+00:00')"
    names = "event_id, event_type, aggregate_type, aggregate_id, version, timestamp, payload"
    marks = ", ".join(f":{name}" for name in names.split(", "))
    insert = text(f"insert into events ({names}, created_at) values ({marks}, {created})")
    target = engine or create_async_engine(_driver(store_url))
    async with target.begin() as connection:
        await connection.execute(insert, rows)
    if target is not engine:
        await target.dispose()
    await close(store, engine)
    print(version("eventsource-py"))


def _event(posting: Posting) -> DomainEvent:
    account, is_deposit, tx_id, amount, memo = posting
    event_class = Deposited if is_deposit else Withdrawn
    return event_class(aggregate_id=account, tx_id=tx_id, amount=Decimal(amount), currency=CURRENCY, memo=memo)


def _row(event: DomainEvent, number: int, *, lite: bool) -> dict[str, object]:
    return {
        "event_id": str(event.event_id) if lite else event.event_id,
        "event_type": event.event_type,
        "aggregate_type": "Account",
        "aggregate_id": str(event.aggregate_id) if lite else event.aggregate_id,
        "version": number,
        "timestamp": event.occurred_at.isoformat() if lite else event.occurred_at,
        "payload": json_dumps(event.model_dump(mode="json")),
    }


def open_store(url: str, pool_size: int = 5) -> tuple[PostgreSQLEventStore | SQLiteEventStore, AsyncEngine | None]:
    if url.startswith("sqlite"):
        return SQLiteEventStore(path_of(url), wal_mode=True), None
    engine = create_async_engine(_driver(url), pool_size=pool_size)
    return PostgreSQLEventStore(engine), engine


async def create_schema(engine: AsyncEngine | None) -> None:
    """The library's tables on PostgreSQL; on SQLite the store makes its own."""
    if engine is not None:
        async with engine.begin() as connection:
            await _script(connection, get_schema("all"))


async def _create_view(view: AsyncEngine) -> None:
    is_sqlite = view.dialect.name == "sqlite"
    async with view.begin() as connection:
        await _script(connection, get_schema("all", backend="sqlite" if is_sqlite else "postgresql"))
        await connection.execute(text(SQLITE if is_sqlite else POSTGRESQL))


async def _script(connection: AsyncConnection, script: str) -> None:
    # The embedded PostgreSQL has no contrib modules; the library's ids are made by the client.
    script = script.replace(_EXTENSION, "")
    raw = (await connection.get_raw_connection()).driver_connection
    assert raw is not None
    await (raw.executescript(script) if connection.dialect.name == "sqlite" else raw.execute(script))


async def close(store: object, engine: AsyncEngine | None) -> None:
    if isinstance(store, SQLiteEventStore):
        await store.close()
    if engine is not None:
        await engine.dispose()


def _driver(url: str) -> str:
    return url.replace("+psycopg", "+asyncpg").replace("sqlite:", "sqlite+aiosqlite:")


if __name__ == "__main__":
    command, store, view, count = sys.argv[1:]
    asyncio.run(fill(store, int(count)) if command == "fill" else run(store, view, int(count)))
