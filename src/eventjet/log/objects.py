"""Large bodies in the JetStream object store (ADR-20): the bucket `<app>_objects` with one object for each digest.

An object is chunks on a subject of their own, and then its metadata on the subject of its name, which makes it visible.
Metadata is written only over what was read, so of two writers of one digest the second finds that it is there. What a
sweep removes and what a command refers to are decided by the same comparison (ADR 0070): whoever refers to an object
writes its metadata again first, and a sweep removes only objects whose metadata nobody has written meanwhile. Whoever
reads compares size and digest before it hands on the last chunk.

Everything here is a conversation, for the client of an event loop and for a blocking connection alike.
"""

from __future__ import annotations

import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeVar

import orjson

from eventjet import failpoints
from eventjet.codec.headers import EXPECTED, RawRecord, header_block
from eventjet.codec.subjects import object_bucket
from eventjet.domain.blob import CHUNK_BYTES
from eventjet.errors import (
    ApiRefused,
    BlobDamaged,
    BlobMissing,
    ConnectionClosed,
    LogUnusable,
    NoResponders,
    Refused,
    StoreError,
    StoreUnavailable,
    StreamMissing,
)
from eventjet.jetstream import api
from eventjet.jetstream.api import Conversation, Request, StreamState
from eventjet.jetstream.client import Client
from eventjet.log.store import ObjectStore, changed_content, wrong_size
from eventjet.log.topology import full_stream
from eventjet.nats.protocol import Frame

T = TypeVar("T")

_ROLLUP = ("Nats-Rollup", "sub")
_PAGE_CHUNKS, _PAGE_BYTES = 8, 2_000_000
"""Chunks and bytes of one request at most: there is no flow control inside a request."""
_TRIES_MAX = 20
"""How often an object's metadata is read again because somebody else wrote it."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The metadata of an object, as the bucket has it."""

    name: str
    """The digest's hexadecimal digits."""
    token: str
    """The end of the subject of its chunks."""
    size: int
    chunks: int
    position: int
    """The sequence of the metadata in the bucket's stream."""
    time_ns: int
    """When the metadata was written, in nanoseconds since 1970."""
    is_deleted: bool
    digest: str

    @classmethod
    def of(cls, record: RawRecord) -> StoredObject | None:
        """Return the object that a metadata message describes; None for a message of another form."""
        try:
            meta: dict[str, Any] = orjson.loads(record[4])
            encoded = str(meta.get("digest") or "").removeprefix("SHA-256=").removeprefix("sha-256=")
            digest = f"sha256:{urlsafe_b64decode(encoded).hex()}"
            sizes = int(meta.get("size") or 0), int(meta.get("chunks") or 0)
            is_deleted = bool(meta.get("deleted"))
            return cls(str(meta["name"]), str(meta["nuid"]), *sizes, record[0], record[1], is_deleted, digest)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


