"""A rebuild whose events are folded by several processes: the same rows, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eventjet.errors import FoldProcessLost, RebuildError
from eventjet.rebuild import Progress, rebuild, verify
from eventjet.rebuild.job import EngineOptions
from tests.among import SEVERAL
from tests.fold_processes import MARK, fold_processes, fork_servers
from tests.integration.rebuild_log import ALL, Book, remains
from tests.integration.test_quarantine_rebuild import PARKS, POISON, deployed, kept, mixed
from tests.logs import fresh_name

PROCESSES = SEVERAL[0]
DIVISIBLE = ("balances", "movements")


def among(processes: int) -> EngineOptions:
    return EngineOptions("local", processes=processes)


@pytest.fixture(autouse=True, params=SEVERAL)
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here is run with each number of fold processes."""
    monkeypatch.setattr("tests.integration.test_divided_rebuild.PROCESSES", request.param)


async def made(book: Book, *names: str, processes: int | None = None, **options: Any) -> Any:
    engine = among(processes or PROCESSES)
    return await rebuild(book.ref, names or ["balances"], book.settings, engine=engine, **options)


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What names the fold processes of a test; none of them is left afterwards."""
    name = fresh_name("fold")
    monkeypatch.setenv(MARK, name)
    yield name
    assert (fold_processes(name), fork_servers(name)) == ([], [])


@pytest.mark.parametrize("more", [0, 2])
async def test_it_equals_the_live_fold_and_is_verified_in_the_same_way(book: Book, more: int) -> None:
    processes = PROCESSES + more
    last = book.fill(5_000)
    names = DIVISIBLE if book.where.dialect.is_concurrent else ("balances",)
    report = await made(book, *names, processes=processes)
    assert (report.position, report.events, report.engine) == (last, 5_000, "local")
    for name in names:
        assert book.rows(name) == book.folded(last, name), name
    found = await verify(book.ref, "balances", book.settings, engine=among(processes))
    assert (found.differences, found.rows) == (0, len(book.rows()))
    assert remains(book.where) == []


async def test_projections_of_other_keys_keep_it_in_one_process_and_that_is_said(book: Book) -> None:
    last = book.fill(2_000)
    told: list[Progress] = []
    await made(book, *ALL, progress=told.append)
    for name in ALL:
        assert book.rows(name) == book.folded(last, name), name
    said = [one.note for one in told if "whatever --processes says" in one.note]
    assert len(said) == 1
    assert "the key of owners is not the aggregate's id; the key of turnover is not the aggregate's id" in said[0]


async def test_an_empty_log_and_fewer_aggregates_than_processes(book: Book) -> None:
    report = await made(book, processes=4)
    assert (report.events, report.rows, book.rows()) == (0, 0, [])
    last = book.fill(50, accounts=1)
    await made(book, processes=4)
    assert book.rows() == book.folded(last)


async def test_what_the_quarantine_holds_and_what_is_parked_are_those_of_one_process(book: Book) -> None:
    deployed(book, book.altered(PARKS, POISON))
    book.init()
    mixed(book, 1_500)
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    alone = book.rows(), kept(book)
    assert len(alone[1]) > 20
    book.execute("delete from eventjet_quarantine")
    await made(book)
    assert (book.rows(), kept(book)) == alone
    assert (await verify(book.ref, "balances", book.settings, engine=among(PROCESSES))).differences == 0


async def test_an_event_that_cannot_be_taken_stops_it_by_name(book: Book) -> None:
    last = book.fill(500)
    await made(book)
    before = book.rows()
    opened = next(one for one in book.projections["balances"].events if one.__name__ == "Opened")
    position = book.append([("a-1", opened(owner="x" * 61))])
    with pytest.raises(RebuildError, match=rf"position {position} of 'a-1'"):
        await made(book)
    assert (book.rows(), remains(book.where)) == (before, [])
    assert last < position


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
async def test_a_fold_process_that_is_killed_or_stopped_ends_it_and_leaves_the_live_table(
    book: Book, ending: signal.Signals, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = book.fill(3_000)
    await made(book)
    before = book.rows(), book.checkpoint()
    # Stopped ones are waited for so long.
    monkeypatch.setattr("eventjet.rebuild.divided_load._BOUND_S", 5.0 if ending == signal.SIGSTOP else 600.0)
    book.fill(20_000, seed=2)
    with pytest.raises(FoldProcessLost):
        await made(book, progress=once_read(lambda: [os.kill(pid, ending) for pid in fold_processes(mark)]))
    assert (book.rows(), book.checkpoint()) == before
    assert before[1] is not None
    assert before[1].position == last
    assert remains(book.where) == []


async def test_a_cancelled_one_leaves_no_process_and_no_table(book: Book) -> None:
    book.fill(3_000)
    await made(book)
    before = book.rows(), book.checkpoint()
    book.fill(30_000, seed=2)
    reading, loop = asyncio.Event(), asyncio.get_running_loop()
    work = made(book, progress=once_read(lambda: loop.call_soon_threadsafe(reading.set)))
    task = asyncio.create_task(work)
    await asyncio.wait_for(reading.wait(), 120)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (book.rows(), book.checkpoint()) == before
    assert remains(book.where) == []


def once_read(act: Callable[[], object]) -> Callable[[Progress], None]:
    """Does it when the first events have been handed out."""
    done = threading.Event()

    def told(one: Progress) -> None:
        if one.phase == "read" and one.done and not done.is_set():
            done.set()
            act()

    return told
