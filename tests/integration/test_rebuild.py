"""A rebuild on the local engine yields the live fold's rows on both databases, online, completely or not at all."""

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


async def rebuilt(book: Book, *names: str, **options: Any) -> Any:
    return await rebuild(book.ref, names or ["balances"], book.settings, engine="local", **options)


async def test_a_rebuild_equals_the_live_fold_and_a_worker_continues(book: Book) -> None:
    last = book.fill(5_000)
    report = await rebuilt(book, *ALL)
    assert (report.position, report.events) == (last, 5_000)
    assert [projection.projection for projection in report.projections] == list(ALL)
    for name in ALL:
        assert book.rows(name) == book.folded(last, name), name
    assert remains(book.where) == []
    checkpoint = book.checkpoint()
    assert checkpoint is not None
    assert (checkpoint.position, checkpoint.state, checkpoint.generation) == (last, "active", 2)
    last = book.fill(200, seed=2)
    async with book.working("balances"):
        await book.caught_up(last, book.projections["balances"])
    assert book.rows() == book.folded(last)


async def test_an_empty_log_gives_an_empty_table(book: Book) -> None:
    report = await rebuilt(book)
    assert (report.events, report.rows, book.rows()) == (0, 0, [])


async def test_a_log_may_begin_after_position_one(book: Book) -> None:
    with NatsConnection.open(book.endpoint) as link:
        config = link.api(f"STREAM.INFO.{book.name}")["config"]
        book.delete()
        link.api(f"STREAM.CREATE.{book.name}", {**config, "first_seq": 1_000})
    report = await rebuilt(book)
    assert (report.events, book.rows()) == (0, [])
    last = book.fill(50)
    report = await rebuilt(book)
    assert (report.events, report.position, last) == (50, 1_049, 1_049)
    assert book.count() > 0
    assert (await verify(book.ref, "balances", book.settings)).differences == 0


async def test_progress_is_reported_and_never_decreases_within_a_phase(book: Book) -> None:
    book.fill(6_000)
    reports: list[Progress] = []
    await rebuilt(book, progress=reports.append)
    read = [report for report in reports if report.phase == "read"]
    assert [report.done for report in read] == sorted(report.done for report in read)
    assert (read[-1].done, read[-1].total) == (6_000, 6_000)
    assert {"start", "read", "load", "index", "swap"} <= {report.phase for report in reports}


async def test_nobody_reads_an_empty_partial_or_older_table_while_it_is_rebuilt(book: Book) -> None:
    book.fill(3_000)
    snapshots: list[tuple[int, int]] = []
    stop = threading.Event()
    book.init()
    async with book.working("balances"):
        await book.caught_up(3_000, book.projections["balances"])
        reader = threading.Thread(target=read_on, args=(book, stop, snapshots))
        writer = threading.Thread(target=append_on, args=(book, stop))
        for thread in (reader, writer):
            thread.start()
        try:
            for _ in range(3):
                report = await rebuilt(book)
                # A worker's statement and the swap take their locks in the same order.
                assert report.seconds["swap"] < 20
            async with asyncio.timeout(60):
                while len(snapshots) <= 10:
                    await asyncio.sleep(0.02)
        finally:
            stop.set()
            await asyncio.to_thread(reader.join)
            await asyncio.to_thread(writer.join)
        last = book.fill(1, seed=99)
        await book.caught_up(last, book.projections["balances"])
    assert book.rows() == book.folded(last)
    assert [position for position, _ in snapshots] == sorted(position for position, _ in snapshots)
    events = [count for _, count in snapshots]
    assert min(events) > 0
    # Every event of an open account counts, and few accounts are closed: a partial table would have far fewer.
    assert all(after > 0.9 * before for before, after in pairwise(events))


async def test_a_cancelled_rebuild_leaves_the_live_table_and_nothing_else(book: Book) -> None:
    last = book.fill(3_000)
    await rebuilt(book)
    state_before = book.rows(), book.checkpoint()
    book.fill(30_000, seed=2)
    reading = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(rebuilt(book, progress=lambda report: at_read(report, loop, reading)))
    await asyncio.wait_for(reading.wait(), 60)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < STOP_TIMEOUT_S
    assert (book.rows(), book.checkpoint()) == state_before
    assert state_before[1] is not None
    assert state_before[1].position == last
    assert remains(book.where) == []