class Bucket:
    """The requests to the bucket of an app's objects."""

    def __init__(self, app: str) -> None:
        self.name = object_bucket(app)
        self.stream = f"OBJ_{self.name}"

    def chunk_subject(self, token: str) -> str:
        """Return the subject of an object's chunks; `*` stands for every object."""
        return f"$O.{self.name}.C.{token}"

    def meta_subject(self, name: str) -> str:
        """Return the subject of an object's metadata; `*` stands for every object."""
        return f"$O.{self.name}.M.{name if name == '*' else urlsafe_b64encode(name.encode()).decode()}"

    def purging(self, token: str, until: int = 2**63 - 2) -> Request[int]:
        """Return the request that removes an object's chunks up to a position."""
        return api.purge_stream(self.stream, self.chunk_subject(token), until)

    def reading(self, digest: str) -> Conversation[StoredObject | None]:
        """Return the object of a digest, as the leader has it; None if there is none."""
        stored = yield from self.meta(_name(digest))
        return None if stored is None or stored.is_deleted or stored.digest != digest else stored

    def claiming(self, digest: str) -> Conversation[StoredObject | None]:
        """Write the metadata of a digest's object again, so that no sweep removes it now; return None if there is none.

        Metadata that somebody else wrote meanwhile is as new as one's own.
        """
        for _ in range(_TRIES_MAX):
            stored = yield from self.reading(digest)
            if stored is None:
                return None
            position = yield from self.writing_meta(stored)
            if position is not None:
                return replace(stored, position=position)
            newer = yield from self.reading(digest)
            if newer is not None and newer.position > stored.position:
                return newer
        raise _contended(digest)

    def is_whole(self, stored: StoredObject) -> Conversation[bool]:
        """Return whether all chunks of an object are there; their content is not read."""
        chunks: int = yield api.messages_of(self.stream, self.chunk_subject(stored.token))
        return chunks == stored.chunks

    def removing(self, stored: StoredObject) -> Conversation[bool]:
        """Remove an object whose metadata nobody has written since it was read; False if somebody has."""
        position = yield from self.writing_meta(stored, is_deleted=True)
        if position is None:
            return False
        yield self.purging(stored.token)
        yield api.purge_stream(self.stream, self.meta_subject(stored.name), position)
        return True

    def reading_metas(self) -> Conversation[list[StoredObject]]:
        """Return the metadata of all objects, also of those that are claimed meanwhile: a claim moves it to the end."""
        metas: dict[str, StoredObject] = {}
        start = 1
        while records := (yield from api.reading_records(self.stream, self.meta_subject("*"), start=start)):
            start = records[-1][0] + 1
            metas |= {stored.name: stored for record in records if (stored := StoredObject.of(record)) is not None}
        return list(metas.values())

    def writing(self, subject: str, payload: bytes, expected: int, *, rollup: bool = False) -> Conversation[int | None]:
        """Write after the message at `expected` (0 for none); return where it, or an earlier try, is, or None."""
        headers = header_block([(EXPECTED, str(expected)), *([_ROLLUP] if rollup else ())])
        try:
            return (yield Request(f"A write to {subject}", subject, payload, _position, headers, self.stream))
        except ApiRefused as refusal:
            if refusal.err_code in (api.NO_RESOURCES, api.STORE_FAILED):
                state: StreamState = yield api.stream_info(self.stream)
                full = full_stream(self.stream, state.config, refusal.err_code, refusal.description)
                raise full or refusal from None
            if refusal.err_code != api.WRONG_SEQUENCE:
                raise
        last: RawRecord | None = yield api.last_message(self.stream, subject)
        return last[0] if last is not None and last[0] > expected and last[4] == payload else None

    def meta(self, name: str) -> Conversation[StoredObject | None]:
        """Return the metadata of a name, of a removed object as well; None if there is none.

        Metadata of another form, which another program wrote, is that of an object with another digest.
        """
        record: RawRecord | None = yield api.last_message(self.stream, self.meta_subject(name))
        if record is None:
            return None
        return StoredObject.of(record) or StoredObject(name, "", 0, 0, record[0], record[1], False, "")

    def writing_meta(self, stored: StoredObject, *, is_deleted: bool = False) -> Conversation[int | None]:
        """Write an object's metadata over that at `stored.position`; None if it is another now."""
        meta: dict[str, Any] = {
            "name": stored.name,
            "options": {"max_chunk_size": CHUNK_BYTES},
            "bucket": self.name,
            "nuid": stored.token,
            "size": 0 if is_deleted else stored.size,
            "chunks": 0 if is_deleted else stored.chunks,
            # Each write is another message, so that of two claims at the same position only one succeeds.
            "mtime": f"{datetime.now(UTC).replace(tzinfo=None).isoformat()}Z",
            "digest": f"SHA-256={urlsafe_b64encode(bytes.fromhex(stored.digest.partition(':')[2])).decode()}",
            **({"deleted": True} if is_deleted else {}),
        }
        subject, payload = self.meta_subject(stored.name), orjson.dumps(meta)
        return (yield from self.writing(subject, payload, stored.position, rollup=True))


