"""An app works over a server with the newer reply subjects (ADR-15, `js_ack_fc_v2`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventjet.dev import NatsServer
from eventjet.rebuild import rebuild
from eventjet.settings import Settings
from tests.integration.rebuild_log import ALL, Book
from tests.integration.wire_log import FORM_2, assert_form_2, overhearing


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m", config=FORM_2) as started:
        yield started


async def test_workers_and_rebuilds_give_the_same_tables_over_replies_of_form_2(
    server: NatsServer, tmp_path: Path
) -> None:
    book = Book(Settings.load({"servers": server.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    last = book.fill(500)
    book.init()
    with overhearing(book.endpoint, book.name) as take_replies:
        async with book.working():
            for resolved in book.projections.values():
                await book.caught_up(last, resolved)
        live = {name: book.rows(name) for name in ALL}
        replies = take_replies()
        assert_form_2(replies, len(ALL) * last)
        assert {reply.split(b".")[5] for reply in replies} == {
            resolved.durable.encode() for resolved in book.projections.values()
        }
        await rebuild(book.ref, ALL, book.settings, engine="local")
        replies = take_replies()
        assert_form_2(replies, len(replies))
        assert len(replies) >= last
        assert all(reply.split(b".")[5].startswith(b"ej_read_") for reply in replies)
    assert {name: book.rows(name) for name in ALL} == live
    assert live["balances"] == book.folded(last)
