"""Long histories by batched direct get (ADR-31) over the fast road, a page ahead of whoever folds them.

nats-py spends some 30 µs on the headers of a message; a history of a thousand events is read here in the time the server
takes to send it. Links are blocking, so each page is read by a thread of a small pool.
"""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from eventjet.codec.envelope import RawRecord
from eventjet.errors import EventjetError, StoreUnavailable
from eventjet.wire import Endpoint, Link
from eventjet.wire.frames import Frame, status_of

PAGE = 250
"""Records of one request: enough to keep the server busy, few enough to fold while the next is on its way."""
THREADS = 4
_REPLY = b"\r\nNats-Stream: "


@dataclass(frozen=True, slots=True)
class Page:
    """Some records, and where the next page starts (None: there is none)."""

    records: list[RawRecord]
    next_start: int | None


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
        """The records of one subject from a position on; raises `StoreUnavailable` and `Forbidden`."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="eventjet-history")
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._executor, self._page, subject, start)
        while True:
            page = await reading
            if page.next_start is None:
                yield page.records
                return
            reading = loop.run_in_executor(self._executor, self._page, subject, page.next_start)
            yield page.records

    def close(self) -> None:
        """End every link; a page under way ends with `StoreUnavailable`."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _page(self, subject: str, start: int) -> Page:
        try:
            link = self._idle.get_nowait()
        except queue.Empty:
            link = Link.open(self._endpoint, timeout_s=self._timeout_s)
            link.subscribe(f"{link.inbox}.h.*")
        try:
            page = self._read(link, subject, start)
        except BaseException:
            link.close()  # what is still on its way must not reach the next page
            raise
        if self._closed:
            link.close()
        else:
            self._idle.put(link)
        return page

    def _read(self, link: Link, subject: str, start: int) -> Page:
        reply = f"{link.inbox}.h.{start}".encode()
        body = json.dumps({"seq": start, "next_by_subj": subject, "batch": PAGE}).encode()
        link.publish(f"$JS.API.DIRECT.GET.{self._stream}", body, reply=reply)
        records: list[RawRecord] = []
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            for frame in link.receive(self._timeout_s):
                if frame[1] != reply:
                    continue
                if frame[3].startswith(b"NATS/1.0 "):
                    return Page(records, self._next_start(subject, frame))
                records.append(_record(frame))
        raise StoreUnavailable(f"The history of {subject}", f"no answer within {self._timeout_s:g} s")

    def _next_start(self, subject: str, frame: Frame) -> int | None:
        status = status_of(frame[3])[0]
        if status == 404:
            return None
        if status != 204:
            raise StoreUnavailable(f"The history of {subject}", f"the server answered {status_of(frame[3])}")
        pending = _header(frame[3], b"Nats-Num-Pending")
        return int(_header(frame[3], b"Nats-Last-Sequence")) + 1 if int(pending or 0) else None


def _record(frame: Frame) -> RawRecord:
    block = frame[3]
    end = block.rfind(_REPLY)
    if end < 0:
        raise EventjetError(f"A direct get was answered with {block[:80]!r}. Check the server's version.")
    told = block[end:]
    own = block[:end] + b"\r\n\r\n" if end > 8 else b""
    return (
        int(_header(told, b"Nats-Sequence")),
        nanoseconds(_header(told, b"Nats-Time-Stamp").decode()),
        _header(told, b"Nats-Subject"),
        own,
        frame[4],
    )


def _header(block: bytes, name: bytes) -> bytes:
    start = block.find(b"\r\n" + name + b": ")
    if start < 0:
        return b""
    start += len(name) + 4
    return block[start : block.index(b"\r\n", start)]


def nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 time in UTC with up to nine decimals."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    return _seconds(whole) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)


@lru_cache(maxsize=1_024)
def _seconds(whole: str) -> int:
    return int(datetime.fromisoformat(whole + "+00:00").timestamp())
