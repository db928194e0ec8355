"""Logs of unusual shapes rebuilt on Spark give the tables of the local engine and the live fold."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.jetstream.connection import NatsConnection
from eventjet.rebuild import rebuild, verify
from eventjet.spark.session import Started
from tests.integration.rebuild_log import Book, remains

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = 300
HEADERS = 2_000
"""A size above that of a message's headers."""


def types(book: Book) -> dict[str, Any]:
    return {event_type.__name__: event_type for event_type in book.projections["balances"].events}


def nothing(_: Book) -> None:
    """Leave the stream without an event."""


def every_shape(book: Book) -> None:
    """A stream whose first position is not 1, in which one key has half of the events, some are as large as they may
    be, and others are `{}` and end accounts that are opened again."""
    with NatsConnection.open(book.endpoint) as link:
        config = link.api(f"STREAM.INFO.{book.name}")["config"]
        book.delete()
        link.api(f"STREAM.CREATE.{book.name}", {**config, "first_seq": 1_000})
    events = types(book)
    deposited = events["Deposited"](amount=Decimal(1))
    book.append([("a-busy" if n % 2 else f"a-{n}", deposited) for n in range(10 * SMALL)])
    name = "x" * (SERVER_MESSAGE_MAX - HEADERS)
    book.append([(f"a-{n}", events["Sent"](amount=Decimal(n), to=name)) for n in range(3)])
    book.append([(f"a-{n % 7}", events["Closed"]() if n % 3 else events["Opened"](owner="ada")) for n in range(SMALL)])


@pytest.mark.parametrize("fill", [nothing, every_shape])
async def test_a_log_of_unusual_shape_is_rebuilt_correctly(
    book: Book, spark: Started, fill: Callable[[Book], None]
) -> None:
    fill(book)
    names = ["balances", "owners", "movements"]  # the key of the other would be as large as its event
    report = await rebuild(book.ref, names, book.settings, engine="spark")
    on_spark = {name: book.rows(name) for name in names}
    assert bool(on_spark["balances"]) == (fill is not nothing)
    for name in names:
        assert (await verify(book.ref, name, book.settings)).differences == 0, name
    local_report = await rebuild(book.ref, names, book.settings, engine="local")
    assert {name: book.rows(name) for name in names} == on_spark
    assert (report.events, report.position) == (local_report.events, local_report.position)
    assert remains(book.where) == []
