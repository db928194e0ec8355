"""What stands on a log goes on over its restored copy: read models, commands, snapshots, time travel."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import select

from eventjet.app import App
from eventjet.codec.headers import logged_at, recorded_at
from eventjet.dev.nats import NatsServer
from eventjet.errors import ArchiveBroken, Refused, UsageError
from eventjet.examples.bank.account import Account
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.topology import IDENTITY
from eventjet.rebuild import AppRef, rebuild, restore, verify
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint, read
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.ledger_log import Ledger, eventually
from tests.integration.restored_bank import bank
from tests.integration.restoring import delete, endpoint, fill, records_of, seal
from tests.tables import reading

ROOT = Path(__file__).parents[2]
REF = AppRef.parse("tests.integration.restored_bank:bank", ROOT)
NAMES = tuple(bank.projections)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[NatsServer, NatsServer]]:
    with NatsServer(sync_interval="1m") as old, NatsServer(sync_interval="1m") as new:
        yield old, new


@pytest.fixture
def old(servers: tuple[NatsServer, NatsServer]) -> str:
    delete(servers[0].url)
    return servers[0].url


@pytest.fixture
def new(servers: tuple[NatsServer, NatsServer]) -> str:
    delete(servers[1].url)
    return servers[1].url


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("eventjet_database") if request.param == "postgresql" else f"sqlite:///{tmp_path}/b"


def working_on(url: str, database: str) -> Ledger:
    """The bank as workers know it."""
    settings = Settings(servers=(url,), database=database)
    return Ledger(settings, name="bank", catalog=bank.catalog, projections=dict(bank.projections))  # type: ignore[arg-type]


async def project(url: str, database: str) -> int:
    """Have workers bring every read model to the log's end, and stop; the position."""
    create_tables(Database(database).sync_engine(), bank.projections.values())
    there = working_on(url, database)
    last = ask_once(endpoint(url), stream_info("bank")).last
    async with there.working(*NAMES):
        for resolved in there.projections.values():
            await there.caught_up(last, resolved)
    return last


def checkpoints(database: str) -> dict[str, Checkpoint]:
    with reading(database) as connection:
        found = {name: read(connection, name, 1) for name in NAMES}
    return {name: one for name, one in found.items() if one is not None}


def rows(database: str) -> list[list[object]]:
    with reading(database) as connection:
        tables = [resolved.table for resolved in bank.projections.values()]  # type: ignore[union-attr]
        return [list(connection.execute(select(one).order_by(*one.primary_key.columns))) for one in tables]


def archived(url: str, folder: Path) -> str:
    identity = ask_once(endpoint(url), stream_info("bank")).metadata[IDENTITY]
    return seal(folder, records_of(url), identity)


async def test_read_models_go_on_by_themselves_over_the_restored_log(
    old: str, new: str, database: str, tmp_path: Path
) -> None:
    await fill(bank, old, 600)
    reached = await project(old, database)
    async with bank.connect(servers=old, database=database) as jet:  # while no worker runs
        for number in range(5):
            await jet.repository(Account).execute("ada", Account.deposit, Decimal(number + 1))
    report = await restore(REF, archived(old, tmp_path / "archive"), Settings(servers=(new,)))
    assert (report.events, report.last) == (reached + 5, reached + 5)
    before = checkpoints(database)
    assert await project(new, database) == report.last
    after = checkpoints(database)
    for name in NAMES:
        assert (before[name].position, after[name].position) == (reached, report.last)
        assert (after[name].generation, after[name].log, after[name].state) == (1, report.log, "active")
    async with bank.connect(servers=new, database=database) as jet:
        assert (await jet.init()).drifts == ()
        await jet.repository(Account).execute("new", Account.open, "eve")
    last = await project(new, database)
    settings = Settings(servers=(new,), database=database)
    for name in NAMES:
        found = await verify(REF, name, settings)
        assert (found.differences, found.position, found.events) == (0, last, report.events + 1)
    live = rows(database)
    await rebuild(REF, NAMES, settings, engine="local")
    assert rows(database) == live
    assert [(await verify(REF, name, settings)).differences for name in NAMES] == [0, 0, 0]


async def test_a_read_model_beyond_the_restored_log_stops_and_says_why(
    old: str, new: str, database: str, tmp_path: Path
) -> None:
    await fill(bank, old, 100)
    url = archived(old, tmp_path / "archive")
    async with bank.connect(servers=old, database=database) as jet:
        for number in range(3):
            await jet.repository(Account).execute("ada", Account.deposit, Decimal(number + 1))
    ahead = await project(old, database)
    end = (await restore(REF, url, Settings(servers=(new,)))).last
    assert ahead == end + 3
    there = working_on(new, database)

    async def all_failed() -> bool:
        return {one.state for one in checkpoints(database).values()} == {"failed"}

    async with there.working(*NAMES):
        await eventually(all_failed, "the projections to fail")
    for one in checkpoints(database).values():
        assert f"stands at position {ahead}, but the log ends at position {end}" in str(one.reason)
    async with bank.connect(servers=new, database=database) as jet:
        for _ in range(5):
            await jet.repository(Account).execute("bob", Account.deposit, Decimal(1))

    async def told_of_another() -> bool:
        return all("the event there is" in str(one.reason) for one in checkpoints(database).values())

    async with there.working(*NAMES):
        await eventually(told_of_another, "the projections to see another past")
    await rebuild(REF, NAMES, there.settings, engine="local")
    assert [(await verify(REF, name, there.settings)).differences for name in NAMES] == [0, 0, 0]


