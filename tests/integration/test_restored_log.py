"""Read models, commands, snapshots and time travel work over the restored copy of a log."""

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
    """Return the bank as its workers know it."""
    settings = Settings(servers=(url,), database=database)
    return Ledger(settings, name="bank", catalog=bank.catalog, projections=dict(bank.projections))  # type: ignore[arg-type]


async def project(url: str, database: str) -> int:
    """Let workers bring every read model to the end of the log; return its position."""
    create_tables(Database(database).sync_engine(), bank.projections.values())
    ledger = working_on(url, database)
    last = ask_once(endpoint(url), stream_info("bank")).last
    async with ledger.working(*NAMES):
        for resolved in ledger.projections.values():
            await ledger.caught_up(last, resolved)
    return last


def checkpoints(database: str) -> dict[str, Checkpoint]:
    with reading(database) as connection:
        read_checkpoints = {name: read(connection, name, 1) for name in NAMES}
    return {name: checkpoint for name, checkpoint in read_checkpoints.items() if checkpoint is not None}


def rows(database: str) -> list[list[object]]:
    with reading(database) as connection:
        tables = [resolved.table for resolved in bank.projections.values()]  # type: ignore[union-attr]
        return [list(connection.execute(select(table).order_by(*table.primary_key.columns))) for table in tables]


def archived(url: str, folder: Path) -> str:
    identity = ask_once(endpoint(url), stream_info("bank")).metadata[IDENTITY]
    return seal(folder, records_of(url), identity)


async def test_read_models_continue_over_the_restored_log(old: str, new: str, database: str, tmp_path: Path) -> None:
    await fill(bank, old, 600)
    position = await project(old, database)
    async with bank.connect(servers=old, database=database) as jet:  # while no worker runs
        for number in range(5):
            await jet.repository(Account).execute("ada", Account.deposit, Decimal(number + 1))
    report = await restore(REF, archived(old, tmp_path / "archive"), Settings(servers=(new,)))
    assert (report.events, report.last) == (position + 5, position + 5)
    before = checkpoints(database)
    assert await project(new, database) == report.last
    after = checkpoints(database)
    for name in NAMES:
        assert (before[name].position, after[name].position) == (position, report.last)
        assert (after[name].generation, after[name].log, after[name].state) == (1, report.log, "active")
    async with bank.connect(servers=new, database=database) as jet:
        assert (await jet.init()).drifts == ()
        await jet.repository(Account).execute("new", Account.open, "eve")
    last = await project(new, database)
    settings = Settings(servers=(new,), database=database)
    for name in NAMES:
        verification = await verify(REF, name, settings)
        assert (verification.differences, verification.position, verification.events) == (0, last, report.events + 1)
    live = rows(database)
    await rebuild(REF, NAMES, settings, engine="local")
    assert rows(database) == live
    assert [(await verify(REF, name, settings)).differences for name in NAMES] == [0, 0, 0]


