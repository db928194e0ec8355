"""A rebuild and a verification obey the quarantine as a worker does."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, text

from eventjet.dev.nats import NatsServer
from eventjet.errors import CodecError, RebuildError
from eventjet.rebuild import AppRef, Progress, rebuild, verify
from eventjet.settings import Settings
from eventjet.spark.session import Started
from eventjet.sql import quarantine as verdict
from tests.integration.ledger_log import eventually
from tests.integration.quarantined import QuarantineRow, quarantine_rows, resolutions
from tests.integration.rebuild_log import Book, remains
from tests.logs import block
from tests.tables import reading

T = TypeVar("T")
QUARANTINES = (
    '@projection("balances", table=balances_table)',
    '@projection("balances", table=balances_table, on_error="quarantine")',
)
FIRST = "    row = replace(row, events=row.events + 1,"
REFUSING = '    if isinstance(event.data, Deposited) and event.data.amount == 666:\n        raise ValueError("no")\n'
POISON = (FIRST, REFUSING + FIRST)
BAD = b'{"amount":"666"}'


@pytest.fixture(params=["postgresql", "sqlite"])
def book(request: pytest.FixtureRequest, nats: NatsServer, tmp_path: Path) -> Book:
    """Return an app whose balances quarantine, with its tables and an empty log."""
    database = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        database = request.getfixturevalue("eventjet_database")
    book = Book(Settings.load({"servers": nats.url, "database": database}, {}), tmp_path)
    deployed(book, book.altered(QUARANTINES, POISON))
    book.init()
    return book


def deployed(book: Book, ref: AppRef) -> None:
    loaded_app: Any = ref.load()
    book.ref, book.catalog, book.projections = ref, loaded_app.catalog, dict(loaded_app.projections)


def mixed(book: Book, count: int, *, seed: int = 1, accounts: int = 100, every: int = 25) -> int:
    """Append random histories with bad events among them; return the last position."""
    chance = random.Random(seed)
    kinds = [
        ("account.deposited", BAD),
        ("account.stranger", b"{}"),
        ("account.deposited", b"{"),
        ("account.opened", b'{"owner":"%s"}' % (b"x" * 61)),
        ("account.opened", b'{"owner":"\xff"}'),
    ]
    records: list[tuple[str, bytes, bytes]] = []
    for number, (aggregate_id, data) in enumerate(book._history(count, accounts, seed)):
        encoded = book.catalog.encode(data)
        records.append((aggregate_id, block(encoded.type_name, encoded.schema), encoded.body))
        if number % every == 0:
            type_name, body = kinds[number // every % len(kinds)]
            records.append((f"a-{chance.randrange(accounts)}", block(type_name), body))
    return book.append_raw(records)


def in_transaction(book: Book, change: Callable[[Connection], T]) -> T:
    with book.where.sync_engine().begin() as connection:
        return change(connection)


def quarantine_of(book: Book) -> list[QuarantineRow]:
    with reading(book.settings.database) as connection:
        return quarantine_rows(connection)


def quarantined(book: Book) -> list[int]:
    return [event.position for event in quarantine_of(book) if event.resolution == "quarantined"]


async def rebuilt(book: Book, *names: str, engine: Any = "local", **options: Any) -> Any:
    return await rebuild(book.ref, names or ["balances"], book.settings, engine=engine, **options)


async def projected_live(book: Book, last: int) -> tuple[list[Any], list[QuarantineRow]]:
    """Let a worker project the log, and return (rows, quarantine)."""
    async with book.working("balances"):
        await book.caught_up(last, book.projections["balances"], timeout_s=60)
    return book.rows(), quarantine_of(book)


async def resolve_some(book: Book) -> None:
    """Drop some quarantined events, and retry others with a handler that takes them."""
    positions = quarantined(book)
    deployed(book, book.altered((POISON[1], POISON[0])))
    in_transaction(book, lambda connection: verdict.drop(connection, "balances", 1, positions[1::3]))
    in_transaction(book, lambda connection: verdict.retry(connection, "balances", 1, positions[::3]))
    async with book.working("balances"):

        async def is_settled() -> bool:
            return "retry" not in resolutions(quarantine_of(book)).values()

        await eventually(is_settled, "the verdicts to be carried out")


async def test_a_rebuild_makes_the_same_rows_and_the_same_quarantine_as_a_worker(book: Book) -> None:
    last = mixed(book, 2_000)
    rows, quarantine = await projected_live(book, last)
    await rebuilt(book)
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)
    assert len(quarantined(book)) > 20
    assert (await verify(book.ref, "balances", book.settings)).differences == 0
    in_transaction(book, lambda connection: connection.execute(text("delete from eventjet_quarantine")))
    await rebuilt(book)
    # There are no resolutions, so the rebuild quarantines what a worker would.
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)
    assert remains(book.where) == []


async def test_a_rebuild_obeys_resolutions_and_a_worker_continues(book: Book) -> None:
    last = mixed(book, 1_000)
    await projected_live(book, last)
    await resolve_some(book)
    rows, quarantine = book.rows(), quarantine_of(book)
    assert {"quarantined", "dropped", "retried", "blocked"} == set(resolutions(quarantine).values())
    assert (await verify(book.ref, "balances", book.settings)).differences == 0
    await rebuilt(book)
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)
    last = mixed(book, 300, seed=2)
    rows, quarantine = await projected_live(book, last)
    assert (await verify(book.ref, "balances", book.settings)).differences == 0
    await rebuilt(book)
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)


async def test_bad_events_recorded_during_a_rebuild_are_quarantined(book: Book) -> None:
    first = mixed(book, 300)
    positions: list[int] = []

    def report(step: Progress) -> None:
        if step.phase == "index" and not positions:
            positions.append(mixed(book, 300, seed=3))

    await projected_live(book, first)
    await rebuilt(book, progress=report)
    rows, quarantine = book.rows(), quarantine_of(book)
    assert max(event.position for event in quarantine) > first
    in_transaction(book, lambda connection: connection.execute(text("delete from eventjet_quarantine")))
    await rebuilt(book)
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)


async def test_an_event_that_the_database_refuses_while_a_rebuild_catches_up_is_quarantined(book: Book) -> None:
    deployed(book, book.altered(('Index("ix_balances_owner", "owner")', 'Index("one", "owner", unique=True)')))
    in_transaction(book, lambda connection: connection.execute(text("drop table balances")))
    book.init()
    opened = next(event_type for event_type in book.projections["balances"].events if event_type.__name__ == "Opened")
    first = book.append([("a-1", opened(owner="ada"))])
    positions: list[int] = []

    def report(step: Progress) -> None:
        if step.phase == "catch up" and not positions:
            positions.append(book.append([("a-2", opened(owner="bob")), ("a-3", opened(owner="ada"))]))

    await projected_live(book, first)
    await rebuilt(book, progress=report)
    assert [row.owner for row in book.rows()] == ["ada", "bob"]
    assert resolutions(quarantine_of(book)) == {3: "quarantined"}


async def test_a_resolution_during_a_rebuild_ends_it_without_a_change(book: Book) -> None:
    last = mixed(book, 300)
    rows, quarantine = await projected_live(book, last)

    def report(step: Progress) -> None:
        if step.phase == "index" and step.done == 0:
            in_transaction(book, lambda connection: verdict.drop(connection, "balances", 1, quarantined(book)[:1]))

    with pytest.raises(RebuildError, match="decided about quarantined events of 'balances' while it was rebuilt"):
        await rebuilt(book, progress=report)
    assert book.rows() == rows
    assert [event.position for event in quarantine_of(book)] == [event.position for event in quarantine]
    assert "dropped" in resolutions(quarantine_of(book)).values()
    assert remains(book.where) == []
    await projected_live(book, last)
    await rebuilt(book)
    assert (await verify(book.ref, "balances", book.settings)).differences == 0


async def test_an_earlier_event_that_fails_now_blocks_the_quarantined_one(book: Book) -> None:
    opened = next(event_type for event_type in book.projections["balances"].events if event_type.__name__ == "Opened")
    book.append([("a-1", opened(owner="ada"))])
    last = book.append_raw([("a-1", block("account.deposited"), BAD)])
    last = book.append([("a-1", opened(owner="eve"))])
    await projected_live(book, last)
    assert resolutions(quarantine_of(book)) == {2: "quarantined", 3: "blocked"}
    deployed(
        book,
        book.altered(
            ("amount == 666:", "amount == 666 or isinstance(event.data, Opened):"),
            ("isinstance(event.data, Deposited) and event.data.amount", "getattr(event.data, 'amount', 0)"),
        ),
    )
    await rebuilt(book)
    assert resolutions(quarantine_of(book)) == {1: "quarantined", 2: "blocked", 3: "blocked"}
    assert book.rows() == []


async def test_projections_that_stop_and_that_quarantine_are_rebuilt_in_one_run(book: Book) -> None:
    book.fill(200)
    book.append_raw([("a-1", block("account.deposited"), BAD)])
    last = book.append_raw([("a-2", block("account.deposited"), b"{")])
    rows, quarantine = await projected_live(book, last)
    # The projection of owners takes no deposits, so a bad deposit does not concern it.
    await rebuilt(book, "balances", "owners")
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)
    with pytest.raises(CodecError, match=f"position {last}"):
        await rebuilt(book, "balances", "movements")
    book.append_raw([("a-3", block("account.stranger"), b"{}")])
    with pytest.raises(CodecError, match=r"account\.stranger"):
        await rebuilt(book, "balances", "owners")


async def test_a_projection_that_now_stops_on_errors_is_rebuilt_without_a_quarantine(book: Book) -> None:
    book.fill(100)
    last = book.append_raw([("a-1", block("account.deposited"), BAD)])
    await projected_live(book, last)
    deployed(book, book.altered((POISON[1], POISON[0]), (QUARANTINES[1], QUARANTINES[0])))
    await rebuilt(book)
    assert quarantine_of(book) == []
    assert book.rows() == book.folded(last)


async def test_resolutions_for_another_log_are_ignored(book: Book) -> None:
    book.append_raw([("a-1", block("account.deposited"), BAD)])
    await projected_live(book, 1)
    in_transaction(book, lambda connection: verdict.drop(connection, "balances", 1, [1]))
    book.delete()
    book.create()
    last = book.fill(50)
    await rebuilt(book)
    assert book.rows() == book.folded(last)
    assert quarantine_of(book) == []


async def test_a_verification_names_the_row_that_differs_and_since_when(book: Book) -> None:
    deposited = next(
        event_type for event_type in book.projections["balances"].events if event_type.__name__ == "Deposited"
    )
    book.append([("a-1", deposited(amount=Decimal(1))), ("a-1", deposited(amount=Decimal(2)))])
    book.append_raw([("a-1", block("account.deposited"), BAD)])
    last = book.append([("a-1", deposited(amount=Decimal(4))), ("a-2", deposited(amount=Decimal(4)))])
    await projected_live(book, last)
    assert [row.amount for row in book.rows()] == [3, 4]
    in_transaction(
        book,
        lambda connection: connection.execute(
            text("update balances set amount = '1.00', events = 1 where account_id = 'a-1'")
        ),
    )
    report = await verify(book.ref, "balances", book.settings)
    assert report.differences == 1
    assert report.examples[0].since == "missed since 2"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rebuild_on_spark_makes_the_same_rows_and_the_same_quarantine(book: Book, spark: Started) -> None:
    last = mixed(book, 1_500)
    await projected_live(book, last)
    await resolve_some(book)
    last = mixed(book, 300, seed=4)
    rows, quarantine = await projected_live(book, last)
    await rebuilt(book, engine="spark")
    assert (book.rows(), quarantine_of(book)) == (rows, quarantine)
    assert (await verify(book.ref, "balances", book.settings, engine="spark")).differences == 0
