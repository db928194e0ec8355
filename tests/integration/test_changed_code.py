"""Changed code of a projection without a new revision is reported: the checkpoint records which code wrote rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from eventjet.projections.app_ref import AppRef
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import rebuild, verify
from eventjet.sql.revisions import reset
from eventjet.subscriptions.context import WorkerOptions
from tests.integration.ledger_log import Ledger
from tests.integration.rebuild_log import Book
from tests.tables import execute

QUICK = WorkerOptions(lease_s=5.0, poll_s=0.05, backoff_s=(0.05, 0.2))
TENFOLD = ("events=row.events + 1", "events=row.events + 10")
"""A changed fold that gives other rows."""
TURNED = ("events=row.events + 1", "events=1 + row.events")
"""A changed fold that gives the same rows."""
COMMENTED = ("    row = replace(row, events=", "    # Counts them.\n    row = replace(row, events=")
HELPED = (
    ("row.amount + amount)", "plus(row.amount, amount))"),
    (
        '@projection("balances"',
        'def plus(one: Decimal, other: Decimal) -> Decimal:\n    return one + other\n\n\n@projection("balances"',
    ),
)
BY_HAND = (
    ("from eventjet import App", "from eventjet import SqlProjection, App"),
    (
        'app = App("',
        """
counts = Table("counts", metadata, Column("name", String(20), primary_key=True), Column("n", Integer, nullable=False))
counted = SqlProjection("counted", tables=[counts])


@counted.handler
async def count(event: Recorded[Deposited], connection) -> None:
    if event.position == 1 or not (await connection.execute(counts.update().values(n=counts.c.n + STEP))).rowcount:
        await connection.execute(counts.insert().values(name="deposited", n=1))