class ContentWriter:
    """Stores one body in chunks; its object appears when it is finished."""

    def __init__(self, bucket: Bucket, *, replaces: bool = False) -> None:
        """`replaces` says that an object of the digest that is there is damaged, and gives way to this one."""
        self._bucket = bucket
        self._replaces = replaces
        self._token = secrets.token_hex(11)
        self._rest = bytearray()
        self._hash = sha256()
        self._size = self._chunks = self._last = 0
        self._is_visible = False
        """Whether its metadata may be stored, so that others may refer to its chunks."""

    def write(self, piece: bytes) -> Conversation[None]:
        """Store the next bytes, and keep those that fill no chunk yet."""
        self._rest += piece
        while len(self._rest) >= CHUNK_BYTES:
            yield from self._store(bytes(self._rest[:CHUNK_BYTES]))
            del self._rest[:CHUNK_BYTES]

    def finish(self, expected: str = "") -> Conversation[tuple[str, int]]:
        """Store the body's end unless its digest has an object; return (digest, size). Raises `Refused`."""
        if self._rest:
            yield from self._store(bytes(self._rest))
            self._rest.clear()
        digest = f"sha256:{self._hash.hexdigest()}"
        if expected not in ("", digest):
            raise changed_content(expected, digest)
        for _ in range(_TRIES_MAX):
            seen = yield from self._bucket.meta(_name(digest))
            if seen is not None and seen.digest == digest and not seen.is_deleted and not self._replaces:
                seen = yield from self._bucket.claiming(digest)
                if seen is None:
                    continue  # a sweep removed it
                if seen.token == self._token:
                    break  # the answer to its own metadata was lost
                if (yield from self._bucket.is_whole(seen)):
                    yield from self._purge()
                    return digest, self._size
            position = 0 if seen is None else seen.position
            stored = StoredObject(_name(digest), self._token, self._size, self._chunks, position, 0, False, digest)
            self._is_visible = True
            if (yield from self._bucket.writing_meta(stored)) is not None:
                break
        else:
            raise _contended(digest)
        failpoints.reach("objects.put")
        subject = self._bucket.chunk_subject(self._token)
        last: RawRecord | None = yield api.last_message(self._bucket.stream, subject)
        if (0 if last is None else last[0]) != self._last:
            raise _swept()
        return digest, self._size

    def discard(self) -> Conversation[None]:
        """Remove the chunks of an upload that failed, unless others may refer to them by now: a sweep tells that."""
        if not self._is_visible:
            yield from self._purge()

    def _purge(self) -> Conversation[None]:
        """Remove the chunks, if these credentials may; otherwise a sweep does."""
        if self._last:
            with suppress(StoreError):
                yield self._bucket.purging(self._token, self._last)

    def _store(self, chunk: bytes) -> Conversation[None]:
        position = yield from self._bucket.writing(self._bucket.chunk_subject(self._token), chunk, self._last)
        if position is None:
            raise _swept()
        self._last, self._chunks, self._size = position, self._chunks + 1, self._size + len(chunk)
        self._hash.update(chunk)
        failpoints.reach("objects.chunk_stored")


class ContentReader:
    """Reads the content of one digest in chunks; the last comes once all of them have the digest."""

    def __init__(self, bucket: Bucket, digest: str, size: int | None = None) -> None:
        """`size` is that of the reference."""
        self._bucket = bucket
        self._digest = digest
        self._expected_size = size
        self._stored: StoredObject | None = None
        self._hash = sha256()
        self._size = self._last = 0
        self._ready: list[bytes] = []
        self._is_ended = False

    def next(self) -> Conversation[bytes | None]:
        """Return the next chunk, None after the last; raises `BlobMissing`, `BlobDamaged` and `Refused`."""
        stored = self._stored = self._stored or (yield from self._bucket.reading(self._digest))
        if stored is None:
            raise BlobMissing(self._digest, self._bucket.name)
        if self._expected_size not in (None, stored.size):
            raise wrong_size(self._digest, self._expected_size, stored.size)
        lags = 0
        # Two chunks have to be there, unless all have come: the last is handed on after the comparison.
        while len(self._ready) < 2 and self._size < stored.size:
            subject = self._bucket.chunk_subject(stored.token)
            request = api.direct_page(
                self._bucket.stream, self._last + 1, subject, count=_PAGE_CHUNKS, size=_PAGE_BYTES
            )
            page, _ = yield from api.reading_page(request, self._bucket.stream)
            for record in page:
                self._last, self._size = record[0], self._size + len(record[4])
                self._hash.update(record[4])
                self._ready += [record[4]] if record[4] else []
            if not page:
                lags += 1
                if lags > api.LAGS_MAX:
                    if (yield from self._bucket.is_whole(stored)):
                        raise StoreUnavailable(request.what, f"a replica lags behind position {stored.position}")
                    break
                yield None
        if not self._is_ended and len(self._ready) < 2:
            self._is_ended = True
            digest = f"sha256:{self._hash.hexdigest()}"
            if self._size != stored.size or digest != self._digest:
                raise BlobDamaged(self._digest, self._bucket.name, self._size, stored.size)
        return self._ready.pop(0) if self._ready else None


