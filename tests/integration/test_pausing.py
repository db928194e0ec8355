"""A pause fences the worker, outlasts a rebuild, and ends with the earlier state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import NotCaughtUp, Unreachable, UsageError
from eventjet.rebuild import rebuild
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.revisions import Paused, pause, resume
from eventjet.subscriptions.context import Session, WorkerOptions
from tests.integration.ledger_log import eventually
from tests.integration.rebuild_log import Book

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)
BALANCES_ONLY = [("balances", 1)]


@pytest.fixture(params=["postgresql", "sqlite"])
def book(request: pytest.FixtureRequest, eventjet_nats: NatsServer, tmp_path: Path) -> Book:
    database = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        database = request.getfixturevalue("eventjet_database")
    book = Book(Settings.load({"servers": eventjet_nats.url, "database": database}, {}), tmp_path)
    book.init()
    return book


def checkpoint_of(book: Book) -> Checkpoint:
    checkpoint = book.checkpoint()
    assert checkpoint is not None
    return checkpoint


async def caught_up(book: Book, position: int, timeout_s: float = 30) -> None:
    await book.caught_up(position, book.projections["balances"], timeout_s)


async def is_owned(book: Book) -> bool:
    return (await book.status()).owner is not None


async def is_active(book: Book) -> bool:
    return (await book.status()).state == "active"


@asynccontextmanager
async def caught_up_worker(book: Book) -> AsyncGenerator[int]:
    """Run a worker until it is active at the end of a short log, and yield the position."""
    last = book.fill(200)
    async with book.working("balances", options=QUICK):
        await caught_up(book, last)
        await eventually(lambda: is_active(book), "the projection to be active")
        yield last


async def test_a_pause_fences_the_worker_and_resuming_lets_it_continue(book: Book) -> None:
    async with caught_up_worker(book) as last:
        before = checkpoint_of(book)
        assert await pause(book.settings.database, BALANCES_ONLY) == [
            Paused("balances", 1, "paused", last, changed=True)
        ]
        after = checkpoint_of(book)
        assert (after.state, after.epoch, after.owner, after.reason) == (
            "paused",
            before.epoch + 1,
            None,
            "paused while active",
        )
        assert await pause(book.settings.database, BALANCES_ONLY) == [
            Paused("balances", 1, "paused", last, changed=False)
        ]
        newer = book.fill(100, seed=2)
        with pytest.raises(NotCaughtUp, match="is paused at position 200 and will not reach 300"):
            await caught_up(book, newer)
        # The worker notices the pause at its next renewal, and then waits.
        await asyncio.sleep(2 * QUICK.lease_s)
        assert (checkpoint_of(book).position, checkpoint_of(book).owner, checkpoint_of(book).epoch) == (
            last,
            None,
            before.epoch + 1,
        )
        assert await resume(book.settings.database, BALANCES_ONLY) == [
            Paused("balances", 1, "active", last, changed=True)
        ]
        assert checkpoint_of(book).reason is None
        await caught_up(book, newer)
    assert book.rows() == book.folded(newer)


async def test_pauses_between_batches_lose_and_repeat_nothing(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    last = book.fill(2_500)
    write = Session.write

    async def write_slowly(session: Session, *call: Any, **named: Any) -> Any:
        await asyncio.sleep(0.05)
        return await write(session, *call, **named)

    monkeypatch.setattr(Session, "write", write_slowly)
    async with book.working("balances", options=WorkerOptions(batch_max=20, lease_s=1.5, poll_s=0.05)):
        for round_ in range(1, 6):

            async def is_further(target: int = round_ * 200) -> bool:
                return checkpoint_of(book).position >= target

            await eventually(is_further, "progress")
            (paused,) = await pause(book.settings.database, BALANCES_ONLY)
            assert checkpoint_of(book).position == paused.position < last
            (resumed,) = await resume(book.settings.database, BALANCES_ONLY)
            assert (resumed.position, resumed.state) == (paused.position, "building")
        monkeypatch.undo()
        await caught_up(book, last)
    assert book.rows() == book.folded(last)


async def test_a_worker_is_ready_and_idle_while_its_projection_is_paused(book: Book) -> None:
    await pause(book.settings.database, BALANCES_ONLY)
    assert (checkpoint_of(book).state, checkpoint_of(book).reason) == ("paused", "paused while new")
    book.fill(20)
    async with book.working("balances", options=QUICK):  # is ready
        assert (checkpoint_of(book).position, checkpoint_of(book).owner) == (0, None)
        (resumed,) = await resume(book.settings.database, BALANCES_ONLY)
        assert resumed.state == "new"
        await caught_up(book, 20)
        await eventually(lambda: is_active(book), "the projection to be active")
        await eventually(lambda: is_owned(book), "an owner")


async def test_a_rebuild_of_a_paused_projection_swaps_and_leaves_it_paused(book: Book) -> None:
    async with caught_up_worker(book):
        await pause(book.settings.database, BALANCES_ONLY)
        newer = book.fill(100, seed=2)
        report = await rebuild(book.ref, ["balances"], book.settings, engine="local")
        assert report.position == newer
        swapped = checkpoint_of(book)
        assert (swapped.state, swapped.reason, swapped.position) == ("paused", "paused while active", newer)
        assert (swapped.owner, swapped.generation) == (None, 2)
        assert book.rows() == book.folded(newer)
        newest = book.fill(50, seed=3)
        await asyncio.sleep(2 * QUICK.lease_s)
        assert checkpoint_of(book).position == newer
        await resume(book.settings.database, BALANCES_ONLY)
        await caught_up(book, newest)
    assert book.rows() == book.folded(newest)


@pytest.mark.parametrize("other", ["failed", "retired"])
async def test_a_failed_or_retired_projection_cannot_be_paused(book: Book, other: str) -> None:
    await pause(book.settings.database, BALANCES_ONLY)
    set_state(book, other)
    with pytest.raises(UsageError, match=rf"Revision 1 of projection 'balances' is {other} \(because\), so nothing"):
        await pause(book.settings.database, [("owners", 1), *BALANCES_ONLY])
    owners = book.checkpoint("owners")
    assert owners is not None
    assert owners.state == "new"  # all or none
    with pytest.raises(UsageError, match=f"is {other}, not paused"):
        await resume(book.settings.database, BALANCES_ONLY)


async def test_only_a_paused_projection_can_be_resumed(book: Book) -> None:
    with pytest.raises(UsageError, match=r"'balances' is new, not paused. Nothing to resume."):
        await resume(book.settings.database, BALANCES_ONLY)
    with pytest.raises(UsageError, match=r"no revision 7 of projection 'balances'. See `eventjet status`"):
        await pause(book.settings.database, [("balances", 7)], declared=False)
    unreachable = "postgresql://127.0.0.1:1/x"
    with pytest.raises(Unreachable):
        await pause(unreachable, BALANCES_ONLY)


def set_state(book: Book, state: str) -> None:
    with book.where.sync_engine().begin() as connection:
        change = f"update eventjet_projection set state = '{state}', reason = 'because.' where name = 'balances'"
        connection.exec_driver_sql(change)
