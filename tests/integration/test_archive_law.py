"""A live worker, local and Spark rebuilds, and rebuilds from an archive with and without tail give the same tables.

`EVENTJET_TEST_HISTORIES` is the number of random histories; by default a single long history is tested.
"""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventjet.dev.nats import NatsServer
from eventjet.rebuild import rebuild
from eventjet.spark.session import Started
from tests.integration.archived import book_of, rebuilt_tables, sealed, tables
from tests.integration.rebuild_log import Book

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HISTORIES = int(os.environ.get("EVENTJET_TEST_HISTORIES", "0"))


accounts = st.integers(0, 4).map(lambda number: f"a-{number}")
cents = st.integers(1, 10**6).map(lambda number: Decimal(number) / 100)
events = st.one_of(
    st.tuples(st.just("Opened"), st.fixed_dictionaries({"owner": st.text("ab", max_size=2)})),
    st.tuples(st.just("Deposited"), st.fixed_dictionaries({"amount": cents})),
    st.tuples(st.just("Sent"), st.fixed_dictionaries({"amount": cents, "to": accounts})),
    st.tuples(st.just("Closed"), st.just({})),
)


@pytest.mark.skipif(not HISTORIES, reason="the first one Hypothesis draws is one event: `make faults` draws many")
@settings(max_examples=max(1, HISTORIES), database=None)
@given(st.lists(st.tuples(accounts, events), min_size=1, max_size=60), st.data())
def test_all_ways_give_the_same_tables_for_any_history(
    tmp_path_factory: pytest.TempPathFactory, nats: NatsServer, spark: Started, history: list[Any], data: st.DataObject
) -> None:
    book = book_of(nats, tmp_path_factory.mktemp("book"))
    types = {event_type.__name__: event_type for event_type in book.projections["balances"].events}
    last = book.append((name, types[kind](**values)) for name, (kind, values) in history)
    edge = data.draw(st.integers(1, last), label="archived to")
    size = data.draw(st.integers(1 + last // 4, last), label="events a segment")
    asyncio.run(check_all_ways_agree(book, tmp_path_factory.mktemp("archive"), last, edge, size))


async def test_all_ways_give_the_same_tables_for_a_long_history(
    tmp_path: Path, nats: NatsServer, spark: Started
) -> None:
    book = book_of(nats, tmp_path)
    last = book.fill(3_000)
    await check_all_ways_agree(book, tmp_path / "archive", last, 2_000, 900)


async def check_all_ways_agree(book: Book, url: Path, last: int, edge: int, size: int) -> None:
    """Check that all ways give the same tables; the log is archived up to `edge` first, then to its end."""
    async with book.working():
        for resolved in book.projections.values():
            await book.caught_up(last, resolved, timeout_s=60)
    live = tables(book)
    assert await rebuilt_tables(book, engine="local") == live
    assert await rebuilt_tables(book, engine="spark") == live
    await sealed(book, url, to=edge, segment_events=size)
    assert await rebuilt_tables(book, engine="spark", from_archive=str(url)) == live, "archive and tail"
    await rebuild(book.ref, ["movements"], book.settings, engine="spark", from_archive=str(url))
    assert tables(book) == live, "entries alone, which no shuffle numbers"
    await sealed(book, url, segment_events=size)
    assert await rebuilt_tables(book, engine="spark", from_archive=str(url)) == live, "archive alone"
    assert await rebuilt_tables(book, engine="local", from_archive=str(url)) == live, "archive alone, locally"
