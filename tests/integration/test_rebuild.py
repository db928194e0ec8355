"""A rebuild on the local engine, on both databases: the same rows as the live fold, online, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text

from eventjet.dev.nats import NatsServer
from eventjet.errors import HandlerFailed, RebuildError, RebuildRefused, Unreachable, UsageError, VerificationFailed
from eventjet.jetstream.connection import NatsConnection
from eventjet.rebuild import Progress, preview, rebuild, verify
from eventjet.rebuild.job import STOP_TIMEOUT_S
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.shadow import shadow_of
from eventjet.rebuild.workspace import load_part
from eventjet.settings import Settings
from eventjet.sql.revisions import Promoted, promote
from tests.integration.rebuild_log import ALL, Book, remains
from tests.tables import reading


async def made(book: Book, *names: str, **options: Any) -> Any:
    return await rebuild(book.ref, names or ["balances"], book.settings, engine="local", **options)


async def test_a_rebuild_equals_the_live_fold_and_a_worker_goes_on_from_there(book: Book) -> None:
    last = book.fill(5_000)
    report = await made(book, *ALL)
    assert (report.position, report.events) == (last, 5_000)
    assert [one.projection for one in report.projections] == list(ALL)
    for name in ALL:
        assert book.rows(name) == book.folded(last, name), name
    assert remains(book.where) == []
    at = book.checkpoint()
    assert at is not None
    assert (at.position, at.state, at.generation) == (last, "active", 2)
    last = book.fill(200, seed=2)
    async with book.working("balances"):
        await book.caught_up(last, book.projections["balances"])
    assert book.rows() == book.folded(last)


async def test_an_empty_log_gives_an_empty_table(book: Book) -> None:
    report = await made(book)
    assert (report.events, report.rows, book.rows()) == (0, 0, [])


async def test_a_log_that_does_not_begin_at_one(book: Book) -> None:
    with NatsConnection.open(book.endpoint) as link:
        config = link.api(f"STREAM.INFO.{book.name}")["config"]
        book.delete()
        link.api(f"STREAM.CREATE.{book.name}", {**config, "first_seq": 1_000})
    report = await made(book)
    assert (report.events, book.rows()) == (0, [])
    last = book.fill(50)
    report = await made(book)
    assert (report.events, report.position, last) == (50, 1_049, 1_049)
    assert book.count() > 0
    assert (await verify(book.ref, "balances", book.settings)).differences == 0


async def test_progress_is_told_and_never_goes_back_within_a_phase(book: Book) -> None:
    book.fill(6_000)
    told: list[Progress] = []
    await made(book, progress=told.append)
    read = [one for one in told if one.phase == "read"]
    assert [one.done for one in read] == sorted(one.done for one in read)
    assert (read[-1].done, read[-1].total) == (6_000, 6_000)
    assert {"start", "read", "load", "index", "swap"} <= {one.phase for one in told}


async def test_nobody_reads_an_empty_partial_or_older_table_while_it_is_rebuilt(book: Book) -> None:
    book.fill(3_000)
    seen: list[tuple[int, int]] = []
    stop = threading.Event()
    book.init()
    async with book.working("balances"):
        await book.caught_up(3_000, book.projections["balances"])
        reader = threading.Thread(target=read_on, args=(book, stop, seen))
        writer = threading.Thread(target=append_on, args=(book, stop))
        for thread in (reader, writer):
            thread.start()
        try:
            for _ in range(3):
                report = await made(book)
                # A worker's statement and the swap take their locks in the same order.
                assert report.seconds["swap"] < 20
            async with asyncio.timeout(60):
                while len(seen) <= 10:
                    await asyncio.sleep(0.02)
        finally:
            stop.set()
            await asyncio.to_thread(reader.join)
            await asyncio.to_thread(writer.join)
        last = book.fill(1, seed=99)
        await book.caught_up(last, book.projections["balances"])
    assert book.rows() == book.folded(last)
    assert [position for position, _ in seen] == sorted(position for position, _ in seen)
    events = [count for _, count in seen]
    assert min(events) > 0
    # Every event of an open account counts, and few accounts are closed: a partial table would have far fewer.
    assert all(after > 0.9 * before for before, after in pairwise(events))


async def test_a_cancelled_rebuild_leaves_the_live_table_and_nothing_else(book: Book) -> None:
    last = book.fill(3_000)
    await made(book)
    before = book.rows(), book.checkpoint()
    book.fill(30_000, seed=2)
    reading = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(made(book, progress=lambda one: at_read(one, loop, reading)))
    await asyncio.wait_for(reading.wait(), 60)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < STOP_TIMEOUT_S
    assert (book.rows(), book.checkpoint()) == before
    assert before[1] is not None
    assert before[1].position == last
    assert remains(book.where) == []


async def test_two_rebuilds_at_once_both_end_well(book: Book) -> None:
    last = book.fill(5_000)
    first, second = await asyncio.gather(made(book), made(book))
    assert {first.projections[0].generation, second.projections[0].generation} == {2, 3}
    # Now there is a live table, and the one that is second finds another than it knew.
    first, second = await asyncio.gather(made(book), made(book))
    assert {first.projections[0].generation, second.projections[0].generation} == {4, 5}
    assert book.rows() == book.folded(last)
    assert remains(book.where) == []


async def test_an_event_that_the_projection_cannot_take_stops_it_by_name(book: Book) -> None:
    book.fill(100)
    opened = next(one for one in book.projections["balances"].events if one.__name__ == "Opened")
    position = book.append([("a-1", opened(owner="x" * 61))])
    with pytest.raises(HandlerFailed, match=rf"position {position} of 'a-1'"):
        await made(book)
    assert remains(book.where) == []


async def test_names_and_logs_that_do_not_exist_are_refused_at_once(book: Book) -> None:
    book.delete()
    for work in (
        made(book, "nothing"),
        verify(book.ref, "nothing", book.settings),
        preview(book.ref, ["nothing"], book.settings),
    ):
        with pytest.raises(UsageError, match="no projection 'nothing'"):
            await work
    with pytest.raises(Unreachable, match="does not exist"):
        await made(book)


async def test_an_unreachable_database_is_said_in_one_paragraph(nats: NatsServer, book: Book) -> None:
    settings = Settings.load({"servers": nats.url, "database": "postgresql://127.0.0.1:1/none"}, {})
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await rebuild(book.ref, ["balances"], settings, engine="local")


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("create view rich as select * from balances where amount > 0", "the view public.rich"),
        ("create table child (id text references balances)", "the foreign key child_id_fkey of child"),
        (
            "alter table balances add constraint own_fk foreign key (account_id) references balances",
            "the foreign key own_fk",
        ),
        ("create index by_hand on balances (events)", "the index by_hand"),
        ("create policy own on balances using (true)", "the policy own"),
    ],
)
async def test_what_a_swap_would_lose_is_refused_by_name(postgres_book: Book, statement: str, named: str) -> None:
    postgres_book.fill(100)
    await made(postgres_book)
    postgres_book.execute(statement)
    with pytest.raises(RebuildRefused, match=named):
        await made(postgres_book)
    assert remains(postgres_book.where) == []


async def test_rights_owners_and_names_are_the_same_after_a_swap(postgres_book: Book) -> None:
    postgres_book.fill(100)
    await made(postgres_book)
    role = f"reader_{os.getpid()}"
    postgres_book.execute(f"create role {role}")
    postgres_book.execute(f"grant select, update (owner) on balances to {role}")
    postgres_book.execute("alter table balances set (fillfactor = 70)")
    before = described(postgres_book)
    await made(postgres_book)
    assert described(postgres_book) == before
    postgres_book.execute(f"drop owned by {role}; drop role {role}")


async def test_a_reader_idle_in_a_transaction_delays_the_swap_and_nobody_else(postgres_book: Book) -> None:
    postgres_book.fill(100)
    await made(postgres_book)
    with postgres_book.where.sync_engine().connect() as idle:
        idle.execute(text("select count(*) from balances"))
        task = asyncio.create_task(made(postgres_book))
        await asyncio.sleep(2)
        started = time.monotonic()
        assert await asyncio.to_thread(postgres_book.count) > 0
        assert time.monotonic() - started < 20
        assert not task.done()
        idle.rollback()
    report = await asyncio.wait_for(task, 30)
    assert report.projections[0].generation == 3


async def test_a_new_revision_is_rebuilt_beside_the_old_one_and_promoted(book: Book) -> None:
    last = book.fill(1_000)
    await made(book)
    newer = book.altered(
        ('"balances", table=balances_table)', '"balances", table=balances_table, revision=2)'),
        ('Column("events", Integer, nullable=False),', 'Column("events", Integer), Column("more", Integer),'),
        ("    events: int\n", "    events: int\n    more: int = 7\n"),
    )
    report = await rebuild(newer, ["balances"], book.settings, engine="local")
    states = "select revision, state, position, location from eventjet_projection where name = 'balances' order by 1"
    (place,) = [one.location for one in report.projections]
    assert book.execute(states) == [(1, "active", last, ""), (2, "building", last, place)]
    assert book.rows() == book.folded(last)
    wired: Any = newer.load()
    assert promote(book.where, wired.projections["balances"]) == Promoted((1,), last)
    was = place.replace("r2", "r1")
    assert book.execute(states) == [(1, "active", last, was), (2, "active", last, "")]
    assert {row[0] for row in book.execute("select more from balances")} == {7}
    # Each is still rebuilt and verified where it is, under the names that it declares.
    for ref, revision in ((newer, 2), (book.ref, 1), (newer, 2)):
        await rebuild(ref, ["balances"], book.settings, engine="local")
        assert (await verify(ref, "balances", book.settings)).differences == 0
        assert book.execute(states)[revision - 1] == (revision, "active", last, was if revision == 1 else "")
    assert promote(book.where, book.projections["balances"]) == Promoted((2,), last)
    assert book.rows() == book.folded(last)
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert book.execute(states) == [(1, "active", last, ""), (2, "active", last, place)]


async def test_a_read_model_of_another_log_is_replaced_though_it_was_further(book: Book) -> None:
    book.fill(500)
    await made(book)
    book.delete()
    book.create()
    last = book.fill(200, seed=5)
    await made(book)
    at = book.checkpoint()
    assert at is not None
    assert at.position == last
    assert book.rows() == book.folded(last)


async def test_a_run_that_lost_its_lease_does_not_swap(book: Book) -> None:
    book.fill(100)
    await made(book)
    before = book.checkpoint()
    with pytest.raises(RebuildError):
        await made(book, progress=lambda one: end_leases(book) if one.phase == "swap" else None)
    assert book.checkpoint() == before


async def test_a_part_that_was_loaded_is_not_loaded_again(book: Book) -> None:
    with shadow_of(book.where, book.projections["turnover"], "", Watch()) as shadow:
        rows = [("a", "1.00"), ("b", "2.00")]
        assert load_part(shadow.target, 0, rows) == 2
        if book.where.dialect.name == "postgresql":
            # As when a task's answer was lost after its transaction.
            assert load_part(shadow.target, 0, rows) == 2
        assert load_part(shadow.target, 1, []) == 0
        assert shadow.count() == 2
    assert remains(book.where) == []


async def test_what_was_loaded_and_lost_again_is_not_swapped_in(postgres_book: Book) -> None:
    postgres_book.fill(500)
    await made(postgres_book)
    before = postgres_book.rows(), postgres_book.checkpoint()
    with pytest.raises(VerificationFailed, match="the shadow holds 0"):
        await made(postgres_book, progress=lambda one: lose_rows(postgres_book) if one.phase == "index" else None)
    assert (postgres_book.rows(), postgres_book.checkpoint()) == before


def lose_rows(book: Book) -> None:
    """As a crash of the server does to a table that is not logged."""
    ((schema,),) = book.execute("select schemaname from pg_tables where schemaname like 'ej%' and tablename='balances'")
    book.execute(f"truncate {schema}.balances, {schema}.eventjet_rebuild")


def at_read(one: Progress, loop: asyncio.AbstractEventLoop, reading: asyncio.Event) -> None:
    if one.phase == "read" and one.done:
        loop.call_soon_threadsafe(reading.set)
        time.sleep(1)  # so that it is cancelled before it is done, however busy the machine is


def end_leases(book: Book) -> None:
    book.execute("delete from eventjet_rebuild")


def read_on(book: Book, stop: threading.Event, seen: list[tuple[int, int]]) -> None:
    """Read position and number of events together, as one statement sees them."""
    query = text("select (select position from eventjet_projection where name = 'balances'), sum(events) from balances")
    with reading(book.settings.database) as connection:
        while not stop.is_set():
            with connection.begin():
                position, events = connection.execute(query).one()
            seen.append((position, int(events)))
            time.sleep(0.005)


def append_on(book: Book, stop: threading.Event) -> None:
    seed = 100
    while not stop.is_set():
        book.fill(20, seed=seed)
        seed += 1
        time.sleep(0.01)


def described(book: Book) -> list[tuple[Any, ...]]:
    """Everything PostgreSQL keeps of the table under a name."""
    return book.execute(
        "select 'index', indexname, indexdef from pg_indexes where tablename = 'balances' union all "
        "select 'constraint', conname, pg_get_constraintdef(oid) from pg_constraint "
        "where conrelid = 'balances'::regclass union all "
        "select 'column', attname, atttypid::regtype || attnotnull::text || coalesce(attacl::text, '') "
        "from pg_attribute where attrelid = 'balances'::regclass and attnum > 0 union all "
        "select 'table', relpersistence::text, relowner::regrole || relacl::text || reloptions::text "
        "from pg_class where oid = 'balances'::regclass order by 1, 2, 3",
    )
