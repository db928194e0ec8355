"""`Blobs`: store, read and save large bodies over one connection; and store those of events before their append."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from eventjet.domain.blob import CHUNK_BYTES, OCTETS, Blob, ContentOpener, source_of
from eventjet.errors import BlobMissing, Refused, UsageError
from eventjet.log.store import ObjectStore, command_deadline
from eventjet.runtime import GuardedIterator, LoopGuard

READ_MAX = 64 * 1024 * 1024
"""Bytes that `Blobs.read` returns unless it is told otherwise."""
_POLL_S = 0.01


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
            digest, size = await self._objects.put(_checked(content))
        elif isinstance(content, bytes):
            blob = Blob.of(content)
            if not await self._objects.claim(blob.digest, blob.size):
                await self._objects.put(_read(partial(io.BytesIO, content)))
            digest, size = blob.digest, blob.size
        elif isinstance(content, os.PathLike):
            digest, size = await self._objects.put(_read(partial(Path(content).open, "rb")))
        elif isinstance(content, str) or not hasattr(content, "read"):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _no_content(content)
        else:
            digest, size = await self._objects.put(_read_on(content))
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

        A path gets the file once it is whole and has the digest, with the mode of the file that was there; before, and
        after an error, it has what it had. An open file gets the chunks as they come. Raises as `read`, and `OSError`.
        """
        if not isinstance(target, str | os.PathLike):
            async for chunk in self.chunks(blob):
                await asyncio.to_thread(_write, target, chunk)
            return
        path = Path(target)
        unfinished = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        try:
            with unfinished.open("xb") as file:
                async for chunk in self.chunks(blob):
                    await asyncio.to_thread(file.write, chunk)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            with suppress(FileNotFoundError):
                shutil.copymode(path, unfinished)
            await asyncio.to_thread(unfinished.replace, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
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
        await objects.put(_read(source), blob.digest)
    command_deadline.set(command_deadline.get() + time.monotonic() - began)


async def _checked(content: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for piece in content:
        if not isinstance(piece, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _no_content(content)
        yield piece


async def _read(source: ContentOpener) -> AsyncIterator[bytes]:
    """Yield the content of a file that is opened for it."""
    with source() as file:
        async for piece in _read_on(file):
            yield piece


async def _read_on(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the content of an open file, from where it is to its end."""
    while (piece := await asyncio.to_thread(cast("Any", file).read, CHUNK_BYTES)) != b"":
        if isinstance(piece, str):
            raise _no_content(file)
        if piece is None:  # a file that does not block has nothing yet
            await asyncio.sleep(_POLL_S)
        else:
            yield piece


def _write(file: BinaryIO, chunk: bytes) -> None:
    """Write all of a chunk: a raw file may take a part of it at a time."""
    while chunk:
        written: Any = file.write(chunk)
        if written is None and not isinstance(file, io.RawIOBase):
            return  # it takes all of it, and does not count
        if not written:
            raise BlockingIOError(errno.EAGAIN, "The file takes nothing more now; give one that blocks")
        chunk = chunk[written:]


def _no_content(content: object) -> UsageError:
    return UsageError(
        f"A {type(content).__name__} is no content. Give bytes, a `pathlib.Path`, a file that is open with mode 'rb', "
        "or an async iterable of bytes."
    )
