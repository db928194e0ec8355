"""Histories by batched direct get (ADR-31) over a connection of their own, folded while they travel.

nats-py spends some 30 µs on the headers of a message; here a history of a thousand events is read in the time the
server takes to send it, and one without events costs half of what it does there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime
from functools import lru_cache

import orjson

from eventjet.codec.envelope import RawRecord
from eventjet.errors import ConnectionLost, StoreUnavailable
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.loop_connection import LoopConnection
from eventjet.nats.protocol import Frame, status_of

REQUEST_MAX = 1_000
"""Records of one request: there is no flow control inside it."""
REQUEST_BYTES = 2_000_000
"""Bytes of one request, so that records of any size fit into memory."""
REQUESTS_MAX = 24
"""Requests at once: what all of them bring is less than the server keeps for a slow client (64 MB)."""
_STREAM = b"\r\nNats-Stream: "
_SEQUENCE = b"\r\nNats-Sequence: "
_TIME = b"\r\nNats-Time-Stamp: "
_STATUS = b"NATS/1.0 "


class LongReads:
    """Opens nothing before it is used; one connection at a time. For one loop."""

    def __init__(self, stream: str, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._subject = f"$JS.API.DIRECT.GET.{stream}"
        self._endpoint = endpoint.with_name("eventjet histories")
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(REQUESTS_MAX)
        self._opens = asyncio.Lock()
        self._link: LoopConnection | None = None
        self._closed = False

    async def pages(self, subject: str, start: int) -> AsyncIterator[list[RawRecord]]:
        """The records of one subject from a position on; raises `StoreUnavailable`, `Forbidden`, `Unreachable`."""
        what, told = f"The history of {subject}", subject.encode()
        position: int | None = start
        has_been_lost = False
        while position is not None:
            async with self._room:
                asked = _Asked(await self._usable(what), what, self._timeout_s)
                asked.send(self._subject, subject, position)
                try:
                    while True:
                        frames = await asked.came()
                        final = frames.pop() if frames[-1][3].startswith(_STATUS) else None
                        if frames:
                            yield [_record(frame, told) for frame in frames]
                        if final is not None:
                            position = _next_start(what, final)
                            break
                except ConnectionLost:
                    # The connection was lost since it was used last: once more, over another one.
                    if asked.has_brought or has_been_lost:
                        raise
                    has_been_lost = True
                finally:
                    asked.end()

    def close(self) -> None:
        """End the connection, and whoever waits for an answer."""
        self._closed = True
        if self._link is not None:
            self._link.close(_closed("A history"))

    async def _usable(self, what: str) -> LoopConnection:
        if self._link is None or not self._link.usable:
            async with self._opens:
                if (self._link is None or not self._link.usable) and not self._closed:
                    self._link = await LoopConnection.open(self._endpoint, self._timeout_s)
        if self._closed or self._link is None:
            self.close()  # perhaps it was opened meanwhile
            raise _closed(what)
        return self._link


class _Asked:
    """One request, and what has come of it."""

    def __init__(self, link: LoopConnection, what: str, timeout_s: float) -> None:
        self.has_brought = False
        self._link = link
        self._what = what
        self._timeout_s = timeout_s
        self._came: asyncio.Queue[list[Frame] | Exception] = asyncio.Queue()
        self._reply = b""
        self._heard_at = self._asked_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look)

    def send(self, to: str, subject: str, position: int) -> None:
        query = {"seq": position, "next_by_subj": subject, "batch": REQUEST_MAX, "max_bytes": REQUEST_BYTES}
        self._reply = self._link.ask(to, orjson.dumps(query), self._arrived)

    async def came(self) -> list[Frame]:
        """The next frames of the answer; raises what ended it."""
        item = await self._came.get()
        if isinstance(item, Exception):
            raise item
        self.has_brought = True
        return item

    def _arrived(self, item: list[Frame] | Exception) -> None:
        self._heard_at = time.monotonic()
        self._came.put_nowait(item)

    def end(self) -> None:
        self._timer.cancel()
        self._link.forget(self._reply)

    def _look(self) -> None:
        """End the wait when nothing came for as long as a request may take."""
        left_s = self._heard_at + self._timeout_s - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
        self._came.put_nowait(StoreUnavailable(self._what, f"no answer within {self._timeout_s:g} s"))
        if self._link.heard_at < self._asked_at:
            self._link.lost(f"it has been silent for {self._timeout_s:g} s")


def _closed(what: str) -> StoreUnavailable:
    return StoreUnavailable(what, "the connection was closed by this process")


def _next_start(what: str, final: Frame) -> int | None:
    status = status_of(final[3])[0]
    if status == 404:
        return None
    if status != 204:
        raise StoreUnavailable(what, f"the server answered {status_of(final[3])}")
    if int(_header(final[3], b"\r\nNats-Num-Pending: ") or 0) == 0:
        return None
    return int(_header(final[3], b"\r\nNats-Last-Sequence: ")) + 1


def _record(frame: Frame, subject: bytes) -> RawRecord:
    """The record of a reply: the server appends its own headers to those that were stored."""
    block = frame[3]
    end = block.rfind(_STREAM)
    if end < 0:
        raise StoreUnavailable("A direct get", f"the server answered {block[:80]!r}")
    # Stream, subject, sequence, time: in this order as far as is known, but found by name if not.
    told = block[end + 2 :].split(b"\r\n", 4)
    position, at = told[2], told[3]
    if position[:15] == b"Nats-Sequence: " and at[:17] == b"Nats-Time-Stamp: ":
        position, at = position[15:], at[17:]
    else:
        position, at = _header(block[end:], _SEQUENCE), _header(block[end:], _TIME)
    stored = block[:end] + b"\r\n\r\n" if end > 8 else b""
    return int(position), nanoseconds(at), subject, stored, frame[4]


def _header(block: bytes, name: bytes) -> bytes:
    start = block.find(name)
    return block[start + len(name) : block.index(b"\r\n", start + 2)] if start >= 0 else b""


def nanoseconds(text: bytes) -> int:
    """Nanoseconds since 1970 of an RFC 3339 time in UTC with up to nine decimals."""
    return _seconds(text[:19]) + int(text[20:29] if len(text) == 30 else text[20:-1].ljust(9, b"0"))


@lru_cache(maxsize=1_024)
def _seconds(whole: bytes) -> int:
    return int(datetime.fromisoformat(f"{whole.decode()}+00:00").timestamp()) * 1_000_000_000
