"""Long histories by batched direct get (ADR-31) over the fast road, folded while they travel.

nats-py spends some 30 µs on the headers of a message; here a history of a thousand events is read in the time the
server takes to send it. Links are blocking, so each request is read by a thread of a small pool, which hands over what
has come as it comes.
"""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from eventjet.codec.envelope import RawRecord
from eventjet.errors import StoreUnavailable
from eventjet.wire import Endpoint, Link, LinkLost
from eventjet.wire.frames import Frame, status_of

REQUEST_MAX = 1_000
"""Records of one request: there is no flow control inside it."""
REQUEST_BYTES = 8_000_000
"""Bytes of one request, so that records of any size fit into memory."""
HANDED_MIN = 150
"""Records handed over at once: waking the loop costs as much as folding some twenty."""
THREADS = 4
_STREAM = b"\r\nNats-Stream: "
_SEQUENCE = b"\r\nNats-Sequence: "
_TIME = b"\r\nNats-Time-Stamp: "

Hand = Callable[["list[RawRecord] | int | BaseException | None"], object]


class LongReads:
    """Opens nothing before it is used; at most four links."""

    def __init__(self, stream: str, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._stream = stream
        self._endpoint = endpoint.with_name("eventjet histories")
        self._timeout_s = timeout_s
        self._executor: ThreadPoolExecutor | None = None
        self._idle: queue.LifoQueue[Link] = queue.LifoQueue()
        self._closed = False

    async def pages(self, subject: str, start: int) -> AsyncIterator[list[RawRecord]]:
        """The records of one subject from a position on; raises `StoreUnavailable`, `Forbidden`, `Unreachable`."""
        loop = asyncio.get_running_loop()
        position: int = start
        while True:
            # Bounded by what one request may bring.
            handed: asyncio.Queue[list[RawRecord] | int | BaseException | None] = asyncio.Queue()

            def hand(item: list[RawRecord] | int | BaseException | None, into: Any = handed) -> None:
                with suppress(RuntimeError):  # the loop has ended, and who waited with it
                    loop.call_soon_threadsafe(into.put_nowait, item)

            self._submit(subject, position, hand)
            while isinstance(item := await handed.get(), list):
                yield item
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            position = item

    def close(self) -> None:
        """End every idle link; a request under way ends its own."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._end_idle()

    def _submit(self, subject: str, start: int, hand: Hand) -> None:
        """Have it read by a thread; whoever waits is told when that never begins."""
        closed = StoreUnavailable(f"The history of {subject}", "the connection was closed by this process")
        if self._closed:
            raise closed
        if self._executor is None:
            self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="eventjet-history")
        asked = self._executor.submit(self._request, subject, start, hand)
        asked.add_done_callback(lambda done: hand(closed) if done.cancelled() else None)

    def _request(self, subject: str, start: int, hand: Hand) -> None:
        """In a thread: hand over records as they come, then where to go on, None for nowhere, or what went wrong."""
        try:
            hand(self._answer(subject, start, hand))
        except Exception as error:  # noqa: BLE001  it is raised where it was asked for
            hand(error)

    def _answer(self, subject: str, start: int, hand: Hand) -> int | None:
        """Read over an idle link; over a new one when that turns out lost before it brought anything."""
        try:
            link = self._idle.get_nowait()
        except queue.Empty:
            return self._through(self._fresh(), subject, start, hand)
        brought: list[bool] = []

        def noted(item: list[RawRecord] | int | BaseException | None) -> None:
            brought.append(True)
            hand(item)

        try:
            return self._through(link, subject, start, noted)
        except LinkLost:
            if brought:
                raise
        self._end_idle()  # the server went away, so the others are lost, too
        return self._through(self._fresh(), subject, start, hand)

    def _through(self, link: Link, subject: str, start: int, hand: Hand) -> int | None:
        try:
            next_start = self._read(link, subject, start, hand)
        except BaseException:
            link.close()  # what is still on its way must not reach the next request
            raise
        self._idle.put(link)
        if self._closed:
            self._end_idle()
        return next_start

    def _fresh(self) -> Link:
        link = Link.open(self._endpoint, timeout_s=self._timeout_s)
        link.subscribe(f"{link.inbox}.h.*")
        return link

    def _end_idle(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _read(self, link: Link, subject: str, start: int, hand: Hand) -> int | None:
        what = f"The history of {subject}"
        reply = f"{link.inbox}.h.{start}".encode()
        query = {"seq": start, "next_by_subj": subject, "batch": REQUEST_MAX, "max_bytes": REQUEST_BYTES}
        link.publish(f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(query).encode(), reply=reply)
        told = subject.encode()
        records: list[RawRecord] = []
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            frames = [frame for frame in link.receive(self._timeout_s) if frame[1] == reply]
            final = frames.pop() if frames and frames[-1][3].startswith(b"NATS/1.0 ") else None
            if frames:
                deadline = time.monotonic() + self._timeout_s
                records += [_record(frame, told) for frame in frames]
            if records and (final is not None or len(records) >= HANDED_MIN):
                hand(records)
                records = []
            if final is not None:
                return _next_start(what, final)
        raise StoreUnavailable(what, f"no answer within {self._timeout_s:g} s")


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
