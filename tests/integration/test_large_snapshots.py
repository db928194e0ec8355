"""States that are larger than a value of the bucket have snapshots, too."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from eventjet import App, aggregate, event
from eventjet.codec.subjects import snapshot_bucket
from eventjet.dev.nats import NatsServer
from eventjet.jetstream.api import reading_values
from eventjet.log.snapshots import VALUE_MAX, Bucket, KeyValueSnapshots, SnapshotCodec
from tests.logs import fresh_name


@event("book.written")
class Written:
    text: str


@aggregate("book", snapshot_every=2)
class Book:
    text: str = ""

    def write(self, text: str) -> Written:
        return Written(text=text)

    def evolve(self, event: Written) -> Book:
        return replace(self, text=self.text + event.text)


async def test_a_large_state_has_a_snapshot_in_parts_and_mixed_parts_are_ignored(nats: NatsServer) -> None:
    app = App(fresh_name(), aggregates=[Book])
    codec = SnapshotCodec[Book](Book)
    pages = ["a" * 700_000, "b" * 700_000, "c" * 700_000, "d" * 700_000]
    async with app.connect(servers=nats.url) as jet:
        await jet.init()
        for page in pages:
            await jet.repository(Book).execute("b-1", Book.write, page)
        assert jet.client is not None
        snapshots = KeyValueSnapshots(snapshot_bucket(app.name), jet.client)

        async def has_snapshot() -> bool:
            value = await snapshots.get("book", "b-1")
            folded = None if value is None else codec.decode(value)
            return folded is not None and folded.version == 4

        async with asyncio.timeout(60):
            while not await has_snapshot():
                await asyncio.sleep(0.05)
        async with app.connect(servers=nats.url) as other:
            assert (await other.repository(Book).load("b-1")).text == "".join(pages)
        parts = await jet.client.run(reading_values(snapshot_bucket(app.name), "book.b-1.*"))
        assert [len(part[4]) for part in parts] == [VALUE_MAX, VALUE_MAX, VALUE_MAX, len(parts[3][4])]

        await jet.client.ask(Bucket(snapshot_bucket(app.name)).write("book.b-1.2", b"of another snapshot"))
        value = await snapshots.get("book", "b-1")
        assert value is not None
        assert codec.decode(value) is None
        async with app.connect(servers=nats.url) as other:
            assert (await other.repository(Book).load("b-1")).text == "".join(pages)

        small = b'{"small":1}'
        await snapshots.put("book", "b-1", small)
        assert await snapshots.get("book", "b-1") == small
