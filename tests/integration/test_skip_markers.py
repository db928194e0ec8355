"""After a skip marker a projection stopped by garbage continues, and every engine gives the rows of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import Refused, UndecodableEvent
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.skip_markers import reading_skip_markers, record_skip_marker
from eventjet.rebuild import audit, rebuild, verify
from eventjet.settings import Settings
from tests.integration.rebuild_log import ALL, Book
from tests.logs import block

GARBAGE = (b"", b"+ACK")
BAD_BODY = (block("account.deposited"), b"{")


@pytest.fixture
def book(nats: NatsServer, tmp_path: Path) -> Book:
    """Return an app with its tables and a log of one event and two invalid messages."""
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    book.init()
    book.append_raw([("a-1", block("account.opened"), b'{"owner":"ada"}'), ("a-1", *GARBAGE), ("a-1", *BAD_BODY)])
    return book


async def record_skip_markers(book: Book, *positions: int) -> list[bool]:
    client = await connect(book.settings)
    try:
        results = [
            await record_skip_marker(client, book.name, position, f"garbage {position}") for position in positions
        ]
        with NatsConnection.open(book.endpoint) as connection:
            assert await client.run(reading_skip_markers(book.name)) == connection.run(reading_skip_markers(book.name))
        return results
    finally:
        await client.close()


async def projected_rows(book: Book, last: int) -> list[Any]:
    async with book.working("balances", "owners"):
        for name in ("balances", "owners"):
            await book.caught_up(last, book.projections[name])
    return book.rows()


async def test_a_projection_stopped_by_garbage_continues_after_a_skip_marker(book: Book) -> None:
    async with book.working("balances"):
        assert "cannot be decoded" in str((await book.failed()).reason)
    with pytest.raises(UndecodableEvent, match="position 2"):
        await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert await record_skip_markers(book, 2, 3, 2) == [True, True, False]
    last = book.append_raw([("a-1", block("account.deposited"), b'{"amount":"5"}')])
    rows = await projected_rows(book, last)
    assert [(row.account_id, row.events) for row in rows] == [("a-1", 2)]
    await rebuild(book.ref, ALL, book.settings, engine="local")
    assert book.rows() == rows
    assert (await verify(book.ref, "balances", book.settings, engine="local")).differences == 0
    report = await audit(book.ref, book.settings)
    assert {finding.kind.value: finding.positions for finding in report.findings}["skipped"] == 2


async def test_the_reason_of_a_skip_marker_is_a_single_line(book: Book) -> None:
    client = await connect(book.settings)
    for reason in ("", "a\nb", "x" * 501):
        with pytest.raises(Refused, match="reason"):
            await record_skip_marker(client, book.name, 2, reason)
    assert await client.run(reading_skip_markers(book.name)) == {}
    await client.close()
