"""`Blobs`: store, read and save large bodies over one connection; and store those of events before their append."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from eventjet.domain.blob import CHUNK_BYTES, OCTETS, Blob, Opened, source_of
from eventjet.errors import BlobMissing, Refused, UsageError
from eventjet.log.store import ObjectStore, command_deadline
from eventjet.runtime import GuardedIterator, LoopGuard

READ_MAX = 64 * 1024 * 1024
"""Bytes that `Blobs.read` returns unless it is told otherwise."""


class Blobs:
    """The content of an application's blobs over one connection; `Jet.blobs` returns it.

    Content travels in chunks of 512 KiB, so a body of any size takes a few megabytes of memory.

    ```python
    blob = await jet.blobs.put(b"%PDF-1.7", media_type="application/pdf")
    assert await jet.blobs.read(blob) == b"%PDF-1.7"
    ```
    """

    def __init__(self, objects: ObjectStore, guard: LoopGuard) -> None:
        self._objects = objects
        self._guard = guard

    async def put(
        self,
        content: bytes | os.PathLike[str] | BinaryIO | AsyncIterable[bytes],
        /,
        *,
        media_type: str = OCTETS,
        name: str = "",
    ) -> Blob:
        """Store content now and return its blob, which an event refers to later.

        `content` is bytes, the path of a file, a binary file, or an async iterable such as the body of an HTTP request;
        it is read once. Content that is there already is not stored again. A body that no event refers to within the
        age of `eventjet objects sweep`, which is a day, may be removed by it. Raises `Refused`, `StreamFull`,
        `LogUnusable`, `StoreUnavailable`, `Forbidden`, and `UsageError` for text.
        """
        self._guard.check()
        if isinstance(content, AsyncIterable):
            digest, size = await self._objects.put(aiter(content))
        elif isinstance(content, bytes):
            blob = Blob.of(content)
            if not await self._objects.claim(blob.digest, blob.size):
                await self._objects.put(_one(content))
            digest, size = blob.digest, blob.size
        elif isinstance(content, os.PathLike):
            digest, size = await self._objects.put(_opened(partial(Path(content).open, "rb")))
        elif isinstance(content, str) or not hasattr(content, "read"):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"A {type(content).__name__} is no content. Give bytes, a `pathlib.Path`, a file that is open with "
                "mode 'rb', or an async iterable of bytes."
            )
        else:
            digest, size = await self._objects.put(_pieces(content))
        return Blob(digest=digest, size=size, media_type=media_type, name=name)

    async def read(self, blob: Blob, /, *, max_bytes: int = READ_MAX) -> bytes:
        """Return the content of a blob, which is checked against its digest.

        Raises `Refused` for a blob of more than `max_bytes`, `BlobMissing`, `BlobDamaged`, `StoreUnavailable` and
        `Forbidden`.
        """
        if blob.size > max_bytes:
            raise Refused(
                f"Reading the body {blob.digest}",
                f"it has {blob.size:,} bytes, and max_bytes is {max_bytes:,}",
                "Read it in chunks (`async for chunk in jet.blobs.chunks(blob)`), save it to a file, or raise the "
                "limit.",
            )
        return b"".join([chunk async for chunk in self.chunks(blob)])

    def chunks(self, blob: Blob, /) -> AsyncIterator[bytes]:
        """Yield the content of a blob in chunks; the last comes once all of them have the digest. Raises as `read`."""
        return GuardedIterator(self._chunks(blob), self._guard)

    async def _chunks(self, blob: Blob) -> AsyncGenerator[bytes]:
        async for chunk in self._objects.chunks(blob.digest, blob.size):
            yield chunk

    async def save(self, blob: Blob, target: str | os.PathLike[str] | BinaryIO, /) -> None:
        """Write the content of a blob to a file, given by its path or as an open binary file.

        A path gets the file once it is whole and has the digest; before, and after an error, it has what it had. An
        open file gets the chunks as they come. Raises as `read`, and `OSError`.
        """
        if not isinstance(target, str | os.PathLike):
            async for chunk in self.chunks(blob):
                await asyncio.to_thread(target.write, chunk)
            return
        path = Path(target)
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            partial_file = Path(file.name)
            try:
                async for chunk in self.chunks(blob):
                    await asyncio.to_thread(file.write, chunk)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
                await asyncio.to_thread(partial_file.replace, path)
            except BaseException:
                partial_file.unlink()  # noqa: ASYNC240  quick, and a cancelled task may not await
                raise


async def store_blobs(objects: ObjectStore, blobs: Iterable[tuple[str, Blob]]) -> None:
    """Store the content of blobs, given with the fields that refer to them, before their events are appended.

    What is there already is not sent again. The command has the time that this takes besides its own. Raises
    `BlobMissing` for a mere reference to content that is not there, and as `ObjectStore.put`.
    """
    began = time.monotonic()
    for where, blob in blobs:
        if await objects.claim(blob.digest, blob.size):
            continue
        source = source_of(blob)
        if source is None:
            raise BlobMissing(blob.digest, objects.name, where)
        await objects.put(_opened(source), blob.digest)
    command_deadline.set(command_deadline.get() + time.monotonic() - began)


async def _one(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


async def _opened(source: Opened) -> AsyncIterator[bytes]:
    with source() as file:
        async for piece in _pieces(file):
            yield piece


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield piece
