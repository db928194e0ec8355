"""A dropped or recreated table is never mistaken for the table that a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eventjet.errors import TableLost, UsageError
from eventjet.rebuild import rebuild
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import DECLARED, Checkpoint
from eventjet.sql.locations import located
from eventjet.sql.own_tables import projections
from eventjet.sql.revisions import reset
from tests.integration.by_hand import LEDGER, QUICK, expected, table_rows
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, folded, rows_of
from tests.integration.rebuild_log import Book
from tests.tables import reading

ALL = ["balances", "movements"]


def drop_table(ledger: Ledger, name: str = "balances") -> None:
    ledger.execute(f"drop table {name}")


def recreate_table(ledger: Ledger) -> None:
    """Drop and create the table, as a foreign migration would."""
    drop_table(ledger)
    with ledger.where.sync_engine().begin() as connection:
        located(BALANCES.table, DECLARED, ledger.where.dialect).create(connection)


LOSSES = pytest.mark.parametrize(
    ("lose", "message"),
    [(drop_table, "'balances' is not in the database"), (recreate_table, "'balances' is another table than the one")],
)


def checkpoint_of(ledger: Ledger, name: str = "balances") -> Checkpoint:
    with reading(ledger.settings.database) as connection:
        current = checkpoint.read(connection, name, 1)
    assert current is not None
    return current


async def worked(ledger: Ledger, count: int = 60) -> int:
    """Let a worker bring the read models to the end of a log; return the last position."""
    last = ledger.append(history(count))
    async with ledger.working():
        for name in ledger.projections:
            await ledger.caught_up(last, ledger.projections[name])
    return last


@LOSSES
async def test_an_idle_worker_stops_the_projection_of_a_lost_table(
    ledger: Ledger, lose: Callable[[Ledger], None], message: str
) -> None:
    last = ledger.append(history(60))
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last)
        await ledger.caught_up(last, MOVEMENTS)
        lose(ledger)

        async def is_stopped() -> bool:
            return checkpoint_of(ledger).state == "failed"

        await eventually(is_stopped, "the worker to stop it")
        assert message in str((await ledger.status()).reason)
        last = ledger.append(history(20, seed=8))
        await ledger.caught_up(last, MOVEMENTS)
        assert checkpoint_of(ledger).position < last


@LOSSES
async def test_status_init_and_the_next_worker_report_a_lost_table(
    ledger: Ledger, lose: Callable[[Ledger], None], message: str
) -> None:
    await worked(ledger)
    lose(ledger)
    status = await ledger.status()
    assert status.state == "failed"
    assert message in str(status.reason)
    assert "eventjet init --reset balances" in str(status.reason)
    with pytest.raises(TableLost, match=message):
        ledger.init()
    last = ledger.append(history(20, seed=8))
    async with ledger.working(options=QUICK):
        await ledger.caught_up(last, MOVEMENTS)
        await ledger.failed()
        assert message in str(checkpoint_of(ledger).reason)


async def test_a_reset_projection_begins_with_the_first_event_in_a_running_worker(ledger: Ledger) -> None:
    last = await worked(ledger)
    recreate_table(ledger)
    async with ledger.working(options=QUICK):
        await ledger.failed()
        assert reset(ledger.where, BALANCES) == ["balances"]
        await ledger.caught_up(last)
        assert ledger.init() == []
        assert (await ledger.status()).reason is None
    with reading(ledger.settings.database) as connection:
        assert rows_of(connection, BALANCES) == folded(ledger.recorded(last))


async def test_a_reset_of_a_running_projection_ends_its_lease_and_its_quarantine(book: Book) -> None:
    book.init()
    last = book.fill(300)
    async with book.working(options=QUICK):
        await book.caught_up(last, book.projections["balances"])
        epoch = checkpoint_of(book).epoch
        book.execute(
            "insert into eventjet_quarantine (projection, revision, position, aggregate, aggregate_id, resolution,"
            " quarantined_at) values ('balances', 1, 3, 'ledger', 'a-1', 'dropped', 0)"
        )
        reset(book.where, book.projections["balances"])
        await book.caught_up(last, book.projections["balances"])
        assert checkpoint_of(book).epoch > epoch
        assert book.execute("select * from eventjet_quarantine") == []
    assert book.rows() == book.folded(last)


async def test_a_paused_projection_cannot_be_reset(ledger: Ledger) -> None:
    last = await worked(ledger)
    with ledger.where.sync_engine().begin() as connection:
        assert checkpoint.pause(connection, checkpoint_of(ledger))
    with pytest.raises(UsageError, match="it is paused"):
        reset(ledger.where, BALANCES)
    assert checkpoint_of(ledger).position == last


async def test_a_rebuild_recreates_a_lost_table_and_records_it(book: Book) -> None:
    book.init()
    last = book.fill(300)
    async with book.working("balances"):
        await book.caught_up(last, book.projections["balances"])
    drop_table(book)
    assert (await book.status()).state == "failed"
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert (await book.status()).state == "active"
    last = book.fill(50, seed=2)
    async with book.working("balances"):
        await book.caught_up(last, book.projections["balances"])
    assert book.rows() == book.folded(last)
    book.execute("drop table balances", "create table balances (account_id varchar(60) primary key)")
    assert (await book.status()).state == "failed"


async def test_each_table_of_an_sql_projection_is_checked(log: Ledger) -> None:
    last = await worked(log)
    drop_table(log, "totals")
    assert "'totals' is not in the database" in str((await log.failed()).reason)
    async with log.working(options=QUICK):
        assert reset(log.where, LEDGER)
        await log.caught_up(last, LEDGER)
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_deleted_rows_and_added_columns_are_not_noticed(ledger: Ledger) -> None:
    """The documentation says that these changes are not noticed."""
    await worked(ledger)
    ledger.execute("delete from balances", "alter table balances add column note text")
    assert (await ledger.status()).state == "active"


async def test_a_database_restored_from_a_dump_is_accepted_and_checked_again(ledger: Ledger) -> None:
    await worked(ledger)
    if ledger.where.dialect.name == "postgresql":
        restore_on_postgres(ledger, "balances", "movements", projections.name)
    assert (await ledger.status()).state == "active"
    last = await worked(ledger)
    with reading(ledger.settings.database) as connection:
        assert rows_of(connection, BALANCES) == folded(ledger.recorded(last))
    recreate_table(ledger)
    assert (await ledger.status()).state == "failed"


def restore_on_postgres(ledger: Ledger, *names: str) -> None:
    """Replace tables by others with the same names, columns and rows, as restoring a dump does."""
    for name in names:
        ledger.execute(
            f"create table restored (like {name} including all)",
            f"insert into restored select * from {name}",
            f"drop table {name}",
            f"alter table restored rename to {name}",
        )