async def test_two_concurrent_rebuilds_both_succeed(book: Book) -> None:
    last = book.fill(5_000)
    first, second = await asyncio.gather(rebuilt(book), rebuilt(book))
    assert {first.projections[0].generation, second.projections[0].generation} == {2, 3}
    # Now there is a live table, and the second rebuild meets another table than it read.
    first, second = await asyncio.gather(rebuilt(book), rebuilt(book))
    assert {first.projections[0].generation, second.projections[0].generation} == {4, 5}
    assert book.rows() == book.folded(last)
    assert remains(book.where) == []


async def test_an_event_that_the_handler_refuses_stops_the_rebuild_and_is_named(book: Book) -> None:
    book.fill(100)
    opened = next(event_type for event_type in book.projections["balances"].events if event_type.__name__ == "Opened")
    position = book.append([("a-1", opened(owner="x" * 61))])
    with pytest.raises(HandlerFailed, match=rf"position {position} of 'a-1'"):
        await rebuilt(book)
    assert remains(book.where) == []


async def test_names_and_logs_that_do_not_exist_are_refused_at_once(book: Book) -> None:
    book.delete()
    for call in (
        rebuilt(book, "nothing"),
        verify(book.ref, "nothing", book.settings),
        preview(book.ref, ["nothing"], book.settings),
    ):
        with pytest.raises(UsageError, match="no projection 'nothing'"):
            await call
    with pytest.raises(Unreachable, match="does not exist"):
        await rebuilt(book)


async def test_an_unreachable_database_is_named_in_the_error(nats: NatsServer, book: Book) -> None:
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
async def test_a_swap_refuses_to_lose_views_keys_and_policies_and_names_them(
    postgres_book: Book, statement: str, named: str
) -> None:
    postgres_book.fill(100)
    await rebuilt(postgres_book)
    postgres_book.execute(statement)
    with pytest.raises(RebuildRefused, match=named):
        await rebuilt(postgres_book)
    assert remains(postgres_book.where) == []


async def test_a_swap_keeps_rights_owners_and_names(postgres_book: Book) -> None:
    postgres_book.fill(100)
    await rebuilt(postgres_book)
    role = f"reader_{os.getpid()}"
    postgres_book.execute(f"create role {role}")
    postgres_book.execute(f"grant select, update (owner) on balances to {role}")
    postgres_book.execute("alter table balances set (fillfactor = 70)")
    description = describe(postgres_book)
    await rebuilt(postgres_book)
    assert describe(postgres_book) == description
    postgres_book.execute(f"drop owned by {role}; drop role {role}")


async def test_a_reader_idle_in_a_transaction_delays_the_swap_and_nobody_else(postgres_book: Book) -> None:
    postgres_book.fill(100)
    await rebuilt(postgres_book)
    with postgres_book.where.sync_engine().connect() as idle:
        idle.execute(text("select count(*) from balances"))
        task = asyncio.create_task(rebuilt(postgres_book))
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
    await rebuilt(book)
    newer = book.altered(
        ('"balances", table=balances_table)', '"balances", table=balances_table, revision=2)'),
        ('Column("events", Integer, nullable=False),', 'Column("events", Integer), Column("more", Integer),'),
        ("    events: int\n", "    events: int\n    more: int = 7\n"),
    )
    report = await rebuild(newer, ["balances"], book.settings, engine="local")
    states = "select revision, state, position, location from eventjet_projection where name = 'balances' order by 1"
    (location,) = [projection.location for projection in report.projections]
    assert book.execute(states) == [(1, "active", last, ""), (2, "building", last, location)]
    assert book.rows() == book.folded(last)
    app: Any = newer.load()
    assert promote(book.where, app.projections["balances"]) == Promoted((1,), last)
    old_location = location.replace("r2", "r1")
    assert book.execute(states) == [(1, "active", last, old_location), (2, "active", last, "")]
    assert {row[0] for row in book.execute("select more from balances")} == {7}
    # Each is still rebuilt and verified where it is, under the names that it declares.
    for ref, revision in ((newer, 2), (book.ref, 1), (newer, 2)):
        await rebuild(ref, ["balances"], book.settings, engine="local")
        assert (await verify(ref, "balances", book.settings)).differences == 0
        assert book.execute(states)[revision - 1] == (revision, "active", last, old_location if revision == 1 else "")
    assert promote(book.where, book.projections["balances"]) == Promoted((2,), last)
    assert book.rows() == book.folded(last)
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert book.execute(states) == [(1, "active", last, ""), (2, "active", last, location)]