STEP = 1
app = App(\"""",
    ),
    ("turnover, movements]", "turnover, movements, counted]"),
)


class Release(Ledger):
    """The app of a book with changed code, over the same log."""

    def __init__(self, book: Book, *replacements: tuple[str, str]) -> None:
        self.ref: AppRef = book.altered(*replacements)
        wired: Any = self.ref.load()
        super().__init__(book.settings, book.name, wired.catalog, dict(wired.projections))

    def code(self, name: str = "balances") -> str:
        return self.projections[name].code

    async def work_until(self, last: int, name: str = "balances") -> None:
        """Run a worker of this release until a position, and drain it."""
        async with self.working(name, options=QUICK):
            await self.caught_up(last, self.projections[name])


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that gives the warnings since its last call."""
    caplog.set_level(logging.INFO, "eventjet")

    def messages_since_last_call() -> list[str]:
        records = [record for record in caplog.records if getattr(record, "event", "") == "eventjet.code_changed"]
        caplog.clear()
        return [record.getMessage() for record in records]

    return messages_since_last_call


Warnings = Callable[[], list[str]]


def recorded_codes(book: Ledger, name: str = "balances") -> list[str]:
    """Return the fingerprints of code in the checkpoint."""
    ((code,),) = execute(book.settings.database, f"select code from eventjet_projection where name = '{name}'")
    return code.split(",")


def depose(book: Book) -> None:
    """End the lease of the current worker."""
    book.execute("update eventjet_projection set epoch = epoch + 1, owner = null, lease_until = 0")


async def test_each_worker_reports_a_fold_changed_without_a_new_revision_once(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.work_until(book.fill(100))
    assert (recorded_codes(book), warnings()) == ([old.code()], [])
    for _ in range(2):
        async with new.working("balances", options=QUICK):
            for number in range(3):
                await new.caught_up(book.fill(50, seed=number))
                depose(book)
        assert recorded_codes(book) == [old.code(), new.code()]
        (warning,) = warnings()
        assert warning.startswith("balances revision 1: rows that are there were made by other code")
        for way_out in ("`eventjet verify balances`", "`eventjet rebuild balances`", "`revision=2`"):
            assert way_out in warning


@pytest.mark.parametrize("name", ["owners", "turnover", "movements"])
async def test_a_change_of_each_kind_of_fold_is_noticed(book: Book, warnings: Warnings, name: str) -> None:
    changes = {
        "owners": ("row.accounts + 1 if row", "row.accounts + 2 if row"),
        "turnover": ("return [event.aggregate_id, event.data.to]", "return [event.data.to, event.aggregate_id]"),
        "movements": ("event.aggregate_id, event.data.amount)", "event.aggregate_id, -event.data.amount)"),
    }
    old, new = Release(book), Release(book, changes[name])
    book.init()
    await old.work_until(book.fill(50), name)
    await new.work_until(book.fill(50), name)
    assert (recorded_codes(book, name), len(warnings())) == ([old.code(name), new.code(name)], 1)


async def test_a_rebuild_by_the_new_code_ends_the_warning(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.work_until(book.fill(50))
    await new.work_until(book.fill(50))
    assert len(warnings()) == 1
    await rebuild(new.ref, ["balances"], book.settings, engine="local")
    assert recorded_codes(book) == [new.code()]
    await new.work_until(book.fill(50))
    assert (recorded_codes(book), warnings()) == ([new.code()], [])


async def test_a_verification_that_finds_no_difference_ends_the_warning(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TURNED)
    book.init()
    await old.work_until(book.fill(50))
    await new.work_until(book.fill(50))
    assert len(warnings()) == 1
    assert (await verify(new.ref, "balances", book.settings, engine="local")).differences == 0
    assert recorded_codes(book) == [new.code()]
    await new.work_until(book.fill(50))
    assert warnings() == []


async def test_a_verification_ends_the_warning_while_a_worker_of_the_new_code_runs(
    book: Book, warnings: Warnings
) -> None:
    old, new = Release(book), Release(book, TURNED)
    book.init()
    await old.work_until(book.fill(50))
    async with new.working("balances", options=QUICK):
        await new.caught_up(book.fill(50))
        assert (await verify(new.ref, "balances", book.settings, engine="local")).differences == 0
        assert recorded_codes(book) == [new.code()]
    assert len(warnings()) == 1


async def test_a_verification_with_differences_does_not_end_the_warning(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.work_until(book.fill(50))
    await new.work_until(book.fill(50))
    assert (await verify(new.ref, "balances", book.settings, engine="local")).differences > 0
    assert (recorded_codes(book), len(warnings())) == ([old.code(), new.code()], 1)
    await new.work_until(book.fill(50))
    assert len(warnings()) == 1


async def test_a_verification_is_not_recorded_while_a_worker_of_other_code_runs(book: Book) -> None:
    old, new = Release(book), Release(book, TURNED)
    book.init()
    async with old.working("balances", options=QUICK):
        await old.caught_up(book.fill(50))
        assert (await verify(new.ref, "balances", book.settings, engine="local")).differences == 0
        assert recorded_codes(book) == [old.code()]


async def test_a_reset_projection_records_only_the_new_code(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.work_until(book.fill(50))
    await asyncio.to_thread(reset, book.where, new.projections["balances"])
    await new.work_until(book.fill(50))
    assert (recorded_codes(book), warnings()) == ([new.code()], [])


async def test_changed_sql_handlers_are_reported_like_folds(book: Book, warnings: Warnings) -> None:
    old, same, new = (
        Release(book, *BY_HAND, *more) for more in ((), (("STEP = 1", "STEP = 2 - 1"),), (("STEP = 1", "STEP = 2"),))
    )
    old.init()
    counted = cast("AnyResolved", old.projections["counted"])
    assert counted.name == "counted"
    await old.work_until(book.fill(50), "counted")
    await same.work_until(book.fill(50), "counted")
    assert (recorded_codes(book, "counted"), len(warnings())) == ([old.code("counted"), same.code("counted")], 1)
    assert (await verify(same.ref, "counted", book.settings, engine="local")).differences == 0
    assert recorded_codes(book, "counted") == [same.code("counted")]
    await new.work_until(book.fill(50), "counted")
    assert len(warnings()) == 1
    await rebuild(new.ref, ["counted"], book.settings, engine="local")
    await new.work_until(book.fill(50), "counted")
    assert (recorded_codes(book, "counted"), warnings()) == ([new.code("counted")], [])


async def test_a_changed_comment_is_not_reported(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, COMMENTED, ("def balances(", "def balances(\n    "))
    book.init()
    for release in (old, new, old):
        await release.work_until(book.fill(50))
    assert (recorded_codes(book), warnings()) == ([old.code()], [])


async def test_a_changed_helper_function_is_reported(book: Book, warnings: Warnings) -> None:
    old, new = Release(book, *HELPED), Release(book, *HELPED, ("return one + other", "return one + other + other"))
    book.init()
    await old.work_until(book.fill(50))
    assert warnings() == []
    await new.work_until(book.fill(50))
    assert len(warnings()) == 1
