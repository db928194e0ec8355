"""A void on a real server: a projection that garbage stopped goes on, and every engine makes what a worker makes."""

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
    """An app with its tables and a log that begins with three events, of which the second and third are none."""
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    book.init()
    book.append_raw([("a-1", block("account.opened"), b'{"owner":"ada"}'), ("a-1", *GARBAGE), ("a-1", *BAD_BODY)])
    return book


async def declared_void(book: Book, *positions: int) -> list[bool]:
    client = await connect(book.settings)
    try:
        found = [await record_skip_marker(client, book.name, position, f"garbage {position}") for position in positions]
        with NatsConnection.open(book.endpoint) as connection:
            assert await client.run(reading_skip_markers(book.name)) == connection.run(reading_skip_markers(book.name))
        return found
    finally:
        await client.close()


async def live(book: Book, last: int) -> list[Any]:
    async with book.working("balances", "owners"):
        for name in ("balances", "owners"):
            await book.caught_up(last, book.projections[name])
    return book.rows()


async def test_a_projection_that_garbage_stopped_goes_on_behind_its_void(book: Book) -> None:
    async with book.working("balances"):
        assert "cannot be decoded" in str((await book.failed()).reason)
    with pytest.raises(UndecodableEvent, match="position 2"):
        await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert await declared_void(book, 2, 3, 2) == [True, True, False]
    last = book.append_raw([("a-1", block("account.deposited"), b'{"amount":"5"}')])
    rows = await live(book, last)
    assert [(row.account_id, row.events) for row in rows] == [("a-1", 2)]
    await rebuild(book.ref, ALL, book.settings, engine="local")
    assert book.rows() == rows
    assert (await verify(book.ref, "balances", book.settings, engine="local")).differences == 0
    report = await audit(book.ref, book.settings)
    assert {one.kind.value: one.positions for one in report.findings}["void"] == 2


async def test_a_reason_is_one_line(book: Book) -> None:
    client = await connect(book.settings)
    for reason in ("", "a\nb", "x" * 501):
        with pytest.raises(Refused, match="reason"):
            await record_skip_marker(client, book.name, 2, reason)
    assert await client.run(reading_skip_markers(book.name)) == {}
    await client.close()
