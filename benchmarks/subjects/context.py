"""What one core can do of the road, without a database.

`python -m benchmarks.subjects.context <nats> <count> <how far>`. How far is frames (bytes into frames), read (frames
into records), decode (records into events) or fold (events onto rows, as a worker folds).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.bank import bank
from benchmarks.subjects.clock import Clock
from eventjet.codec.headers import RawRecord
from eventjet.codec.records import Decoder
from eventjet.jetstream.api import create_consumer
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import Deliveries, read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.fold import Fold
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.settings import Settings
from eventjet.sql.postgres import POSTGRES

BATCH = 1_000
CONSUMER = {"ack_policy": "none", "deliver_policy": "all", "mem_storage": True, "inactive_threshold": 60_000_000_000}


def main(server: str, count: int, how_far: str) -> None:
    resolved = bank.projections["account_balance"]
    assert isinstance(resolved, ResolvedProjection)
    decode = Decoder(bank.catalog, resolved.events)
    fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type, POSTGRES))
    rows: dict[Any, Any] = {}

    def take(records: list[RawRecord]) -> None:
        events = [event for record in records if (event := decode(record)) is not None]
        if how_far == "fold":
            events, keys = fold.keyed(events)
            rows.update(fold({key: rows.get(key) for key in keys}, events, keys))

    read = 0
    endpoint = Endpoint.of(Settings(servers=(server,)))
    clock = Clock()
    clock.start()
    if how_far == "frames":
        clock.stop(sum(_frames(endpoint, count)))
        return
    for records in read_range(endpoint, bank.name, 1, count + 1, batch=BATCH):
        read += len(records)
        if how_far != "read":
            take(records)
    clock.stop(read)
    if how_far == "fold" and sum(row.postings for row in rows.values()) != count:
        raise RuntimeError(f"the rows hold {sum(row.postings for row in rows.values())} of {count} postings")


def _frames(endpoint: Endpoint, count: int) -> Iterator[int]:
    """Numbers of frames as they come, none of which is looked into: what no reader of whole messages can beat."""
    left = count
    with NatsConnection.open(endpoint) as link:
        consumer = link.ask(create_consumer(bank.name, "frames", CONSUMER))
        deliveries = Deliveries(link, consumer, 0, batch=5_000, window=20_000, heartbeat_s=5, dense=False)
        while left > 0:
            deliveries.ask(left - deliveries.outstanding)
            received = sum(1 for frame in link.receive(10) if frame[2])
            deliveries.outstanding = max(0, deliveries.outstanding - received)
            left -= received
            yield received
        link.api(f"CONSUMER.DELETE.{bank.name}.frames")


if __name__ == "__main__":
    server, count, how_far = sys.argv[1:]
    main(server, int(count), how_far)
