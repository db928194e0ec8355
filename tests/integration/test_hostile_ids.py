"""On a real server each hostile id reaches only its own history, and no id breaks the connection."""

from __future__ import annotations

import asyncio
import os

from eventjet.codec.catalog import EncodedEvent
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import encode_id, new_event_id
from eventjet.errors import Refused
from eventjet.jetstream.client import connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.store import Append, NewEvent
from eventjet.log.topology import declare
from eventjet.settings import Settings
from tests.hostile_ids import hostile_ids
from tests.logs import fresh_name

SAMPLE = int(os.environ.get("EVENTJET_TEST_IDS", "2000"))
AT_ONCE = 64


def event(body: bytes) -> NewEvent:
    return NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, body))


def is_possible(aggregate_id: str) -> bool:
    try:
        encode_id(aggregate_id)
    except Refused:
        return False
    return True


async def test_no_hostile_id_reads_another_history_or_breaks_the_connection(eventjet_nats: NatsServer) -> None:
    settings = Settings(servers=(eventjet_nats.url,))
    client = await connect(settings)
    app = fresh_name()
    await declare(client, app, 1)
    store = JetStreamStore(app, client, save_timeout_s=20.0)
    assert client.nats is not None
    ids = list(dict.fromkeys(hostile_ids(2 * SAMPLE, seed=7)))[:SAMPLE]
    assert len(ids) == SAMPLE
    limit = asyncio.Semaphore(AT_ONCE)
    # Another program has published to subjects whose last token would be a wildcard.
    for literal in ("*", ">", "$JS", "=41"):
        await client.request(f"{app}.thing.{literal}", b"a stranger's")

    async def store_event(number: int, aggregate_id: str) -> int | None:
        async with limit:
            try:
                return await store.append([Append("thing", aggregate_id, 0, 0, (event(str(number).encode()),))])
            except Refused:
                return None

    async def read_history(aggregate_id: str) -> list[tuple[int, bytes]]:
        async with limit:
            return [(record[0], record[4]) for record in await store.history("thing", aggregate_id)]

    async def last_position(aggregate_id: str) -> int:
        async with limit:
            return await store.last("thing", aggregate_id)

    positions = await asyncio.gather(*(store_event(number, aggregate_id) for number, aggregate_id in enumerate(ids)))
    stored = {
        aggregate_id: (positions[number], str(number).encode())
        for number, aggregate_id in enumerate(ids)
        if positions[number]
    }
    assert set(stored) == set(filter(is_possible, ids))
    assert len(stored) > SAMPLE // 2
    assert len(stored) < len(ids)
    histories = await asyncio.gather(*map(read_history, stored))
    assert dict(zip(stored, histories, strict=True)) == {
        aggregate_id: [record] for aggregate_id, record in stored.items()
    }
    lasts = await asyncio.gather(*map(last_position, stored))
    assert lasts == [position for position, _ in stored.values()]

    assert client.nats.is_connected
    assert client.nats.stats["reconnects"] == 0
    await store.settle()
    await client.close()
