"""Takeovers between revisions despite kills, views, missing rights, readers, other revisions and promotions back."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, make_url

from eventjet.dev.nats import NatsServer
from eventjet.errors import NotCaughtUp, PromotionRefused, Unreachable, UsageError
from eventjet.projections.resolve import ResolvedProjection
from eventjet.rebuild.workspace import leftovers, remove_leftovers
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import check_tables, create_tables
from eventjet.sql.revisions import Promoted, promote, retire, unused
from tests.caught_up import wait_caught_up
from tests.integration.deploys import DEPLOYS, NEWER, OPTIONS, Worker, deployed
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS
from tests.integration.revision_log import checkpoints, folded, init, is_past, old_deploy, rows, stands


@pytest.fixture
def ledger(eventjet_nats: NatsServer, database: str) -> Ledger:
    return old_deploy(eventjet_nats.url, database)


@pytest.fixture
def postgres(eventjet_nats: NatsServer, eventjet_database: str) -> Ledger:
    return old_deploy(eventjet_nats.url, eventjet_database)


def is_postgres(ledger: Ledger) -> bool:
    return Database(ledger.settings.database).dialect.name == "postgresql"


async def fill_and_init(ledger: Ledger, count: int = 500) -> int:
    """Let the old deploy project events, and create the tables of the new one; return the last position."""
    last = ledger.append(history(count))
    async with ledger.working(options=OPTIONS):
        await ledger.caught_up(last)
    init(ledger, "fold")
    return last


def newer(ledger: Ledger) -> Ledger:
    return deployed("fold", ledger.settings, ledger.name)


def state_of(ledger: Ledger, revision: int) -> tuple[str, str, bool]:
    checkpoint = checkpoints(ledger)["balances", revision]
    return checkpoint.state, checkpoint.location, checkpoint.takes_over


def another_table() -> Table:
    columns = BALANCES.table.columns
    copies = [
        Column(column.name, column.type, primary_key=column.primary_key, nullable=column.nullable) for column in columns
    ]
    return Table("balances_2", MetaData(), *copies)


def own_location(ledger: Ledger, revision: int) -> str:
    return f"ej_balances_r{revision}" if is_postgres(ledger) else f"__r{revision}"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["takeover.moved", "takeover.committed"])
async def test_a_worker_killed_within_a_takeover_leaves_all_of_it_or_nothing(
    ledger: Ledger, processes: ExitStack, point: str
) -> None:
    last = await fill_and_init(ledger)
    worker = processes.enter_context(Worker("fold", ledger, EVENTJET_FAILPOINT=f"{point}:kill"))
    assert await asyncio.to_thread(worker.process.wait, 30) == -9
    is_committed = point == "takeover.committed"
    assert state_of(ledger, 2) == (
        ("active", "", False) if is_committed else ("building", own_location(ledger, 2), True)
    )
    assert state_of(ledger, 1) == ("active", own_location(ledger, 1) if is_committed else "", False)
    assert rows(ledger, BALANCES) == folded(ledger, 1, last)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    processes.enter_context(Worker("fold", ledger)).ready()
    last = ledger.append(history(50, seed=3))
    await stands(ledger, 2, location="", position=last)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)


async def test_a_dependent_of_the_old_table_blocks_the_takeover_and_is_reported(ledger: Ledger) -> None:
    last = await fill_and_init(ledger)
    if is_postgres(ledger):
        ledger.execute("create view seen as select * from balances")
    else:
        ledger.execute("create trigger seen after insert on balances begin select 1; end")

    async def has_reason() -> bool:
        return "seen" in (checkpoints(ledger)["balances", 2].reason or "")

    async with newer(ledger).working(options=OPTIONS):
        await eventually(has_reason, "the reason to be noted")
        last = ledger.append(history(50, seed=3))
        await stands(ledger, 2, position=last)
    assert state_of(ledger, 2) == ("building", own_location(ledger, 2), True)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    ledger.execute("drop view seen" if is_postgres(ledger) else "drop trigger seen")
    async with newer(ledger).working(options=OPTIONS):
        # Revision 1 has no worker any more: the takeover does not wait for it.
        await stands(ledger, 2, location="")
    assert checkpoints(ledger)["balances", 2].reason is None
    assert state_of(ledger, 1) == ("active", own_location(ledger, 1), False)


async def test_a_view_of_sqlite_reads_the_new_table_after_a_takeover(eventjet_nats: NatsServer, tmp_path: Path) -> None:
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=f"sqlite:///{tmp_path}/read.db"))
    ledger.create()
    init(ledger, "old")
    ledger.execute("create view seen as select sum(events) as events from balances")
    last = await fill_and_init(ledger)
    async with newer(ledger).working(options=OPTIONS):
        await stands(ledger, 2, location="")
    assert ledger.execute("select events from seen") == [(sum(row[3] for row in folded(ledger, 2, last)),)]


async def test_a_worker_without_the_right_to_move_tables_reports_it_and_an_owner_promotes(postgres: Ledger) -> None:
    await fill_and_init(postgres)
    url = make_url(postgres.settings.database)
    role = f"worker_{url.database}"
    postgres.execute(
        f"create role {role} login password 'worker'",
        f"grant usage on schema public, ej_balances_r1, ej_balances_r2 to {role}",
        f"grant select, insert, update, delete on all tables in schema public, ej_balances_r2 to {role}",
    )
    try:
        as_worker = url.set(username=role, password="worker").render_as_string(hide_password=False)
        app = newer(replace(postgres, settings=replace(postgres.settings, database=as_worker)))

        async def has_reason() -> bool:
            return "must be owner of" in (checkpoints(postgres)["balances", 2].reason or "")

        async with app.working(options=OPTIONS):
            await eventually(has_reason, "the reason to be noted")
            assert "eventjet db promote balances" in str(checkpoints(postgres)["balances", 2].reason)
            assert promote(Database(postgres.settings.database), NEWER) is not None
            last = postgres.append(history(50, seed=3))
            await stands(postgres, 2, location="", position=last)
        # The new table has the rights of the old one.
        assert rows(postgres, NEWER) == folded(postgres, 2, last)
    finally:
        postgres.execute(f"drop owned by {role}", f"drop role {role}")


async def test_rights_and_names_are_the_declared_ones_after_a_takeover(ledger: Ledger) -> None:
    last = await fill_and_init(ledger)
    if is_postgres(ledger):
        ledger.execute("grant select on balances to public", "alter table balances set (fillfactor = 70)")
    async with newer(ledger).working(options=OPTIONS):
        await stands(ledger, 2, location="")
    if is_postgres(ledger):
        query = (
            "select tablename || '.' || indexname from pg_indexes where schemaname = '{}' and tablename = 'balances' "
            "order by 1"
        )
        new_query, old_query = query.format("public"), query.format("ej_balances_r1")
        names = ["balances.balances_pkey", "balances.ix_balances_last", "balances.ix_balances_owner"]
        assert [row[0] for row in ledger.execute(new_query)] == names
        assert [row[0] for row in ledger.execute(old_query)] == [names[0], names[2]]
        rights = "select relacl::text, reloptions from pg_class where oid = 'balances'::regclass"
        ((acl, options),) = ledger.execute(rights)
        assert "=r/" in acl
        assert options == ["fillfactor=70"]
    else:
        indexes = ledger.execute(
            "select tbl_name, name from sqlite_master where type = 'index' and sql is not null order by 1, 2"
        )
        assert [tuple(row) for row in indexes if row[0].startswith("balances")] == [
            ("balances", "ix_balances_last"),
            ("balances", "ix_balances_owner"),
            ("balances__r1", "ix_balances_owner__balances__r1"),
        ]
    # A promotion back would be refused if an index had another name than declared.
    assert promote(Database(ledger.settings.database), BALANCES) == Promoted((2,), last)
    with Database(ledger.settings.database).sync_engine().connect() as connection:
        check_tables(connection, DEPLOYS["old"][1])
        check_tables(connection, DEPLOYS["fold"][1])
    assert rows(ledger, BALANCES) == folded(ledger, 1, last)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)


async def test_a_reader_that_stays_in_its_transaction_delays_the_takeover_and_nobody_else(postgres: Ledger) -> None:
    await fill_and_init(postgres)
    engine = Database(postgres.settings.database).sync_engine()
    with engine.connect() as reader:
        reader.exec_driver_sql("select count(*) from balances").one()
        async with newer(postgres).working(options=OPTIONS), postgres.working("balances", options=OPTIONS):
            last = postgres.append(history(200, seed=3))
            await stands(postgres, 2, position=last)
            await stands(postgres, 1, position=last)
            assert state_of(postgres, 2) == ("building", "ej_balances_r2", True)
            assert postgres.execute("select count(*) > 0 from balances") == [(True,)]
            reader.rollback()
            await stands(postgres, 2, location="")
    engine.dispose()


async def test_a_successful_takeover_logs_no_warning(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="eventjet")
    last = await fill_and_init(ledger)
    async with ledger.working(options=OPTIONS), newer(ledger).working(options=OPTIONS):
        await stands(ledger, 2, location="", position=last)
    log_events = [(record.levelname, vars(record).get("event")) for record in caplog.records]
    assert ("INFO", "eventjet.beside") in log_events
    assert ("INFO", "eventjet.took_over") in log_events
    of_this_stream = {"eventjet.log_drifted", "eventjet.log_unreadable"}  # the test has made it by hand
    of_a_slow_machine = {"eventjet.trying_again"}  # PostgreSQL ended a session that stood still in a transaction
    assert {event for level, event in log_events if level != "INFO"} <= of_this_stream | of_a_slow_machine
    caplog.clear()
    async with ledger.working(options=OPTIONS):
        await stands(ledger, 1, position=ledger.append(history(5, seed=8)))
    (text,) = [
        record.getMessage() for record in caplog.records if vars(record).get("event") == "eventjet.beside_for_good"
    ]
    assert text == (
        "balances revision 1: readers see another revision, and this one does not take over by itself. Where that one "
        "is of a newer release, only stop this worker. `eventjet db promote balances` with this release gives readers "
        "this one."
    )


async def test_promoting_the_old_revision_again_is_one_command_and_lasts(ledger: Ledger) -> None:
    await fill_and_init(ledger)
    database = Database(ledger.settings.database)
    async with newer(ledger).working(options=OPTIONS), ledger.working(options=OPTIONS):
        await stands(ledger, 2, location="")
        last = ledger.append(history(100, seed=3))
        await stands(ledger, 1, position=last)
        promoted = await asyncio.to_thread(promote, database, BALANCES)
        assert promoted is not None
        assert promoted.previous_revisions == (2,)
        assert promote(database, BALANCES) is None
        last = ledger.append(history(100, seed=4))
        await stands(ledger, 1, location="", position=last)
        await stands(ledger, 2, location=own_location(ledger, 2), position=last)
    assert rows(ledger, BALANCES) == folded(ledger, 1, last)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    ahead = ledger.append(history(10, seed=5))
    async with ledger.working("balances", options=OPTIONS):
        await stands(ledger, 1, position=ahead)
    with pytest.raises(PromotionRefused, match="it is 10 events behind revision 1"):
        promote(database, NEWER, patience_s=0)


async def test_caught_up_waits_for_the_revision_that_readers_see(ledger: Ledger) -> None:
    last = await fill_and_init(ledger)
    ahead = ledger.append(history(20, seed=3))
    url = ledger.settings.database
    # Revision 2 has nothing yet, and its readers see the rows of revision 1.
    await wait_caught_up(url, NEWER, last, 60)
    with pytest.raises(NotCaughtUp):
        await wait_caught_up(url, NEWER, ahead, 0.1)
    async with newer(ledger).working(options=OPTIONS):
        await wait_caught_up(url, NEWER, ahead, 120)
        await wait_caught_up(url, BALANCES, ahead, 60)
    assert state_of(ledger, 2)[1] == ""


async def test_the_newest_of_several_building_revisions_takes_over(ledger: Ledger) -> None:
    last = await fill_and_init(ledger)
    third = replace(NEWER, revision=3)
    create_tables(Database(ledger.settings.database).sync_engine(), [third])
    newest = Ledger(ledger.settings, ledger.name, projections={"balances": third})
    async with newest.working(options=OPTIONS):
        await stands(ledger, 3, location="")
    async with newer(ledger).working(options=OPTIONS):
        await stands(ledger, 2, position=last)

        async def is_inactive() -> bool:
            return state_of(ledger, 2) == ("active", own_location(ledger, 2), False)

        await eventually(is_inactive, "revision 2 to stand back")
    assert state_of(ledger, 3) == ("active", "", False)
    assert rows(ledger, third) == rows(ledger, NEWER) == folded(ledger, 2, last)


async def test_a_revision_with_a_table_of_its_own_name_moves_nothing(ledger: Ledger) -> None:
    last = await fill_and_init(ledger)
    ledger.execute("delete from eventjet_projection where revision = 2")
    other = replace(BALANCES, revision=2, table=another_table())
    app = Ledger(ledger.settings, ledger.name, projections={"balances": other})
    assert create_tables(Database(ledger.settings.database).sync_engine(), [other]) == ["balances_2"]
    async with app.working(options=OPTIONS):
        await app.caught_up(last, other)
        await eventually(lambda: is_past(ledger, 2, last), "it to catch up")
    assert [state_of(ledger, revision)[1] for revision in (1, 2)] == ["", ""]
    assert rows(ledger, other) == rows(ledger, BALANCES) == folded(ledger, 1, last)


async def test_another_table_under_the_same_revision_is_refused(ledger: Ledger) -> None:
    await fill_and_init(ledger)
    other = replace(BALANCES, table=another_table())
    engine = Database(ledger.settings.database).sync_engine()
    refused = r"are in balances, and it declares balances_2\. Raise its revision, or run `eventjet rebuild balances`"
    with pytest.raises(Unreachable, match=refused):
        create_tables(engine, [other])
    with pytest.raises(Unreachable, match=refused), engine.connect() as connection:
        check_tables(connection, [other])


async def test_unused_tables_are_listed_dropped_on_request_and_can_be_created_again(ledger: Ledger) -> None:
    last = await fill_and_init(ledger)
    engine = Database(ledger.settings.database).sync_engine()
    declared = list(DEPLOYS["fold"][1])

    def listed(*resolved: ResolvedProjection) -> list[tuple[Any, ...]]:
        with engine.connect().execution_options(**{READ_ONLY: True}) as connection:
            return [
                (table.projection, table.revision, table.location, table.rows, table.position)
                for table in unused(connection, resolved)
            ]

    def drop(name: str, revision: int) -> Any:
        with engine.begin() as connection:
            return retire(connection, name, revision, declared)

    count = len(folded(ledger, 1, last))
    assert listed(*DEPLOYS["old"][1]) == [("balances", 2, own_location(ledger, 2), 0, 0)]
    assert listed(*declared) == [("balances", 1, "", count, last)]
    with pytest.raises(UsageError, match="readers see its rows until revision 2 takes over"):
        drop("balances", 1)
    with pytest.raises(UsageError, match="balances:2 is declared by the app"):
        drop("balances", 2)
    with pytest.raises(UsageError, match=r"no unused revision balances:7. Unused are: balances:1"):
        drop("balances", 7)
    async with newer(ledger).working(options=OPTIONS):
        await stands(ledger, 2, location="")
        async with ledger.working("balances", options=replace(OPTIONS, lease_s=30.0)):
            with pytest.raises(UsageError, match=r"balances:1 is not dropped: the worker .* keeps it"):
                await asyncio.to_thread(drop, "balances", 1)
            assert rows(ledger, BALANCES) == folded(ledger, 1, last)
        await asyncio.to_thread(drop, "balances", 1)
    assert listed(*declared) == []
    assert checkpoints(ledger)["balances", 1].state == "retired"
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    query = "select nspname from pg_namespace where nspname like 'ej_%r1'"
    if not is_postgres(ledger):
        query = "select name from sqlite_master where name like '%!_!_r1' escape '!'"
    assert ledger.execute(query) == []
    with pytest.raises(Unreachable, match="revision 1 of projection 'balances' was retired"):
        async with ledger.working("balances", options=OPTIONS):
            pass
    init(ledger, "old")
    async with ledger.working(options=OPTIONS):
        await stands(ledger, 1, location=own_location(ledger, 1), position=last)
    assert rows(ledger, BALANCES) == folded(ledger, 1, last)
    # It is the older revision: it does not take over from the newer one.
    assert state_of(ledger, 1) == ("active", own_location(ledger, 1), False)
    engine.dispose()


def test_tables_of_another_app_are_not_listed_as_unused(ledger: Ledger) -> None:
    ledger.execute(
        "update eventjet_projection set log = 'ours', position = 1",
        "insert into eventjet_projection (name, revision, log, position) values ('theirs', 1, 'another', 5)",
        "insert into eventjet_projection (name, revision, log, position) values ('gone', 1, 'ours', 5)",
    )
    with Database(ledger.settings.database).sync_engine().begin() as connection:
        assert [table.projection for table in unused(connection, [BALANCES, MOVEMENTS])] == ["gone"]


@pytest.mark.slow
def test_leftovers_of_killed_rebuilds_are_listed_and_removed_on_request(ledger: Ledger, tmp_path: Path) -> None:
    database = Database(ledger.settings.database)
    assert orphans(database) == []
    run = "0123456789abcdef"
    if is_postgres(ledger):
        ledger.execute(f"create schema ej_{run}", f"comment on schema ej_{run} is '[\"balances\"]'")
        ledger.execute(f"create table ej_{run}.balances (id integer)")
    else:
        (tmp_path / f"read.db.ej_{run}").write_bytes(b"")
    names = orphans(database)
    assert names == [f"ej_{run}"]
    assert remove_leftovers(database) == names
    assert orphans(database) == []


def orphans(database: Database) -> list[str]:
    with database.sync_engine().begin() as connection:
        return leftovers(connection, database)


def test_concurrent_revisions_get_different_table_slots(ledger: Ledger) -> None:
    ledger.execute("delete from eventjet_projection", "drop table balances")
    table = Table("balances", MetaData(), Column("account_id", Integer, primary_key=True))
    both = [replace(BALANCES, revision=number, table=table) for number in (1, 2)]
    threads = [
        threading.Thread(target=create_tables, args=(Database(ledger.settings.database).sync_engine(), [resolved]))
        for resolved in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(state_of(ledger, revision)[1] for revision in (1, 2)) in (
        ["", own_location(ledger, 1)],
        ["", own_location(ledger, 2)],
    )
