"""A verification finds exactly the rows that differ, says since when, and changes nothing."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import LogRolledBack, RebuildError
from eventjet.operations.reports import difference_text
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.locations import create_tables
from tests.integration.rebuild_log import ALL, Book, remains


async def rebuilt(book: Book, *names: str) -> None:
    await rebuild(book.ref, names or ["balances"], book.settings, engine="local")


async def test_a_read_model_kept_by_a_worker_has_no_differences(book: Book) -> None:
    last = book.fill(3_000)
    book.init()
    async with book.working():
        for resolved in book.projections.values():
            await book.caught_up(last, resolved)
        for name in ALL:
            report = await verify(book.ref, name, book.settings)
            assert (report.differences, report.position, report.events) == (0, last, 3_000), name
            assert report.rows == book.count(name)
    assert remains(book.where) == []


async def test_a_read_model_behind_the_log_is_verified_at_its_position(book: Book) -> None:
    last = book.fill(1_000)
    await rebuilt(book)
    book.fill(500, seed=2)
    report = await verify(book.ref, "balances", book.settings)
    assert (report.position, report.differences) == (last, 0)


async def test_a_duplicate_row_of_a_key_is_a_difference(postgres_book: Book) -> None:
    book = postgres_book
    book.fill(200)
    await rebuilt(book)
    key = book.rows()[3].account_id
    book.execute(
        "alter table balances drop constraint balances_pkey",
        f"insert into balances select * from balances where account_id = '{key}'",
    )
    report = await verify(book.ref, "balances", book.settings)
    assert (report.differences, report.rows) == (1, len(book.rows()))
    assert [example.key for example in report.examples] == [(key,)]


async def test_an_equal_value_that_is_stored_differently_is_named(nats: NatsServer, tmp_path: Path) -> None:
    """SQLite stores its own sums as text with fewer decimals, which sorts and compares differently there."""
    book = Book(Settings(servers=(nats.url,), database=f"sqlite:///{tmp_path}/read.db"), tmp_path)
    book.fill(200)
    await rebuilt(book)
    integral = next(row for row in book.rows() if row.amount == int(row.amount))
    book.execute(f"update balances set amount = '{int(integral.amount)}.0' where account_id = '{integral.account_id}'")
    report = await verify(book.ref, "balances", book.settings)
    (example,) = report.examples
    assert (example.live, example.columns, example.since) == (example.expected, ("amount",), "never equal")
    text = f"amount is {int(integral.amount)}.0 and should be {int(integral.amount)}.00"
    assert difference_text(example, private=False) == text


async def test_rows_altered_added_and_removed_by_hand_are_each_named(book: Book) -> None:
    book.fill(2_000)
    await rebuilt(book)
    before = book.rows()
    altered, removed = before[3], before[7]
    book.execute(
        f"update balances set amount = '{altered.amount + 1}' where account_id = '{altered.account_id}'",
        f"delete from balances where account_id = '{removed.account_id}'",
        "insert into balances (account_id, owner, amount, kind, opened, notes, events) "
        "select 'stranger', owner, amount, kind, opened, notes, events from balances limit 1",
    )
    report = await verify(book.ref, "balances", book.settings)
    examples = {example.key[0]: example for example in report.examples}
    assert report.differences == 3
    assert set(examples) == {altered.account_id, removed.account_id, "stranger"}
    assert examples[altered.account_id].live.amount == altered.amount + 1
    assert examples[altered.account_id].expected == altered
    assert {key: example.columns for key, example in examples.items()} == {
        altered.account_id: ("amount",),
        removed.account_id: (),
        "stranger": (),
    }
    assert (examples[removed.account_id].live, examples[removed.account_id].expected) == (None, removed)
    assert examples["stranger"].since == "never equal"
    assert remains(book.where) == []
    await rebuilt(book)
    assert (await verify(book.ref, "balances", book.settings)).differences == 0


async def test_an_event_that_never_arrived_is_named(book: Book) -> None:
    names: dict[str, Any] = {event_type.__name__: event_type for event_type in book.projections["balances"].events}
    book.append([("a", names["Opened"](owner="ada")), ("b", names["Opened"](owner="bob"))])
    await rebuilt(book)
    position = book.append([("a", names["Deposited"](amount=Decimal(5)))])
    last = book.append([("b", names["Deposited"](amount=Decimal(1)))])
    # A worker that had skipped one event would leave these values.
    book.execute(
        "update balances set amount = '1.00', events = 2 where account_id = 'b'",
        f"update eventjet_projection set position = {last}, event_id = '{event_id(book, last)}'",
    )
    report = await verify(book.ref, "balances", book.settings)
    assert [(example.key, example.since) for example in report.examples] == [(("a",), f"missed since {position}")]


@pytest.mark.parametrize("name", ["turnover", "movements", "owners"])
async def test_differences_are_explained_for_keys_of_every_type(book: Book, name: str) -> None:
    last = book.fill(1_000)
    await rebuilt(book, name)
    resolved = book.projections[name]
    first = book.rows(name)[0]
    key = getattr(first, resolved.key_columns[0])
    literal = str(key).replace("'", "''")
    book.execute(f"delete from {name} where {resolved.key_columns[0]} = '{literal}'")
    report = await verify(book.ref, name, book.settings)
    assert [example.key for example in report.examples] == [(key,)]
    assert report.examples[0].since.startswith("missed since ")
    assert report.position == last


async def test_only_the_first_twenty_differences_are_explained(book: Book) -> None:
    book.fill(2_000)
    await rebuilt(book)
    book.execute("update balances set owner = 'nobody'")
    report = await verify(book.ref, "balances", book.settings)
    assert (report.differences, len(report.examples)) == (book.count(), 20)


async def test_an_undeclared_index_does_not_hinder_a_verification(book: Book) -> None:
    book.fill(100)
    await rebuilt(book)
    book.execute("create index by_hand on balances (events)")
    assert (await verify(book.ref, "balances", book.settings)).differences == 0


async def test_a_projection_that_never_ran_cannot_be_verified(book: Book) -> None:
    book.fill(10)
    create_tables(book.where.sync_engine())
    with pytest.raises(RebuildError, match="no live read model yet"):
        await verify(book.ref, "balances", book.settings)
    assert remains(book.where) == []


async def test_a_read_model_of_another_log_is_refused(book: Book) -> None:
    book.fill(100)
    await rebuilt(book)
    book.delete()
    book.create()
    book.fill(200)
    with pytest.raises(LogRolledBack, match="made from the log"):
        await verify(book.ref, "balances", book.settings)
    assert remains(book.where) == []


def event_id(book: Book, position: int) -> str:
    return book.recorded(position)[-1].event_id
