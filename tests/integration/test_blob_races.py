"""Large bodies when answers are lost, and when other processes or programs write to the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from eventjet import App, Blob, BlobMissing, Jet, Refused, StoreUnavailable
from eventjet.dev.nats import NatsServer
from eventjet.domain.blob import CHUNK_BYTES
from eventjet.jetstream.api import Request
from eventjet.jetstream.connection import NatsConnection
from eventjet.log import sweep
from eventjet.log.objects import Bucket, ContentWriter, JetStreamObjects
from eventjet.log.sweep import Objects, sweep_objects
from eventjet.nats.endpoint import Endpoint
from tests.blobs import Document, documents
from tests.logs import fresh_name

CONTENT = bytes(range(256)) * 5_000
FILED = Blob(digest=Blob.of(CONTENT).digest, size=len(CONTENT))
"""The reference to it, without content."""


@pytest.fixture
def app() -> App:
    return documents(fresh_name())


@pytest.fixture
async def jet(app: App, nats: NatsServer) -> AsyncIterator[Jet]:
    async with app.connect(servers=nats.url) as jet:
        await jet.init()
        yield jet


@pytest.fixture
async def other(jet: Jet, app: App, nats: NatsServer) -> AsyncIterator[Jet]:
    async with app.connect(servers=nats.url) as other:
        yield other


def answers(jet: Jet, monkeypatch: pytest.MonkeyPatch, lost: Callable[[Request[Any], Any], Any]) -> None:
    """Pass each answer to a coroutine function, which may raise an error in its place."""
    client = jet.client
    assert client is not None
    ask = client.ask

    async def asking(request: Request[Any], timeout_s: float | None = None) -> Any:
        answer = await ask(request, timeout_s)
        await lost(request, answer)
        return answer

    monkeypatch.setattr(client, "ask", asking)


def is_metadata(request: Request[Any]) -> bool:
    return request.subject.startswith("$O.") and ".M." in request.subject


async def test_an_upload_whose_answer_is_lost_keeps_an_object_that_others_refer_to(
    jet: Jet, other: Jet, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    async def lose(request: Request[Any], _answer: object) -> None:
        if is_metadata(request) and not lost:
            lost.append(request.subject)
            await other.repository(Document).execute("d-2", Document.file, FILED)
            raise StoreUnavailable(request.what, "no answer")

    answers(jet, monkeypatch, lose)
    done = await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    assert (done.version, len(lost)) == (1, 1)
    assert await other.blobs.read(FILED) == CONTENT


async def test_a_failed_upload_does_not_remove_a_visible_object(
    jet: Jet, other: Jet, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []

    async def lose(request: Request[Any], _answer: object) -> None:
        if is_metadata(request) and not stored:
            stored.append(request.subject)
            await other.repository(Document).execute("d-2", Document.file, FILED)
        elif stored and b".C." in request.payload:
            raise StoreUnavailable(request.what, "no answer")

    answers(jet, monkeypatch, lose)
    assert isinstance(jet.store.objects, JetStreamObjects)
    monkeypatch.setattr(jet.store.objects, "_timeout_s", 0.2)
    with pytest.raises(StoreUnavailable):
        await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    assert await other.blobs.read(FILED) == CONTENT


@pytest.mark.parametrize("in_memory", [False, True])
async def test_the_size_of_a_reference_is_that_of_the_body(jet: Jet, app: App, *, in_memory: bool) -> None:
    async with app.in_memory() as memory:
        tried = memory if in_memory else jet
        await tried.blobs.put(CONTENT)
        wrong = Blob(digest=FILED.digest, size=5)
        with pytest.raises(Refused, match=r"says that it has 5 bytes, and it has 1,280,000"):
            await tried.repository(Document).execute("d-1", Document.file, wrong)
        with pytest.raises(Refused, match=r"says that it has 5 bytes"):
            await tried.blobs.read(wrong, max_bytes=10)
        assert await tried.repository(Document).history("d-1") == []


async def test_a_foreign_object_with_the_name_of_a_body_is_not_a_body(jet: Jet, other: Jet) -> None:
    assert jet.client is not None
    connection: Any = jet.client.nats
    name = FILED.digest.removeprefix("sha256:")
    store = await connection.jetstream().object_store(f"{jet.name}_objects")
    await store.put(name, b"other")
    with pytest.raises(BlobMissing):
        await jet.repository(Document).execute("d-1", Document.file, FILED)
    await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    assert await other.blobs.read(FILED) == CONTENT
    note = Blob.of(b"note")
    await connection.jetstream().publish(Bucket(jet.name).meta_subject(note.digest[7:]), b"no metadata")
    await jet.repository(Document).execute("d-2", Document.file, note)
    assert await other.blobs.read(note) == b"note"


async def test_a_missing_body_is_noticed_by_the_next_command(jet: Jet) -> None:
    assert jet.client is not None
    await jet.blobs.put(CONTENT)
    connection: Any = jet.client.nats
    store = await connection.jetstream().object_store(f"{jet.name}_objects")
    await store.delete(FILED.digest.removeprefix("sha256:"))
    with pytest.raises(BlobMissing, match="or not all of it"):
        await jet.repository(Document).execute("d-1", Document.file, FILED)
    await jet.repository(Document).execute("d-1", Document.file, Blob.of(CONTENT))
    assert await jet.blobs.read(FILED) == CONTENT


async def test_an_upload_that_ends_during_a_sweep_is_kept(
    jet: Jet, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, bucket, read = Endpoint((nats.url,)), Bucket(jet.name), sweep.references_of
    chunks = bytes(
        2 * CHUNK_BYTES
    )  # so the end of the upload stores no chunk, which would refuse the mark of the sweep

    def sweeping() -> Objects:
        with NatsConnection.open(endpoint) as link:
            writer = ContentWriter(bucket)
            link.run(writer.write(chunks), writes=True)

            def ending(*args: Any) -> sweep.References:
                """End the upload while the log is read."""
                link.run(writer.finish(), writes=True)
                return read(*args)

            monkeypatch.setattr(sweep, "references_of", ending)
            return sweep_objects(link, endpoint, jet.name, age_s=0, removes=True)

    swept = await asyncio.to_thread(sweeping)
    assert (swept.unfinished, swept.removed_uploads) == (1, 0)
    whole = Blob(digest=Blob.of(chunks).digest, size=len(chunks))
    await jet.repository(Document).execute("d-1", Document.file, whole)
    assert await jet.blobs.read(whole) == chunks