class JetStreamObjects(ObjectStore):
    """The objects of an app over the client of an event loop."""

    def __init__(self, app: str, client: Client, timeout_s: float) -> None:
        """`timeout_s` is how long a step of an upload or a download may take, while the server does not answer."""
        self._bucket = Bucket(app)
        self.name = self._bucket.name
        self._client = client
        self._timeout_s = timeout_s

    async def claim(self, digest: str, size: int) -> bool:
        claimed = await self._run(self._bucket.claiming(digest))
        if claimed is None:
            return False
        if claimed.size != size:
            raise wrong_size(digest, size, claimed.size)
        return await self._run(self._bucket.is_whole(claimed))

    async def put(self, content: AsyncIterator[bytes], digest: str = "") -> tuple[str, int]:
        writer = ContentWriter(self._bucket)
        try:
            async for piece in content:
                await self._run(writer.write(piece))
            return await self._run(writer.finish(digest))
        except Exception:
            await self._run(writer.discard())
            raise

    async def size(self, digest: str) -> int | None:
        stored = await self._run(self._bucket.reading(digest))
        return None if stored is None else stored.size

    async def chunks(self, digest: str, size: int | None = None) -> AsyncIterator[bytes]:
        reader = ContentReader(self._bucket, digest, size)
        while (chunk := await self._run(reader.next())) is not None:
            yield chunk

    async def _run(self, conversation: Conversation[T]) -> T:
        return await self._client.run(patiently(conversation, self._bucket, self._timeout_s))


def patiently(conversation: Conversation[T], bucket: Bucket, timeout_s: float) -> Conversation[T]:
    """Repeat a conversation's requests until the server answers; raises `LogUnusable` if the bucket is missing."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            request = conversation.send(answer) if error is None else conversation.throw(error)
        except StopIteration as stop:
            return stop.value
        answer = error = None
        until = time.monotonic() + timeout_s
        while True:
            try:
                answer = yield request
                break
            except StreamMissing:
                raise no_bucket(bucket) from None
            except StoreUnavailable as unavailable:
                if isinstance(unavailable, NoResponders):
                    try:
                        yield api.stream_info(bucket.stream)
                    except StreamMissing:
                        raise no_bucket(bucket) from None
                    except StoreError:
                        pass
                if isinstance(unavailable, ConnectionClosed) or time.monotonic() >= until:
                    error = unavailable
                    break
            except StoreError as store_error:
                error = store_error
                break
            yield None


def no_bucket(bucket: Bucket) -> LogUnusable:
    """Return the error for a bucket that does not exist."""
    return LogUnusable(
        f"The object store {bucket.name!r}",
        "it does not exist",
        "Run `eventjet init`, which makes it for an app with a `Blob` in one of its events.",
    )


def _contended(digest: str) -> StoreError:
    return StoreUnavailable(f"The body {digest}", "its metadata keeps changing")


def _swept() -> StoreError:
    return Refused(
        "An upload",
        "a sweep took it for one that nobody goes on with, since its last part was older than the sweep's age",
        "Store it again, and sweep with an `--older-than` that no upload takes.",
    )


def _position(frame: Frame) -> int:
    try:
        return int(api.answer_in(frame, "An object")["seq"])
    except ApiRefused as refusal:
        if refusal.err_code != api.IN_PROCESS:
            raise
        raise StoreUnavailable(refusal.subject, refusal.description) from None  # nothing was compared


def _name(digest: str) -> str:
    return digest.removeprefix("sha256:")
