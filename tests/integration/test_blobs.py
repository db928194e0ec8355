"""Large bodies are stored before their events, read by their digest, shared and swept."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from eventjet import App, Blob, BlobDamaged, BlobMissing, DefinitionError, Imported, Jet, Refused, UsageError
from eventjet.dev.nats import NatsServer
from eventjet.domain.blob import CHUNK_BYTES, blobs_in, source_of
from eventjet.errors import StreamFull
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.api import messages_of, purge_stream, stream_info, update_stream
from eventjet.jetstream.client import Client
from eventjet.log.objects import Bucket
from tests.blobs import Document, Filed, documents
from tests.logs import fresh_name

LARGE = b"".join(sha256(str(number).encode()).digest() for number in range(60_000))
"""A content of 1.9 MB, which is three chunks and a half."""


@pytest.fixture
def app() -> App:
    return documents(fresh_name())


@pytest.fixture(params=["server", "memory"])
async def jet(request: pytest.FixtureRequest, app: App, nats: NatsServer) -> AsyncIterator[Jet]:
    in_memory = request.param == "memory"
    async with app.in_memory() if in_memory else app.connect(servers=nats.url) as jet:
        if not in_memory:
            await jet.init()
        yield jet


@pytest.fixture
async def stored(app: App, nats: NatsServer) -> AsyncIterator[Jet]:
    """Yield a connection to a log on a server."""
    async with app.connect(servers=nats.url) as jet:
        await jet.init()
        yield jet


def client_of(jet: Jet) -> Client:
    assert jet.client is not None
    return jet.client


async def chunks_stored(jet: Jet) -> int:
    bucket = Bucket(jet.name)
    return await client_of(jet).ask(messages_of(bucket.stream, bucket.chunk_subject("*")))


async def test_a_body_is_not_saved_in_place_of_a_folder(
    jet: Jet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = await jet.blobs.put(b"content")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, ".", ""):
        with pytest.raises(OSError, match=r"(?i)directory|busy|exists"):
            await jet.blobs.save(blob, folder)
    assert not list(tmp_path.iterdir())


async def test_a_body_is_stored_with_its_event_and_read_by_its_digest(jet: Jet, tmp_path: Path) -> None:
    file = tmp_path / "scan.pdf"
    file.write_bytes(LARGE)
    blob = Blob.from_file(file)
    assert (blob.size, blob.media_type, blob.name) == (len(LARGE), "application/pdf", "scan.pdf")
    done = await jet.repository(Document).execute("d-1", Document.file, blob)
    assert done.state.scan == blob
    (recorded,) = [recorded async for recorded in jet.tail()]
    reference = recorded.data.scan
    assert reference == blob
    assert source_of(reference) is None
    assert await jet.blobs.read(reference) == LARGE
    assert [len(chunk) async for chunk in jet.blobs.chunks(reference)] == [CHUNK_BYTES] * 3 + [len(LARGE) % CHUNK_BYTES]
    await jet.blobs.save(reference, tmp_path / "copy.pdf")
    assert (tmp_path / "copy.pdf").read_bytes() == LARGE
    sink = io.BytesIO()
    await jet.blobs.save(reference, sink)
    assert sink.getvalue() == LARGE


@pytest.mark.parametrize("content", [b"", b"x", bytes(CHUNK_BYTES), bytes(CHUNK_BYTES + 1), bytes(2 * CHUNK_BYTES)])
async def test_a_body_of_any_size_is_read_back(jet: Jet, content: bytes) -> None:
    blob = await jet.blobs.put(content, media_type="text/plain", name="n.txt")
    assert (blob.size, blob.media_type, blob.name) == (len(content), "text/plain", "n.txt")
    assert await jet.blobs.read(blob) == content


async def test_content_comes_from_bytes_paths_files_and_iterators(jet: Jet, tmp_path: Path) -> None:
    file = tmp_path / "scan"
    file.write_bytes(LARGE)

    async def arriving() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 100_000):
            yield LARGE[start : start + 100_000]

    with file.open("rb") as opened:
        blobs = [await jet.blobs.put(content) for content in (LARGE, file, opened, arriving())]
    assert {blob.digest for blob in blobs} == {f"sha256:{sha256(LARGE).hexdigest()}"}
    assert await jet.blobs.read(blobs[0]) == LARGE

    async def texts() -> AsyncIterator[str]:
        yield "text"

    for text in ("a path as text", 3, io.StringIO("text"), texts()):
        with pytest.raises(UsageError, match="is no content"):
            await jet.blobs.put(text)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_a_saved_file_gets_the_mode_of_the_replaced_file_or_of_a_new_file(jet: Jet, tmp_path: Path) -> None:
    blob = await jet.blobs.put(b"content")
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(0o640)
    (tmp_path / "other").write_bytes(b"")
    for name in ("old", "new"):
        await jet.blobs.save(blob, tmp_path / name)
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


async def test_a_save_that_is_cancelled_at_its_end_is_cancelled(
    jet: Jet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, replace_file = await jet.blobs.put(b"content"), Path.replace
    replaced, cancelled = threading.Event(), threading.Event()

    def slowly(self: Path, target: Path) -> Path:
        path = replace_file(self, target)
        replaced.set()
        cancelled.wait(60)
        return path

    monkeypatch.setattr(Path, "replace", slowly)
    saving = asyncio.create_task(jet.blobs.save(blob, tmp_path / "file"))
    await asyncio.to_thread(replaced.wait, 60)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    cancelled.set()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


async def test_raw_files_read_and_write_a_whole_body(jet: Jet) -> None:
    class Slow(io.RawIOBase):
        content = b""
        reads = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes | None:
            self.reads += 1
            return None if self.reads % 2 else LARGE[(start := (self.reads // 2 - 1) * size) : start + size]

        def write(self, data: Any) -> int:
            part = bytes(data)[:65_536]
            self.content += part
            return len(part)

    sink = Slow()
    blob = await jet.blobs.put(cast("BinaryIO", Slow()))
    assert blob.size == len(LARGE)
    await jet.blobs.save(blob, cast("BinaryIO", sink))
    assert sink.content == LARGE


async def test_a_copy_of_a_blob_without_content_is_refused(jet: Jet) -> None:
    copy = replace(Blob.of(b"content"), name="other.txt")
    with pytest.raises(BlobMissing, match=r"This `Blob` has no content with it, nor has a copy that `replace` made"):
        await jet.repository(Document).execute("d-1", Document.file, copy)


def test_a_blob_has_no_subclasses() -> None:
    with pytest.raises(DefinitionError, match="Scan: `Blob` has no subclasses"):
        type("Scan", (Blob,), {})


async def test_a_large_body_is_read_in_chunks_or_with_an_explicit_limit(jet: Jet) -> None:
    blob = await jet.blobs.put(LARGE)
    with pytest.raises(Refused, match=r"1,920,000 bytes, and max_bytes is 1,000"):
        await jet.blobs.read(blob, max_bytes=1_000)
    assert await jet.blobs.read(blob, max_bytes=blob.size) == LARGE


async def test_an_event_may_not_refer_to_a_missing_body(jet: Jet) -> None:
    unknown = Blob(digest=f"sha256:{'0' * 64}", size=3)
    pages = (Blob.of(b"one"), unknown)
    with pytest.raises(
        BlobMissing, match=r"to which the field pages\[1\] of document.filed refers.*Nothing is recorded"
    ) as caught:
        await jet.repository(Document).execute("d-1", Document.file, Blob.of(b"scan"), pages)
    assert caught.value.digest == unknown.digest
    assert isinstance(caught.value, Refused)
    assert await jet.repository(Document).history("d-1") == []
    with pytest.raises(BlobMissing):
        await jet.blobs.read(unknown)


async def test_an_event_may_refer_to_a_body_that_is_stored(jet: Jet) -> None:
    repository = jet.repository(Document)
    await repository.execute("d-1", Document.file, Blob.of(LARGE))
    again = await repository.execute("d-1", Document.scan_again)
    assert again.version == 2
    assert again.state.scan == Blob.of(LARGE)


async def test_a_file_that_changes_before_it_is_stored_is_refused(jet: Jet, tmp_path: Path) -> None:
    file = tmp_path / "scan"
    file.write_bytes(LARGE)
    blob = Blob.from_file(file)
    file.write_bytes(LARGE[:-1] + b"?")
    with pytest.raises(Refused, match="has changed since the blob was made"):
        await jet.repository(Document).execute("d-1", Document.file, blob)
    assert await jet.repository(Document).history("d-1") == []
    if jet.client is not None:
        assert await chunks_stored(jet) == 0


def test_a_blob_needs_a_binary_file_that_can_be_read_twice(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("text")
    with (tmp_path / "t").open() as text, pytest.raises(UsageError, match=r"mode 'rb'"):
        Blob.from_file(text)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with (tmp_path / "t").open("rb") as file:
        file.read(2)
        assert Blob.from_file(file) == Blob(digest=Blob.of(b"xt").digest, size=2, name="t")
        assert file.read() == b""


async def test_transactions_and_imports_store_bodies(jet: Jet) -> None:
    repository = jet.repository(Document)
    await jet.transact(
        repository.decide("d-1", Document.file, Blob.of(b"first")),
        repository.decide("d-2", Document.file, Blob.of(b"second")),
    )
    imported = [Imported(Document, f"i-{number}", Filed(scan=Blob.of(b"%d" % number))) for number in range(3)]
    report = await jet.append_many(imported, source="old")
    assert (report.stored, report.skipped) == (3, 0)
    assert (await jet.append_many(imported, source="old")).skipped == 3
    blobs = [blob async for recorded in jet.tail() for _, blob in blobs_in(recorded.data)]
    assert [await jet.blobs.read(blob) for blob in blobs] == [b"first", b"second", b"0", b"1", b"2"]
    missing = Imported(Document, "i-9", Filed(scan=Blob(digest=f"sha256:{'1' * 64}", size=1)))
    with pytest.raises(BlobMissing):
        await jet.append_many([missing], source="older")


async def test_a_too_large_event_names_the_field_and_suggests_a_blob(jet: Jet) -> None:
    with pytest.raises(Refused, match=r"its field text has 1,000,00\d of them.*Make text a `Blob`"):
        await jet.repository(Document).execute("d-1", Document.note, "x" * 1_000_000)


async def test_an_event_too_large_for_any_log_is_refused_before_its_body_is_stored(stored: Jet) -> None:
    pages = tuple(Blob(digest=f"sha256:{number:064x}", size=1) for number in range(9_000))
    with pytest.raises(Refused, match="its field pages has"):
        await stored.repository(Document).execute("d-1", Document.file, Blob.of(LARGE), pages)
    assert await chunks_stored(stored) == 0


async def test_a_body_that_several_senders_upload_is_stored_once(stored: Jet, app: App, nats: NatsServer) -> None:
    async def file(number: int) -> None:
        async with app.connect(servers=nats.url) as jet:
            await jet.repository(Document).execute(f"d-{number}", Document.file, Blob.of(LARGE))

    await asyncio.gather(*(file(number) for number in range(6)))
    assert await chunks_stored(stored) == 4
    async for recorded in stored.tail():
        assert await stored.blobs.read(recorded.data.scan) == LARGE


async def test_a_repeated_decision_stores_its_body_once(stored: Jet, app: App, nats: NatsServer) -> None:
    repository = stored.repository(Document)
    await repository.execute("d-1", Document.note, "before")
    async with app.connect(servers=nats.url) as other:
        await other.repository(Document).execute("d-1", Document.note, "meanwhile")
    before = (await client_of(stored).ask(stream_info(Bucket(app.name).stream))).last
    await repository.execute("d-1", Document.file, Blob.of(LARGE))
    state = await client_of(stored).ask(stream_info(Bucket(app.name).stream))
    assert state.last - before == 6  # four chunks, and the metadata again for the second decision


async def test_a_damaged_body_is_reported_before_its_last_chunk(stored: Jet, tmp_path: Path) -> None:
    blob = await stored.blobs.put(LARGE)
    bucket = Bucket(stored.name)
    state = await client_of(stored).ask(stream_info(bucket.stream))
    await client_of(stored).ask(purge_stream(bucket.stream, bucket.chunk_subject("*"), state.first))
    sink = io.BytesIO()
    with pytest.raises(BlobDamaged, match=r"1,395,712 of 1,920,000 bytes"):
        await stored.blobs.save(blob, sink)
    assert sink.tell() < blob.size - CHUNK_BYTES
    target = tmp_path / "scan"
    target.write_bytes(b"old")
    with pytest.raises(BlobDamaged):
        await stored.blobs.save(blob, target)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("scan", b"old")]
    await stored.blobs.put(io.BytesIO(LARGE))  # the damaged body is replaced
    assert await stored.blobs.read(blob) == LARGE


async def test_nats_py_reads_the_object_by_its_digest(stored: Jet) -> None:
    blob = await stored.blobs.put(LARGE)
    connection: Any = client_of(stored).nats
    store = await connection.jetstream().object_store(f"{stored.name}_objects")
    result = await store.get(blob.digest.removeprefix("sha256:"))
    assert result.data == LARGE


async def test_an_app_without_blobs_has_no_bucket(nats: NatsServer) -> None:
    async with App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason]).connect(
        servers=nats.url
    ) as jet:
        topology = await jet.init()
        assert not any(name.startswith("OBJ_") for name in topology.created)
        with pytest.raises(Exception, match=r"`eventjet init`.*a `Blob`"):
            await jet.blobs.put(b"x")


def test_the_wire_has_a_small_object() -> None:
    encoded = documents("docs").catalog.encode(Filed(scan=Blob.of(b"x", media_type="text/plain", name="x.txt")))
    assert json.loads(encoded.body) == {
        "scan": {
            "digest": f"sha256:{sha256(b'x').hexdigest()}",
            "size": 1,
            "media_type": "text/plain",
            "name": "x.txt",
        },
        "pages": [],
    }


async def test_a_full_bucket_names_its_limit_and_no_event_is_recorded(stored: Jet) -> None:
    bucket = Bucket(stored.name)
    state = await client_of(stored).ask(stream_info(bucket.stream))
    await client_of(stored).ask(update_stream({**state.config, "max_bytes": 1_000_000}))
    with pytest.raises(StreamFull, match=rf"{bucket.stream}.*max_bytes 1,000,000"):
        await stored.repository(Document).execute("d-1", Document.file, Blob.of(LARGE))
    assert await stored.repository(Document).history("d-1") == []
    assert await chunks_stored(stored) == 0
    assert any(drift.setting == "max_bytes" for drift in (await stored.init()).drifts)


@pytest.mark.slow
async def test_an_upload_continues_after_the_server_was_killed(app: App) -> None:
    with NatsServer() as server:
        async with app.connect(servers=server.url, save_timeout_s=120) as jet:
            await jet.init()

            async def arriving() -> AsyncIterator[bytes]:
                for start in range(0, len(LARGE), CHUNK_BYTES):
                    if start == 2 * CHUNK_BYTES:
                        await asyncio.to_thread(server.kill)
                        await asyncio.to_thread(server.start)
                    yield LARGE[start : start + CHUNK_BYTES]

            blob = await jet.blobs.put(arriving())
            assert await jet.blobs.read(blob) == LARGE
            reader = jet.blobs.chunks(blob)
            received = [await anext(reader)]
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            received += [chunk async for chunk in reader]
            assert b"".join(received) == LARGE
            assert await chunks_stored(jet) == 4


async def test_a_blocking_connection_stores_and_reads_bodies(app: App, nats: NatsServer, tmp_path: Path) -> None:
    def work() -> None:
        with app.connect_blocking(servers=nats.url) as jet:
            jet.init()
            blob = jet.blobs.put(io.BytesIO(LARGE), name="scan")
            done = jet.repository(Document).execute("d-1", Document.file, blob)
            assert done.state.scan == blob
            assert jet.blobs.read(blob) == LARGE == b"".join(jet.blobs.chunks(blob))
            jet.blobs.save(blob, tmp_path / "copy")

    await asyncio.to_thread(work)
    assert (tmp_path / "copy").read_bytes() == LARGE