async def test_a_read_model_beyond_the_restored_log_fails_with_a_reason(
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
    ledger = working_on(new, database)

    async def all_failed() -> bool:
        return {checkpoint.state for checkpoint in checkpoints(database).values()} == {"failed"}

    async with ledger.working(*NAMES):
        await eventually(all_failed, "the projections to fail")
    for checkpoint in checkpoints(database).values():
        assert f"stands at position {ahead}, but the log ends at position {end}" in str(checkpoint.reason)
    async with bank.connect(servers=new, database=database) as jet:
        for _ in range(5):
            await jet.repository(Account).execute("bob", Account.deposit, Decimal(1))

    async def all_differ() -> bool:
        return all("the event there is" in str(checkpoint.reason) for checkpoint in checkpoints(database).values())

    async with ledger.working(*NAMES):
        await eventually(all_differ, "the projections to see another past")
    await rebuild(REF, NAMES, ledger.settings, engine="local")
    assert [(await verify(REF, name, ledger.settings)).differences for name in NAMES] == [0, 0, 0]


@pytest.mark.parametrize("snapshots", ["kept", "lost"])
async def test_commands_and_time_travel_work_over_the_restored_log(
    old: str, new: str, tmp_path: Path, snapshots: str
) -> None:
    async with bank.connect(servers=old) as jet:
        await fill(bank, old, 100)
        accounts = jet.repository(Account)
        for number in range(120):  # a snapshot is due at 100
            await accounts.execute("ada", Account.deposit, Decimal(number + 1))
        balance = (await accounts.load("ada")).balance
        first = await accounts.command("c-7").execute("ada", Account.deposit, Decimal(8))
    url, records = archived(old, tmp_path / "archive"), records_of(old)
    server_url = old if snapshots == "kept" else new
    delete(server_url)
    await restore(REF, url, Settings(servers=(server_url,)))
    async with bank.connect(servers=server_url) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        assert (await accounts.load("ada")).balance == balance
        repeated = await accounts.command("c-7").execute("ada", Account.deposit, Decimal(8))
        assert (repeated.position, repeated.version, repeated.state) == (first.position, first.version, first.state)
        last = len(records)
        withdrawal = await accounts.execute("ada", Account.withdraw, Decimal(1))
        assert (withdrawal.position, withdrawal.version) == (last + 1, 20 + 5 + 1 + 120 + 1)
        transfers = await jet.transact(
            accounts.decide("ada", Account.withdraw, Decimal(1)), accounts.decide("bob", Account.deposit, Decimal(1))
        )
        assert [transfer.position for transfer in transfers] == [last + 2, last + 3]
        ada_records = [record for record in records if record[2] == b"bank.account.ada"]
        for record in ada_records[::20]:
            at = recorded_at(record)
            assert await accounts.load("ada", at=at) == await accounts.load("ada", position=record[0])
        recorded_times = {event.position: event.recorded_at for event in await accounts.history("ada")}
        assert all(recorded_times[record[0]] == recorded_at(record) for record in ada_records)
        middle = logged_at(records[60])
        expected = [record[0] for record in records if logged_at(record) >= middle] + [last + 1, last + 2, last + 3]
        assert [event.position async for event in jet.tail(since=middle)] == expected
        after_last = logged_at(records[-1]) + timedelta(microseconds=1)
        assert [event.position async for event in jet.tail(since=after_last)] == expected[-3:]


async def test_a_log_that_lost_its_end_is_completed_from_the_archive(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "server", sync_interval="1m") as server:
        await fill(bank, server.url, 100)
        last = ask_once(endpoint(server.url), stream_info("bank")).last
        server.stop()
        shutil.copytree(tmp_path / "server", tmp_path / "backup")
        server.start()
        async with bank.connect(servers=server.url) as jet:
            for number in range(5):
                await jet.repository(Account).execute("ada", Account.deposit, Decimal(number + 1))
        url, records = archived(server.url, tmp_path / "archive"), records_of(server.url)
    with NatsServer(tmp_path / "backup", sync_interval="1m") as server:
        report = await restore(REF, url, Settings(servers=(server.url,)))
        assert (report.events, report.published) == (last + 5, 5)
        restored_records = records_of(server.url)
        assert restored_records[:last] == records[:last]
        assert [recorded_at(record) for record in restored_records] == [recorded_at(record) for record in records]
        async with bank.connect(servers=server.url) as jet:
            assert (await jet.init()).drifts == ()


async def waiting(url: str, count: int) -> bool:
    """Return whether exactly this many consumers have a waiting pull."""
    with NatsConnection.open(endpoint(url)) as link:
        consumers = link.api("CONSUMER.LIST.bank")["consumers"] or []
    return sum(consumer["num_waiting"] > 0 for consumer in consumers) == count


async def test_an_empty_stream_that_workers_wait_on_is_refused(old: str, new: str, tmp_path: Path) -> None:
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


async def test_a_changed_or_foreign_archive_is_refused_before_any_write(old: str, new: str, tmp_path: Path) -> None:
    await fill(bank, old, 50)
    url = archived(old, tmp_path / "archive")
    settings = Settings(servers=(new,))
    with pytest.raises(UsageError, match="is of 'bank', and the app is 'shop'"):
        await restore(App("shop", aggregates=[]), url, settings)
    with pytest.raises(ArchiveBroken, match=r"there is no such folder\. Name what"):
        await restore(REF, str(tmp_path / "elsewhere"), settings)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArchiveBroken, match=r"nothing is in it\. Name what"):
        await restore(REF, str(tmp_path / "empty"), settings)
    part = max((tmp_path / "archive" / "events").glob("*/*"))
    content = bytearray(part.read_bytes())
    content[40] ^= 1
    part.write_bytes(content)
    with pytest.raises(ArchiveBroken, match="was changed"):
        await restore(REF, url, settings)
    async with bank.connect(servers=new) as jet:
        assert (await jet.init()).created[0] == "bank", "it was not there"