async def test_a_read_model_of_another_log_is_replaced_though_it_was_further(book: Book) -> None:
    book.fill(500)
    await rebuilt(book)
    book.delete()
    book.create()
    last = book.fill(200, seed=5)
    await rebuilt(book)
    checkpoint = book.checkpoint()
    assert checkpoint is not None
    assert checkpoint.position == last
    assert book.rows() == book.folded(last)


async def test_a_rebuild_that_lost_its_lease_does_not_swap(book: Book) -> None:
    book.fill(100)
    await rebuilt(book)
    checkpoint = book.checkpoint()
    with pytest.raises(RebuildError):
        await rebuilt(book, progress=lambda report: end_leases(book) if report.phase == "swap" else None)
    assert book.checkpoint() == checkpoint


async def test_a_loaded_part_is_not_loaded_again(book: Book) -> None:
    with shadow_of(book.where, book.projections["turnover"], "", Watch()) as shadow:
        rows = [("a", "1.00"), ("b", "2.00")]
        assert load_part(shadow.target, 0, rows) == 2
        if book.where.dialect.name == "postgresql":
            # A task is repeated like this when its answer was lost after its transaction.
            assert load_part(shadow.target, 0, rows) == 2
        assert load_part(shadow.target, 1, []) == 0
        assert shadow.count() == 2
    assert remains(book.where) == []


async def test_a_shadow_table_that_lost_its_rows_is_not_swapped_in(postgres_book: Book) -> None:
    postgres_book.fill(500)
    await rebuilt(postgres_book)
    state_before = postgres_book.rows(), postgres_book.checkpoint()
    with pytest.raises(VerificationFailed, match="the shadow holds 0"):
        await rebuilt(
            postgres_book, progress=lambda report: lose_rows(postgres_book) if report.phase == "index" else None
        )
    assert (postgres_book.rows(), postgres_book.checkpoint()) == state_before


def lose_rows(book: Book) -> None:
    """Empty the shadow, as a crash of the server empties an unlogged table."""
    ((schema,),) = book.execute("select schemaname from pg_tables where schemaname like 'ej%' and tablename='balances'")
    book.execute(f"truncate {schema}.balances, {schema}.eventjet_rebuild")


def at_read(report: Progress, loop: asyncio.AbstractEventLoop, reading: asyncio.Event) -> None:
    if report.phase == "read" and report.done:
        loop.call_soon_threadsafe(reading.set)
        time.sleep(1)  # so that the rebuild is cancelled before its end, even on a busy machine


def end_leases(book: Book) -> None:
    book.execute("delete from eventjet_rebuild")


def read_on(book: Book, stop: threading.Event, snapshots: list[tuple[int, int]]) -> None:
    """Read position and number of events together, as one statement sees them."""
    query = text("select (select position from eventjet_projection where name = 'balances'), sum(events) from balances")
    with reading(book.settings.database) as connection:
        while not stop.is_set():
            with connection.begin():
                position, events = connection.execute(query).one()
            snapshots.append((position, int(events)))
            time.sleep(0.005)


def append_on(book: Book, stop: threading.Event) -> None:
    seed = 100
    while not stop.is_set():
        book.fill(20, seed=seed)
        seed += 1
        time.sleep(0.01)


def describe(book: Book) -> list[tuple[Any, ...]]:
    """Return everything that PostgreSQL stores about the table under a name."""
    return book.execute(
        "select 'index', indexname, indexdef from pg_indexes where tablename = 'balances' union all "
        "select 'constraint', conname, pg_get_constraintdef(oid) from pg_constraint "
        "where conrelid = 'balances'::regclass union all "
        "select 'column', attname, atttypid::regtype || attnotnull::text || coalesce(attacl::text, '') "
        "from pg_attribute where attrelid = 'balances'::regclass and attnum > 0 union all "
        "select 'table', relpersistence::text, relowner::regrole || relacl::text || reloptions::text "
        "from pg_class where oid = 'balances'::regclass order by 1, 2, 3",
    )
