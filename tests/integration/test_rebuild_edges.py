"""Logs of unusual shapes, rebuilt on Spark: every table is what the local engine and the live fold make of them."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.jetstream.connection import NatsConnection
from eventjet.rebuild import rebuild, verify
from eventjet.spark.session import Started
from tests.integration.rebuild_log import ALL, Book, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = 300
HEADERS = 2_000
"""More than the headers of a message take."""


def types(book: Book) -> dict[str, Any]:
    return {one.__name__: one for one in book.projections["balances"].events}


def nothing(_: Book) -> None:
    """A stream without one event."""


def one_event(book: Book) -> None:
    book.append([("a-1", types(book)["Deposited"](amount=Decimal(1)))])


def no_fields(book: Book) -> None:
    """Events of `{}`, which end accounts that are opened again."""
    found = types(book)
    book.append([(f"a-{n % 7}", found["Closed"]() if n % 3 else found["Opened"](owner="ada")) for n in range(SMALL)])


def largest(book: Book) -> None:
    """Some events as large as they may be, among small ones."""
    book.fill(SMALL)
    name = "x" * (SERVER_MESSAGE_MAX - HEADERS)
    book.append([(f"a-{n}", types(book)["Sent"](amount=Decimal(n), to=name)) for n in range(3)])
    book.fill(SMALL, seed=2)


def skewed(book: Book) -> None:
    """One key holds half the log."""
    deposited = types(book)["Deposited"](amount=Decimal(1))
    book.append([("a-busy" if n % 2 else f"a-{n}", deposited) for n in range(10 * SMALL)])


def later_first(book: Book) -> None:
    """A stream whose first position is not 1."""
    with NatsConnection.open(book.endpoint) as link:
        config = link.api(f"STREAM.INFO.{book.name}")["config"]
        book.delete()
        link.api(f"STREAM.CREATE.{book.name}", {**config, "first_seq": 1_000})
    book.fill(SMALL)


@pytest.mark.parametrize("fill", [nothing, one_event, no_fields, largest, skewed, later_first])
async def test_a_log_of_unusual_shape_is_rebuilt_right(
    book: Book, spark: Started, fill: Callable[[Book], None]
) -> None:
    fill(book)
    # The key of one of the others would be as large as its event.
    names = ["balances", "owners", "movements"] if fill is largest else list(ALL)
    report = await rebuild(book.ref, names, book.settings, engine="spark")
    on_spark = {name: book.rows(name) for name in names}
    assert bool(on_spark["balances"]) == (fill is not nothing)
    for name in names:
        assert (await verify(book.ref, name, book.settings)).differences == 0, name
    there = await rebuild(book.ref, names, book.settings, engine="local")
    assert {name: book.rows(name) for name in names} == on_spark
    assert (report.events, report.position) == (there.events, there.position)
    assert remains(book.where) == []
    if fill is not later_first:
        assert on_spark["balances"] == book.folded(report.position)
