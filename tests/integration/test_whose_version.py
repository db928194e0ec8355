"""An event whose version does not follow its predecessor on the subject is undecodable in every engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eventjet.codec.headers import header
from eventjet.dev.nats import NatsServer
from eventjet.errors import ConnectionClosed, RebuildError, UndecodableEvent
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.predecessors import PredecessorReader
from eventjet.log.skip_markers import record_skip_marker
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.spark.session import Started
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import MOVEMENTS, database_with
from tests.integration.quarantined import QUARANTINING
from tests.integration.rebuild_log import ALL, Book
from tests.logs import NEXT, block, records_of
from tests.tables import execute

Record = tuple[str, bytes, bytes]


def opened(account: str) -> Record:
    return account, block("account.opened"), b'{"owner":"ada"}'


def deposited(account: str, version: int | str = NEXT) -> Record:
    return account, block("account.deposited", version=version), b'{"amount":"5"}'


def sent(account: str, version: int | str = NEXT) -> Record:
    return account, block("account.sent", version=version), b'{"amount":"1","to":"a-2"}'


def begin_log(book: Book) -> int:
    """Record five events, the last two of a-1 at versions 3 and 4; return the last position."""
    book.init()
    book.append_raw([opened("a-1"), opened("a-2"), deposited("a-1")])
    return book.append_raw([sent("a-1"), deposited("a-1")])


async def skip_position(ledger: Ledger, position: int) -> None:
    client = await connect(ledger.settings)
    try:
        assert await record_skip_marker(client, ledger.name, position, "a version of somebody else")
    finally:
        await client.close()


@asynccontextmanager
async def projected(book: Book, last: int, *names: str) -> AsyncGenerator[None]:
    async with book.working(*names):
        for name in names:
            await book.caught_up(last, book.projections[name])
        yield


@pytest.mark.parametrize("starts", ["at the first event", "behind all of its history"])
async def test_a_worker_stops_at_a_wrong_version_and_continues_after_its_skip_marker(book: Book, starts: str) -> None:
    last = begin_log(book)
    if starts == "behind all of its history":
        async with projected(book, last, "balances"):
            pass
    bad = book.append_raw([deposited("a-1", version=2)])
    async with book.working("balances"):
        reason = str((await book.failed()).reason)
    assert f"position {bad}" in reason
    assert f"version 2, and version 4 at position {last} comes before it" in reason
    assert (await book.status("balances")).position == last
    await skip_position(book, bad)
    after = book.append_raw([deposited("a-1", version=5)])
    async with projected(book, after, "balances"):
        pass
    (row, _) = book.rows()
    assert (row.events, str(row.amount)) == (5, "14.00")
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert book.rows()[0] == row
    assert (await verify(book.ref, "balances", book.settings, engine="local")).differences == 0


async def test_consecutive_versions_are_accepted_wherever_a_worker_starts(book: Book) -> None:
    last = begin_log(book)
    for name in ALL:
        async with projected(book, last, name):
            pass
        last = book.append_raw([sent("a-1"), deposited("a-2"), opened("a-3"), deposited("a-3")])
    async with projected(book, last, *ALL):
        pass
    assert {name: book.rows(name) for name in ALL} == {name: book.folded(last, name) for name in ALL}


@pytest.mark.parametrize("name", ["balances", "movements"])
async def test_rebuilds_and_verifications_refuse_a_wrong_version(book: Book, name: str) -> None:
    last = begin_log(book)
    async with projected(book, last, name):
        pass
    bad = book.append_raw([deposited("a-1", version=2)])
    rows = book.rows(name)
    with pytest.raises(UndecodableEvent, match=f"position {bad}.*version 2, and version 4"):
        await rebuild(book.ref, [name], book.settings, engine="local")
    assert book.rows(name) == rows
    # The worker of an earlier release would have projected the event.
    event_id = header(records_of(book.endpoint, book.name)[-1][3], "Nats-Msg-Id")
    stands = f"position = {bad}, event_id = '{event_id}'"
    execute(book.settings.database, f"update eventjet_projection set {stands} where name = '{name}'")
    with pytest.raises(UndecodableEvent, match=f"position {bad}"):
        await verify(book.ref, name, book.settings, engine="local")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["balances", "turnover", "movements"])
async def test_spark_refuses_a_wrong_version_on_every_route(
    nats: NatsServer, tmp_path: Path, spark: Started, name: str
) -> None:
    del spark
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    begin_log(book)
    bad = book.append_raw([sent("a-1", version=2)])
    with pytest.raises(RebuildError, match=f"position {bad}.*version 2, and version 4"):
        await rebuild(book.ref, [name], book.settings, engine="spark")
    await skip_position(book, bad)
    last = book.append_raw([sent("a-1", version=5)])
    await rebuild(book.ref, [name], book.settings, engine="spark")
    checkpoint = book.checkpoint(name)
    assert checkpoint is not None
    assert checkpoint.position == last


async def test_a_quarantining_projection_and_its_rebuild_quarantine_a_wrong_version(
    nats: NatsServer, database: str
) -> None:
    database_with(database, QUARANTINING, MOVEMENTS)
    ledger = Ledger(Settings(servers=(nats.url,), database=database), projections={"balances": QUARANTINING})
    ledger.create()
    added = b'{"amount":"1"}'
    ledger.append_raw([("a-1", block("ledger.opened"), b'{"owner":"ada"}'), ("a-1", block("ledger.added"), added)])
    bad = ledger.append_raw([("a-1", block("ledger.added", version=2), added)])
    last = ledger.append_raw([("a-1", block("ledger.added", version=3), added), ("a-2", *_opened())])
    async with ledger.working("balances"):
        await ledger.caught_up(last, QUARANTINING)
    quarantine_rows = execute(
        database, "select position, resolution, reason from eventjet_quarantine order by position"
    )
    assert [tuple(row)[:2] for row in quarantine_rows] == [(bad, "quarantined"), (bad + 1, "blocked")]
    assert "version 2, and version 2 at position 2 comes before it" in quarantine_rows[0][2]


def _opened() -> tuple[bytes, bytes]:
    return block("ledger.opened"), b'{"owner":"bob"}'


async def test_a_stopping_projection_refuses_a_wrong_version_beside_a_quarantining_one(book: Book) -> None:
    begin_log(book)
    bad = book.append_raw([deposited("a-1", version=2)])
    parking = book.altered(
        (
            '@projection("balances", table=balances_table)',
            '@projection("balances", table=balances_table, on_error="quarantine")',
        )
    )
    with pytest.raises(UndecodableEvent, match=f"position {bad}"):
        await rebuild(parking, ["balances", "movements"], book.settings, engine="local")
    await rebuild(parking, ["balances"], book.settings, engine="local")
    quarantine_rows = execute(book.settings.database, "select position, resolution from eventjet_quarantine")
    assert [tuple(row) for row in quarantine_rows] == [(bad, "quarantined")]


def test_the_record_before_a_position_is_read_at_any_distance(nats: NatsServer, tmp_path: Path) -> None:
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    own_positions = {1, 2, 40, 41, 99, 300}
    book.append_raw([opened(f"a-{1 if position in own_positions else position}") for position in range(1, 301)])
    subject = f"{book.name}.ledger.a-1".encode()
    with PredecessorReader(book.endpoint, book.name) as reader:
        for position in range(1, 305):
            record: Any = reader.before(subject, position)
            assert (record[0] if record else None) == max(
                (candidate for candidate in own_positions if candidate < position), default=None
            )
        assert reader.before(f"{book.name}.ledger.none".encode(), 301) is None
        assert [record and record[0] for record in reader.at([3, 999, 1])] == [3, None, 1]


def test_predecessors_are_read_over_a_given_connection_that_stays_open(nats: NatsServer, tmp_path: Path) -> None:
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{tmp_path}/read.db"}, {}), tmp_path)
    book.append_raw([opened("a-1"), opened("a-2")])
    with NatsConnection.open(book.endpoint) as connection:
        sid = connection.subscribe("news.>")
        connection.publish("news.first")
        reader = PredecessorReader(connection, book.name)
        assert [record and record[0] for record in reader.at([2])] == [2]
        assert [frame[0] for frame in connection.receive(60.0)] == [sid]  # what came before the answer is kept
        reader.close()
        assert connection.usable
        with pytest.raises(ConnectionClosed):
            reader.at([1])
        lost = PredecessorReader(connection, book.name)
        connection.close()
        with pytest.raises(ConnectionClosed):
            lost.at([1])
