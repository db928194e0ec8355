"""Reads of keys that are written meanwhile, in pages that any replica may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from eventjet.codec.headers import RawRecord
from eventjet.domain.quarantined import QUARANTINED, RETRY, Quarantined
from eventjet.errors import StoreUnavailable
from eventjet.jetstream.api import Conversation, is_page, reading_records
from eventjet.nats.protocol import Frame
from eventjet.subscriptions.cursor_store import Cursors, QuarantinedEntry
from eventjet.subscriptions.retry import renewing


class Busy:
    """A client of a bucket in which a key is written again while it is read."""

    def __init__(self, *values: tuple[bytes, bytes]) -> None:
        self._stored = values

    async def run(self, reading: Conversation[Any]) -> Any:
        return drive(reading, len(self._stored), [page(range(1, len(self._stored) + 1), 0, self._stored)])[0]

    async def request(self, *_: Any, **__: Any) -> Any:
        return b"1", b"", b"", b"", b'{"seq": 5}'


def cursors_over(client: Any) -> Cursors:
    return Cursors(client, "app")


async def test_a_worker_that_reports_during_the_read_is_counted_once() -> None:
    client = Busy((b"w.echo.a", b"4"), (b"w.echo.b", b"4"), (b"w.echo.c", b"2"), (b"w.echo.a", b"4"))
    assert await cursors_over(client).beat("echo", "a", 4, 3.5) == 2


async def test_an_entry_that_changes_during_the_read_is_returned_once() -> None:
    quarantined, retried = (
        QuarantinedEntry(Quarantined(7, "thing", "one", "", "", resolution)).encoded()
        for resolution in (QUARANTINED, RETRY)
    )
    entries = await cursors_over(Busy((b"q.echo.7", quarantined), (b"q.echo.7", retried))).quarantined("echo")
    assert [(entry.event.resolution, entry.sequence) for entry in entries] == [(RETRY, 2)]


def page(records: Sequence[int], left: int, values: Sequence[tuple[bytes, bytes]] = ()) -> list[Frame]:
    """Return the frames of an answer of a replica."""
    header_text = (
        "Nats-Stream: {}\r\nNats-Subject: {}\r\nNats-Sequence: {}\r\nNats-Time-Stamp: 2030-01-01T00:00:00Z\r\n\r\n"
    )
    frames: list[Frame] = []
    for at in records:
        subject, body = values[at - 1] if values else (b"q.%d" % at, b"")
        stream = "KV_app_cursors" if values else "KV"
        frames.append(
            (b"1", b"", b"", b"NATS/1.0\r\n" + header_text.format(stream, subject.decode(), at).encode(), body)
        )
    ended = (
        f"NATS/1.0 204 EOB\r\nNats-Num-Pending: {left}\r\nNats-Last-Sequence: {records[-1]}\r\n\r\n" if records else ""
    )
    return [*frames, (b"1", b"", b"", (ended or "NATS/1.0 404 Message Not Found\r\n\r\n").encode(), b"")]


def drive(reading: Conversation[Any], last: int, pages: Sequence[list[Frame]]) -> tuple[Any, list[int]]:
    """Return (the result of a reading, the positions that pages began at), with the last record at `last`."""
    answers, page_starts = iter(pages), list[int]()
    answer: Any = None
    newest: RawRecord = (last, 0, b"q", b"", b"")
    try:
        while True:
            request = reading.send(answer)
            answer = None
            if request is not None and is_page(request):
                page_starts.append(orjson.loads(request.payload)["seq"])
                answer = next(answers)
            elif request is not None:
                answer = newest
    except StopIteration as ended:
        return ended.value, page_starts


def read(last: int, pages: Sequence[list[Frame]]) -> tuple[list[int], list[int]]:
    """Return (the positions of the records, the positions that pages began at)."""
    records, page_starts = drive(reading_records("KV", "q.*"), last, pages)
    return [record[0] for record in records], page_starts


def test_records_that_a_lagging_replica_does_not_have_are_read_again() -> None:
    assert read(9, [page([2, 4], 0), page([], 0), page([7, 9], 0)]) == ([2, 4, 7, 9], [1, 5, 5])


def test_a_replica_that_stays_behind_makes_the_read_fail() -> None:
    with pytest.raises(StoreUnavailable, match="lags behind position 9"):
        read(9, [page([2, 4], 0), *([page([], 0)] * 100)])


def test_records_lost_on_the_way_make_the_read_fail() -> None:
    frames = page([2, 4], 0)
    with pytest.raises(StoreUnavailable, match="lost on the way"):
        read(9, [[frames[0], frames[-1]]] * 100)


async def test_a_lease_is_renewed_during_long_work() -> None:
    done, renewals = asyncio.Event(), list[int]()

    async def renew() -> None:
        renewals.append(len(renewals))
        if len(renewals) == 5:
            done.set()

    assert await renewing(done.wait(), renew, 0.001)
    assert len(renewals) >= 5


async def test_work_is_cancelled_when_its_lease_is_lost() -> None:
    async def renew() -> None:
        raise StoreUnavailable("the lease", "lost")

    work = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(StoreUnavailable):
        await renewing(work, renew, 0.001)
    assert work.cancelled()