@pytest.mark.parametrize("snapshots", ["kept", "lost"])
async def test_commands_and_time_travel_go_on(old: str, new: str, tmp_path: Path, snapshots: str) -> None:
    async with bank.connect(servers=old) as jet:
        await fill(bank, old, 100)
        accounts = jet.repository(Account)
        for number in range(120):  # a snapshot is due at 100
            await accounts.execute("ada", Account.deposit, Decimal(number + 1))
        balance = (await accounts.load("ada")).balance
        first = await accounts.command("c-7").execute("ada", Account.deposit, Decimal(8))
    url, records = archived(old, tmp_path / "archive"), records_of(old)
    where = old if snapshots == "kept" else new
    delete(where)
    await restore(REF, url, Settings(servers=(where,)))
    async with bank.connect(servers=where) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        assert (await accounts.load("ada")).balance == balance
        again = await accounts.command("c-7").execute("ada", Account.deposit, Decimal(8))
        assert (again.position, again.version, again.state) == (first.position, first.version, first.state)
        last = len(records)
        done = await accounts.execute("ada", Account.withdraw, Decimal(1))
        assert (done.position, done.version) == (last + 1, 20 + 5 + 1 + 120 + 1)
        moved = await jet.transact(
            accounts.decide("ada", Account.withdraw, Decimal(1)), accounts.decide("bob", Account.deposit, Decimal(1))
        )
        assert [one.position for one in moved] == [last + 2, last + 3]
        mine = [one for one in records if one[2] == b"bank.account.ada"]
        for record in mine[::20]:
            at = recorded_at(record)
            assert await accounts.load("ada", at=at) == await accounts.load("ada", position=record[0])
        told = {one.position: one.recorded_at for one in await accounts.history("ada")}
        assert all(told[record[0]] == recorded_at(record) for record in mine)
        middle = logged_at(records[60])
        expected = [one[0] for one in records if logged_at(one) >= middle] + [last + 1, last + 2, last + 3]
        assert [one.position async for one in jet.tail(since=middle)] == expected
        just = logged_at(records[-1]) + timedelta(microseconds=1)
        assert [one.position async for one in jet.tail(since=just)] == expected[-3:]


async def test_a_log_that_lost_its_end_is_filled_up(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "server", sync_interval="1m") as server:
        await fill(bank, server.url, 100)
        kept = ask_once(endpoint(server.url), stream_info("bank")).last
        server.stop()
        shutil.copytree(tmp_path / "server", tmp_path / "backup")
        server.start()
        async with bank.connect(servers=server.url) as jet:
            for number in range(5):
                await jet.repository(Account).execute("ada", Account.deposit, Decimal(number + 1))
        url, records = archived(server.url, tmp_path / "archive"), records_of(server.url)
    with NatsServer(tmp_path / "backup", sync_interval="1m") as server:
        report = await restore(REF, url, Settings(servers=(server.url,)))
        assert (report.events, report.published) == (kept + 5, 5)
        found = records_of(server.url)
        assert found[:kept] == records[:kept]
        assert [recorded_at(one) for one in found] == [recorded_at(one) for one in records]
        async with bank.connect(servers=server.url) as jet:
            assert (await jet.init()).drifts == ()


async def waiting(url: str, count: int) -> bool:
    """Whether the server knows of so many consumers that somebody waits on."""
    with NatsConnection.open(endpoint(url)) as link:
        found = link.api("CONSUMER.LIST.bank")["consumers"] or []
    return sum(one["num_waiting"] > 0 for one in found) == count


async def test_an_empty_stream_that_workers_wait_on_is_left_alone(old: str, new: str, tmp_path: Path) -> None:
    await fill(bank, old, 50)
    url, database = archived(old, tmp_path / "archive"), f"sqlite:///{tmp_path}/b"
    settings = Settings(servers=(new,), database=database)
    create_tables(Database(database).sync_engine(), bank.projections.values())
    async with bank.connect(servers=new) as jet:
        identity = (await jet.init()).identity
    async with working_on(new, database).working("balances"):
        await eventually(lambda: waiting(new, 1), "the worker's pull")
        with pytest.raises(Refused, match="workers wait for its events \\(balances-r1\\); stop them first"):
            await restore(REF, url, settings)
    assert ask_once(endpoint(new), stream_info("bank")).metadata[IDENTITY] == identity
    await eventually(lambda: waiting(new, 0), "the end of the worker's pull")
    last = (await restore(REF, url, settings)).last
    assert await project(new, database) == last


async def test_an_archive_that_was_changed_or_is_of_another_app_is_refused_before_anything_is_written(
    old: str, new: str, tmp_path: Path
) -> None:
    await fill(bank, old, 50)
    url = archived(old, tmp_path / "archive")
    settings = Settings(servers=(new,))
    with pytest.raises(UsageError, match="is of 'bank', and the app is 'shop'"):
        await restore(App("shop", aggregates=[]), url, settings)
    with pytest.raises(ArchiveBroken, match="nothing is in it"):
        await restore(REF, str(tmp_path / "elsewhere"), settings)
    last = max((tmp_path / "archive" / "events").glob("*/*"))
    content = bytearray(last.read_bytes())
    content[40] ^= 1
    last.write_bytes(content)
    with pytest.raises(ArchiveBroken, match="was changed"):
        await restore(REF, url, settings)
    async with bank.connect(servers=new) as jet:
        assert (await jet.init()).created[0] == "bank", "it was not there"
