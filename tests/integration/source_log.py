"""Helpers for the tests of the data source: logs of the bank's events, and a query that ends at their end."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException

from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Deposited, Opened, Withdrawn
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.integration.ledger_log import Ledger

EVENTS = Catalog([Opened, Deposited, Withdrawn])
"""The events without their aggregate, since the log's subjects belong to another aggregate."""


def bank_log(nats: NatsServer, events: int = 0) -> Ledger:
    """Return a new log, with an identity."""
    log = Ledger(Settings.load({"servers": nats.url}, {}), catalog=EVENTS, projections={})
    log.create()
    if events:
        fill(log, events)
    return log


def fill(log: Ledger, count: int) -> int:
    """Append random movements of twenty accounts; return the last position."""
    chance = random.Random(count)

    def movement() -> Any:
        amount = Decimal(chance.randrange(1, 100_000)) / 100
        return chance.choice((Opened(owner="ada"), Deposited(amount=amount), Withdrawn(amount=amount)))

    return log.append((f"a-{chance.randrange(20)}", movement()) for _ in range(count))


def turnover(log: Ledger, last: int) -> dict[str, int]:
    """Return the cents that moved on each account, by a plain loop."""
    cents: dict[str, int] = {}
    for event in log.recorded(last):
        amount = getattr(event.data, "amount", Decimal(0))
        cents[event.aggregate_id] = cents.get(event.aggregate_id, 0) + int(amount * 100)
    return cents


def frame_of(spark: Any, nats: NatsServer, stream: str, *, streaming: bool = False, **options: str) -> Any:
    """Return a DataFrame of a log."""
    reader = spark.readStream if streaming else spark.read
    return reader.format("jetstream").options(servers=nats.url, stream=stream, **options).load()


def run_stream(frame: Any, checkpoint: Path, take: Callable[[Any, int], None], tries: int = 3) -> None:
    """Feed micro-batches to `take` until all that was there at the start is read; raises what failed the query.

    A query whose Python has not started within the 10 s that Spark gives it is begun again, before its first batch.
    """
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(120), "the query did not end"
    except StreamingQueryException as error:
        if tries == 1 or not all(text in str(error) for text in ("worker failed to connect back", "INITIALIZING")):
            raise
        run_stream(frame, checkpoint, take, tries - 1)
    finally:
        query.stop()


def positions_of(frame: Any) -> list[int]:
    return sorted(row.position for row in frame.select("position").collect())


def api(nats: NatsServer, subject: str, body: object = None) -> Any:
    """Send a JetStream request that eventjet itself never sends."""
    with NatsConnection.open(Endpoint((nats.url,))) as link:
        return link.api(subject, body)
