"""A sweep removes only objects to which no event refers, also while commands run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventjet import App, Blob, BlobMissing, Jet, Refused, UsageError
from eventjet.archive.bodies import ArchivedBodies, archive_bodies, restore_bodies
from eventjet.dev.nats import NatsServer
from eventjet.errors import BlobDamaged, LogIncomplete, LogUnusable
from eventjet.jetstream import api
from eventjet.jetstream.api import Conversation, last_message, purge_stream, stream_info, update_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.log import sweep
from eventjet.log.objects import Bucket, ContentWriter, patiently
from eventjet.log.sweep import Objects, age_in, faults_of, references_of, sweep_objects
from eventjet.nats.endpoint import Endpoint
from tests.blobs import Document, documents
from tests.logs import fresh_name

CONTENT = bytes(range(256)) * 5_000


@pytest.fixture
def app() -> App:
    return documents(fresh_name())


@pytest.fixture
def endpoint(nats: NatsServer) -> Endpoint:
    return Endpoint((nats.url,))


@pytest.fixture
def link(endpoint: Endpoint) -> Iterator[NatsConnection]:
    with NatsConnection.open(endpoint) as link:
        yield link


@pytest.fixture
async def jet(app: App, nats: NatsServer) -> AsyncIterator[Jet]:
    async with app.connect(servers=nats.url) as jet:
        await jet.init()
        yield jet


async def run_sweep(
    link: NatsConnection, endpoint: Endpoint, name: str, age_s: float = 0, *, removes: bool = True
) -> Objects:
    return await asyncio.to_thread(sweep_objects, link, endpoint, name, age_s=age_s, removes=removes)


async def test_a_sweep_removes_only_objects_without_a_reference(
    jet: Jet, link: NatsConnection, endpoint: Endpoint
) -> None:
    await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT), (Blob.of(b"page"),))
    orphan = await jet.blobs.put(b"orphan")
    young = await run_sweep(link, endpoint, jet.name, 3_600.0)
    assert (young.objects, young.referenced, young.young, young.orphans, young.removed) == (3, 2, 1, (), 0)
    dry_run = await run_sweep(link, endpoint, jet.name, removes=False)
    assert ([reference.digest for reference in dry_run.orphans], dry_run.removed) == ([orphan.digest], 0)
    assert await jet.blobs.read(orphan) == b"orphan"
    outcome = await run_sweep(link, endpoint, jet.name)
    assert (outcome.removed, outcome.missing, outcome.orphaned_bytes) == (1, (), 6)
    with pytest.raises(BlobMissing):
        await jet.blobs.read(orphan)
    assert await jet.blobs.read(Blob.of(CONTENT)) == CONTENT
    assert (await run_sweep(link, endpoint, jet.name)).objects == 2
    assert await jet.blobs.read(await jet.blobs.put(b"orphan again")) == b"orphan again"


async def test_an_abandoned_upload_is_removed(jet: Jet, link: NatsConnection, endpoint: Endpoint) -> None:
    bucket = Bucket(jet.name)
    writer = ContentWriter(bucket)
    await asyncio.to_thread(link.run, writer.write(CONTENT), writes=True)
    assert (await run_sweep(link, endpoint, jet.name, 3_600.0)).unfinished == 0
    assert (await run_sweep(link, endpoint, jet.name)).removed_uploads == 1
    state = await asyncio.to_thread(link.ask, stream_info(bucket.stream))
    assert state.messages == 0
    with pytest.raises(Refused, match="a sweep took it"):
        await asyncio.to_thread(link.run, writer.finish(), writes=True)
    assert (await run_sweep(link, endpoint, jet.name)).objects == 0


async def test_an_orphan_to_which_a_concurrent_command_refers_is_kept(
    jet: Jet, app: App, nats: NatsServer, link: NatsConnection, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jet.blobs.put(CONTENT)
    loop = asyncio.get_running_loop()
    read = sweep.references_of

    async def refer() -> None:
        async with app.connect(servers=nats.url) as second_jet:
            await second_jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))

    def after_reading(*args: object) -> sweep.References:
        """The log is read, and then the command runs before anything is removed."""
        references = read(*args)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        asyncio.run_coroutine_threadsafe(refer(), loop).result()
        return references

    monkeypatch.setattr(sweep, "references_of", after_reading)
    outcome = await run_sweep(link, endpoint, jet.name)
    assert (len(outcome.orphans), outcome.removed) == (1, 0)
    (recorded,) = [recorded async for recorded in jet.tail()]
    assert await jet.blobs.read(recorded.data.scan) == CONTENT


async def test_a_removed_body_is_stored_again_by_the_next_command(
    jet: Jet, app: App, nats: NatsServer, link: NatsConnection, endpoint: Endpoint
) -> None:
    await jet.blobs.put(CONTENT)
    assert (await run_sweep(link, endpoint, jet.name)).removed == 1
    async with app.connect(servers=nats.url) as second_jet:
        await second_jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
        assert await second_jet.blobs.read(Blob.of(CONTENT)) == CONTENT


async def test_references_of_undeclared_events_count(
    jet: Jet, nats: NatsServer, link: NatsConnection, endpoint: Endpoint
) -> None:
    await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    references = await asyncio.to_thread(references_of, link, endpoint, jet.name)
    assert [reference.where for reference in references.values()] == ["document.filed at position 1"]
    assert (await run_sweep(link, endpoint, jet.name)).removed == 0


async def test_missing_or_damaged_bodies_are_reported_and_restored_from_an_archive(
    jet: Jet, link: NatsConnection, endpoint: Endpoint, tmp_path: Path
) -> None:
    bucket, bodies = Bucket(jet.name), ArchivedBodies(str(tmp_path / "archive"))
    blobs = [Blob.of(content) for content in (CONTENT, b"second", b"third")]
    for number, blob in enumerate(blobs):
        await jet.repository(Document).execute(f"d-{number}", Document.file, blob)
    references = await asyncio.to_thread(references_of, link, endpoint, jet.name)
    carried = await asyncio.to_thread(archive_bodies, link, jet.name, bodies, references.values())
    assert (carried.copied, carried.bytes, carried.missing) == (3, len(CONTENT) + 11, ())
    second = await asyncio.to_thread(archive_bodies, link, jet.name, bodies, references.values())
    assert (second.copied, second.present) == (0, 3)
    name = blobs[0].digest.removeprefix("sha256:")
    assert (tmp_path / "archive" / "objects" / name[:2] / name).read_bytes() == CONTENT
    assert bodies.read(blobs[1]) == b"second"

    stored = [await asyncio.to_thread(link.run, bucket.reading(blob.digest)) for blob in blobs]
    assert stored[0] is not None
    assert stored[1] is not None
    chunk = await asyncio.to_thread(link.ask, last_message(bucket.stream, bucket.chunk_subject(stored[0].token)))
    assert chunk is not None
    await asyncio.to_thread(link.ask, bucket.purging(stored[0].token, chunk[0] - 1))
    await asyncio.to_thread(link.ask, purge_stream(bucket.stream, bucket.meta_subject(stored[1].name), 10**6))
    faults = await asyncio.to_thread(lambda: list(faults_of(link, jet.name, references.values())))
    assert {reference.digest: fault for reference, fault in faults} == {
        blobs[0].digest: f"it has {len(chunk[4]):,} of {len(CONTENT):,} bytes",
        blobs[1].digest: f"the object store {bucket.name!r} does not have it",
    }
    missing = await run_sweep(link, endpoint, jet.name)
    assert [reference.digest for reference in missing.missing] == [blobs[1].digest]
    restored = await asyncio.to_thread(restore_bodies, link, jet.name, bodies, references.values())
    assert (restored.copied, restored.present, restored.missing) == (2, 1, ())
    assert [await jet.blobs.read(blob) for blob in blobs] == [CONTENT, b"second", b"third"]
    with pytest.raises(BlobMissing):
        bodies.read(f"sha256:{'0' * 64}")
    (tmp_path / "archive" / "objects" / name[:2] / name).write_bytes(b"other")
    with pytest.raises(BlobDamaged):
        bodies.read(blobs[0].digest)


async def test_a_sweep_refuses_an_incomplete_log(jet: Jet, link: NatsConnection, endpoint: Endpoint) -> None:
    await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    await jet.repository(Document).execute("d-1", Document.note, "later")
    state = await asyncio.to_thread(link.ask, stream_info(jet.name))
    await asyncio.to_thread(link.ask, update_stream({**state.config, "max_msgs": 1, "discard": "old"}))
    with pytest.raises(LogIncomplete):
        await run_sweep(link, endpoint, jet.name)
    assert await jet.blobs.read(Blob.of(CONTENT)) == CONTENT


async def test_a_sweep_refuses_the_bodies_of_another_log_until_they_are_assigned(
    jet: Jet, link: NatsConnection, endpoint: Endpoint, tmp_path: Path
) -> None:
    bucket, bodies = Bucket(jet.name), ArchivedBodies(str(tmp_path))
    await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    references = await asyncio.to_thread(references_of, link, endpoint, jet.name)
    await asyncio.to_thread(archive_bodies, link, jet.name, bodies, references.values())
    assert jet.client is not None
    await jet.client.api(f"STREAM.DELETE.{jet.name}")
    topology = await jet.init()
    assert (await run_sweep(link, endpoint, jet.name, removes=False)).orphans
    with pytest.raises(LogUnusable, match=f"nats stream edit {bucket.stream}"):
        await run_sweep(link, endpoint, jet.name)
    before = await asyncio.to_thread(link.run, bucket.reading(Blob.of(CONTENT).digest))
    restored = await asyncio.to_thread(restore_bodies, link, jet.name, bodies, references.values())
    assert (restored.present, restored.copied) == (1, 0)
    claimed = await asyncio.to_thread(link.run, bucket.reading(Blob.of(CONTENT).digest))
    assert before is not None
    assert claimed is not None
    assert claimed.position > before.position
    state = await asyncio.to_thread(link.ask, stream_info(bucket.stream))
    noted = {**state.metadata, "eventjet.log": topology.identity}
    await asyncio.to_thread(link.ask, update_stream({**state.config, "metadata": noted}))
    assert (await run_sweep(link, endpoint, jet.name)).removed == 1


async def test_a_body_stored_and_recorded_during_a_sweep_is_not_missing(
    jet: Jet, link: NatsConnection, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, read = asyncio.get_running_loop(), sweep.references_of
    repository = jet.repository(Document)

    def before_reading(*args: Any) -> sweep.References:
        filing = repository.execute("d-1", Document.file, Blob.of(CONTENT))
        asyncio.run_coroutine_threadsafe(filing, loop).result()
        return read(*args)

    monkeypatch.setattr(sweep, "references_of", before_reading)
    counted = await run_sweep(link, endpoint, jet.name, removes=False)
    assert (counted.referenced, counted.missing) == (1, ())


async def test_an_object_claimed_during_a_listing_is_listed(
    jet: Jet, link: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, blobs = Bucket(jet.name), [await jet.blobs.put(b"%d" % number) for number in range(4)]
    monkeypatch.setattr(api, "PAGE_MAX", 1)

    def reading() -> set[str]:
        conversation, answer, claims = bucket.reading_metas(), None, [blobs[3], blobs[2]]
        while True:
            try:
                request = conversation.send(answer)
            except StopIteration as stop:
                return {meta.digest for meta in stop.value}
            answer = link.run(answered(request))
            if claims:
                link.run(bucket.claiming(claims.pop().digest), writes=True)

    def answered(request: Any) -> Conversation[Any]:
        return (yield request)

    assert await asyncio.to_thread(reading) == {blob.digest for blob in blobs}


def test_the_minimum_age_is_an_hour() -> None:
    assert [age_in(text) for text in ("90m", "36h", "2d")] == [5_400.0, 129_600.0, 172_800.0]
    for text in ("", "1", "59m", "0d", "d", "-1d", "1w", "1.5h"):
        with pytest.raises(UsageError, match="an hour at least"):
            age_in(text)


def test_a_missing_bucket_is_reported_with_init(link: NatsConnection) -> None:
    bucket = Bucket(fresh_name())
    with pytest.raises(Exception, match=r"`eventjet init`"):
        link.run(patiently(bucket.reading(f"sha256:{'0' * 64}"), bucket, 5.0))
