"""Code of a projection that is changed without a new revision is told: who made the rows is noted with them."""

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
"""A fold that makes other rows of the events that come."""
TURNED = ("events=row.events + 1", "events=1 + row.events")
"""Another fold that makes the same rows."""
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
    """The app of a book with other code, over the same log."""

    def __init__(self, book: Book, *replacements: tuple[str, str]) -> None:
        self.ref: AppRef = book.altered(*replacements)
        wired: Any = self.ref.load()
        super().__init__(book.settings, book.name, wired.catalog, dict(wired.projections))

    def code(self, name: str = "balances") -> str:
        return self.projections[name].code

    async def works(self, last: int, name: str = "balances") -> None:
        """A worker of this release starts, gets as far as this, and is drained."""
        async with self.working(name, options=QUICK):
            await self.caught_up(last, self.projections[name])


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned of since it was asked the last time."""
    caplog.set_level(logging.INFO, "eventjet")

    def since() -> list[str]:
        found = [one for one in caplog.records if getattr(one, "event", "") == "eventjet.code_changed"]
        caplog.clear()
        return [one.getMessage() for one in found]

    return since


Warnings = Callable[[], list[str]]


def noted(book: Ledger, name: str = "balances") -> list[str]:
    """The fingerprints that the checkpoint keeps."""
    ((code,),) = execute(book.settings.database, f"select code from eventjet_projection where name = '{name}'")
    return code.split(",")


def depose(book: Book) -> None:
    """End the term of whoever works."""
    book.execute("update eventjet_projection set epoch = epoch + 1, owner = null, lease_until = 0")


async def test_a_fold_changed_without_a_new_revision_is_told_once_by_each_worker_that_goes_on(
    book: Book, warnings: Warnings
) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.works(book.fill(100))
    assert (noted(book), warnings()) == ([old.code()], [])
    for _ in range(2):
        async with new.working("balances", options=QUICK):
            for number in range(3):
                await new.caught_up(book.fill(50, seed=number))
                depose(book)
        assert noted(book) == [old.code(), new.code()]
        (told,) = warnings()
        assert told.startswith("balances revision 1: rows that are there were made by other code")
        for way_out in ("`eventjet verify balances`", "`eventjet rebuild balances`", "`revision=2`"):
            assert way_out in told


@pytest.mark.parametrize("name", ["owners", "turnover", "movements"])
async def test_the_code_of_every_shape_of_fold_is_known(book: Book, warnings: Warnings, name: str) -> None:
    changes = {
        "owners": ("row.accounts + 1 if row", "row.accounts + 2 if row"),
        "turnover": ("return [event.aggregate_id, event.data.to]", "return [event.data.to, event.aggregate_id]"),
        "movements": ("event.aggregate_id, event.data.amount)", "event.aggregate_id, -event.data.amount)"),
    }
    old, new = Release(book), Release(book, changes[name])
    book.init()
    await old.works(book.fill(50), name)
    await new.works(book.fill(50), name)
    assert (noted(book, name), len(warnings())) == ([old.code(name), new.code(name)], 1)


async def test_a_rebuild_by_the_new_code_ends_the_warning(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.works(book.fill(50))
    await new.works(book.fill(50))
    assert len(warnings()) == 1
    await rebuild(new.ref, ["balances"], book.settings, engine="local")
    assert noted(book) == [new.code()]
    await new.works(book.fill(50))
    assert (noted(book), warnings()) == ([new.code()], [])


async def test_a_verification_that_finds_no_difference_ends_the_warning(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TURNED)
    book.init()
    await old.works(book.fill(50))
    await new.works(book.fill(50))
    assert len(warnings()) == 1
    assert (await verify(new.ref, "balances", book.settings, engine="local")).differences == 0
    assert noted(book) == [new.code()]
    await new.works(book.fill(50))
    assert warnings() == []


async def test_a_verification_ends_it_while_a_worker_of_the_new_code_goes_on(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TURNED)
    book.init()
    await old.works(book.fill(50))
    async with new.working("balances", options=QUICK):
        await new.caught_up(book.fill(50))
        assert (await verify(new.ref, "balances", book.settings, engine="local")).differences == 0
        assert noted(book) == [new.code()]
    assert len(warnings()) == 1


async def test_a_verification_that_finds_differences_ends_nothing(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.works(book.fill(50))
    await new.works(book.fill(50))
    assert (await verify(new.ref, "balances", book.settings, engine="local")).differences > 0
    assert (noted(book), len(warnings())) == ([old.code(), new.code()], 1)
    await new.works(book.fill(50))
    assert len(warnings()) == 1


async def test_a_verification_says_nothing_of_rows_that_a_worker_of_other_code_may_write_meanwhile(book: Book) -> None:
    old, new = Release(book), Release(book, TURNED)
    book.init()
    async with old.working("balances", options=QUICK):
        await old.caught_up(book.fill(50))
        assert (await verify(new.ref, "balances", book.settings, engine="local")).differences == 0
        assert noted(book) == [old.code()]


async def test_what_begins_anew_is_of_the_code_that_begins(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, TENFOLD)
    book.init()
    await old.works(book.fill(50))
    await asyncio.to_thread(reset, book.where, new.projections["balances"])
    await new.works(book.fill(50))
    assert (noted(book), warnings()) == ([new.code()], [])


async def test_sql_by_hand_is_told_and_ended_alike(book: Book, warnings: Warnings) -> None:
    old, same, new = (
        Release(book, *BY_HAND, *more) for more in ((), (("STEP = 1", "STEP = 2 - 1"),), (("STEP = 1", "STEP = 2"),))
    )
    old.init()
    counted = cast("AnyResolved", old.projections["counted"])
    assert counted.name == "counted"
    await old.works(book.fill(50), "counted")
    await same.works(book.fill(50), "counted")
    assert (noted(book, "counted"), len(warnings())) == ([old.code("counted"), same.code("counted")], 1)
    assert (await verify(same.ref, "counted", book.settings, engine="local")).differences == 0
    assert noted(book, "counted") == [same.code("counted")]
    await new.works(book.fill(50), "counted")
    assert len(warnings()) == 1
    await rebuild(new.ref, ["counted"], book.settings, engine="local")
    await new.works(book.fill(50), "counted")
    assert (noted(book, "counted"), warnings()) == ([new.code("counted")], [])


async def test_a_comment_that_is_changed_is_not_told(book: Book, warnings: Warnings) -> None:
    old, new = Release(book), Release(book, COMMENTED, ("def balances(", "def balances(\n    "))
    book.init()
    for release in (old, new, old):
        await release.works(book.fill(50))
    assert (noted(book), warnings()) == ([old.code()], [])


async def test_a_helper_that_is_changed_is_told(book: Book, warnings: Warnings) -> None:
    old, new = Release(book, *HELPED), Release(book, *HELPED, ("return one + other", "return one + other + other"))
    book.init()
    await old.works(book.fill(50))
    assert warnings() == []
    await new.works(book.fill(50))
    assert len(warnings()) == 1
