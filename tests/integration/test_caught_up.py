"""`caught_up` waits until a read model has a write, with and without notices from workers, on both databases."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from eventjet import App, Jet
from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.errors import NotCaughtUp, Unreachable, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.client import connect
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.waiting import Checkpoints, RevisionStatus, Waiting
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, Added, database_with
from tests.logs import fresh_name

LONG_S = 60.0
QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1)
USERS = """
authorization { timeout: 30, users [
  { user: app, password: app }
  { user: mute, password: mute, permissions { publish: { deny: ["_EJ.>"] } } }
] }
"""


@dataclass
class Counted:
    """Reads checkpoints and counts its reads."""

    read: Checkpoints
    reads: int = 0

    async def __call__(self) -> Mapping[str, Sequence[RevisionStatus]]:
        checkpoints = await self.read()
        self.reads += 1
        return checkpoints


@asynccontextmanager
async def waiting(ledger: Ledger, slow_s: float = LONG_S) -> AsyncGenerator[tuple[Waiting, Counted]]:
    """Yield what a connection waits with; without a notice it reads checkpoints only after `slow_s`."""
    client = await connect(ledger.settings)
    counter = Counted(Checkpoints(ledger.settings.database))
    reader = Waiting(ledger.name, counter, client.serve, slow_s=slow_s)
    try:
        yield reader, counter
    finally:
        await reader.close()
        await counter.read.close()
        await client.close()


def execute(url: str, statement: str) -> Any:
    engine = Database(url).sync_engine()
    try:
        with engine.begin() as connection:
            done = connection.execute(text(statement))
            return done.all() if done.returns_rows else None
    finally:
        engine.dispose()


async def wait_for_reads(counter: Counted, times: int = 1) -> None:
    async def often_enough() -> bool:
        return counter.reads >= times

    await eventually(often_enough, "a look")


async def test_a_workers_notice_wakes_a_waiting_reader(ledger: Ledger) -> None:
    async with waiting(ledger) as (reader, counter):
        waiter = asyncio.create_task(reader.caught_up(BALANCES, 301, LONG_S))
        await wait_for_reads(counter)
        ledger.append(history(300))
        await reader.caught_up(MOVEMENTS, 0, LONG_S)  # this call subscribes to notices
        async with ledger.working(options=QUICK), asyncio.timeout(LONG_S / 2):
            await reader.caught_up(MOVEMENTS, 200, LONG_S)
            ledger.append([("a-1", Added(amount=Decimal(1)))])
            await waiter


def subscriptions(server: NatsServer, prefix: str) -> list[str]:
    with urllib.request.urlopen(f"{server.monitor_url}/connz?subs=1", timeout=10) as answer:
        connections = json.load(answer)["connections"]
    return [
        subject
        for connection in connections
        for subject in connection.get("subscriptions_list", ())
        if subject.startswith(prefix)
    ]


async def test_a_worker_that_may_not_send_notices_projects_and_readers_poll(
    tmp_path: Path, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def has_warned() -> bool:
        return "once a second" in caplog.text

    database_with(database, BALANCES, MOVEMENTS)
    with NatsServer(config=USERS) as server:
        ledger = Ledger(Settings(servers=(server.url,), database=database, user="app", password="app"))
        ledger.create()
        mute = replace(ledger, settings=replace(ledger.settings, user="mute", password="mute"))
        async with waiting(ledger) as (deaf, counter), waiting(ledger, slow_s=0.2) as (slow, _):
            unnotified = asyncio.create_task(deaf.caught_up(BALANCES, 100, 2))
            await wait_for_reads(counter)
            result = asyncio.create_task(slow.caught_up(BALANCES, 100, LONG_S))
            async with mute.working("balances", options=QUICK):
                ledger.append(history(100))
                await result
                with pytest.raises(NotCaughtUp):
                    await unnotified
                ledger.append(history(1, seed=2))
                await slow.caught_up(BALANCES, 101, LONG_S)
                await eventually(has_warned, "the log line")
        assert counter.reads == 1  # no notice woke the reader


async def test_a_position_that_is_reached_without_a_notice_is_noticed(ledger: Ledger) -> None:
    execute(
        ledger.settings.database,
        "update eventjet_projection set state = 'active' where name = 'balances'",
    )
    async with waiting(ledger, slow_s=0.2) as (reader, counter):
        waiter = asyncio.create_task(reader.caught_up(BALANCES, 7, LONG_S))
        await wait_for_reads(counter, 2)
        await asyncio.to_thread(execute, ledger.settings.database, "update eventjet_projection set position = 7")
        await waiter


async def test_notices_arrive_again_after_a_server_restart(tmp_path: Path, database: str) -> None:
    database_with(database, BALANCES, MOVEMENTS)
    with NatsServer() as server:
        ledger = Ledger(Settings(servers=(server.url,), database=database))
        ledger.create()
        async with waiting(ledger) as (reader, counter), ledger.working("balances", options=QUICK):
            ledger.append(history(10))
            await reader.caught_up(BALANCES, 10, LONG_S)
            server.kill()
            server.start()
            await eventually(lambda: is_subscribed(server, ledger), "the subscription")
            waiter = asyncio.create_task(reader.caught_up(BALANCES, 20, LONG_S / 2))
            await wait_for_reads(counter, 2)
            ledger.append(history(10))
            await waiter


async def is_subscribed(server: NatsServer, ledger: Ledger) -> bool:
    return bool(await asyncio.to_thread(subscriptions, server, f"_EJ.{ledger.name}."))


async def test_a_database_that_stops_while_readers_wait_is_unreachable(eventjet_nats: NatsServer) -> None:
    with PostgresServer(durable=False) as postgres:
        ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=postgres.url))
        database_with(postgres.url, BALANCES)
        async with waiting(ledger, slow_s=0.2) as (reader, counter):
            waiters = [asyncio.create_task(reader.caught_up(BALANCES, 1, LONG_S)) for _ in range(20)]
            await wait_for_reads(counter)
            postgres.kill()
            for waiter in waiters:
                with pytest.raises(Unreachable, match=r"^The database postgresql\S+: "):
                    await waiter
            postgres.start()
            with pytest.raises(NotCaughtUp):
                await reader.caught_up(BALANCES, 1, 0)
            # Dead connections of the pool are replaced without an error.
            end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'eventjet caught_up'"
            execute(postgres.url, end)
            with pytest.raises(NotCaughtUp):
                await reader.caught_up(BALANCES, 1, 0)


async def test_a_hanging_database_is_unreachable_after_the_timeout(eventjet_nats: NatsServer) -> None:
    async with hanging(eventjet_nats, timeout_s=5) as (_, waiter):
        with pytest.raises(Unreachable, match="has not answered for"):
            await waiter


async def test_a_hanging_query_is_replaced_by_a_query_on_another_connection(
    eventjet_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventjet.sql.waiting._QUERY_MAX_S", 1.0)
    async with hanging(eventjet_nats, timeout_s=5 * LONG_S) as (postgres, waiter):
        execute(postgres.url, "update eventjet_projection set position = 1")
        await waiter


@asynccontextmanager
async def hanging(nats: NatsServer, timeout_s: float) -> AsyncGenerator[tuple[PostgresServer, asyncio.Task[None]]]:
    """Yield a task that waits for position 1 while the process that serves its connection is stopped."""
    with PostgresServer(durable=False) as postgres:
        ledger = Ledger(Settings(servers=(nats.url,), database=postgres.url))
        database_with(postgres.url, BALANCES)
        async with waiting(ledger, slow_s=0.2) as (reader, counter):
            waiter = asyncio.create_task(reader.caught_up(BALANCES, 1, timeout_s))
            await wait_for_reads(counter, 2)
            backends = [pid for (pid,) in execute(postgres.url, _BACKENDS)]
            for pid in backends:
                os.kill(pid, signal.SIGSTOP)
            try:
                yield postgres, waiter
            finally:
                for pid in backends:
                    os.kill(pid, signal.SIGCONT)


async def test_a_connection_whose_close_is_cancelled_closes_that_of_its_database(
    eventjet_nats: NatsServer, eventjet_database: str
) -> None:
    app = App(fresh_name(), aggregates=[Account], projections=[balances], upcasters=[withdrawn_has_a_reason])
    create_tables(Database(eventjet_database).sync_engine(), app.projections.values())
    tasks = asyncio.all_tasks()
    connecting = app.connect(servers=eventjet_nats.url, database=eventjet_database)
    jet = await connecting.__aenter__()
    await jet.init()
    waiter = asyncio.create_task(jet.caught_up("balances", position=1, timeout_s=LONG_S))

    async def is_connected() -> bool:
        return bool(execute(eventjet_database, f"{_BACKENDS} and datname = current_database()"))

    await eventually(is_connected, "a connection to the database")
    closing = asyncio.create_task(connecting.__aexit__(None, None, None))
    await asyncio.sleep(0)  # now it waits for the query to end
    closing.cancel()
    await asyncio.wait({closing, waiter})
    assert closing.cancelled()
    assert isinstance(waiter.exception(), Unreachable)

    async def is_closed() -> bool:
        return not await is_connected() and asyncio.all_tasks() == tasks

    await eventually(is_closed, "no connection and no task")


_BACKENDS = "select pid from pg_stat_activity where application_name = 'eventjet caught_up'"


async def test_missing_tables_are_reported(ledger: Ledger) -> None:
    execute(ledger.settings.database, "drop table eventjet_projection")
    async with waiting(ledger) as (reader, _):
        with pytest.raises(Unreachable, match=r"eventjet's tables are not in it. Run `eventjet init`"):
            await reader.caught_up(BALANCES, 1, LONG_S)


async def test_waiting_creates_no_database_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"sqlite:///{tmp_path}/read.db")
    with pytest.raises(Unreachable, match=r"read.db: there is no such file. Name .*, or run `eventjet init`"):
        await checkpoints()
    assert not list(tmp_path.iterdir())


@pytest.fixture
async def jet(eventjet_nats: NatsServer, database: str) -> AsyncGenerator[Jet]:
    app = App(fresh_name(), aggregates=[Account], projections=[balances], upcasters=[withdrawn_has_a_reason])
    engine = Database(database).sync_engine()
    create_tables(engine, app.projections.values())
    engine.dispose()
    async with app.connect(servers=eventjet_nats.url, database=database) as jet:
        await jet.init()
        stop, ready = asyncio.Event(), asyncio.Event()
        settings = Settings(servers=(eventjet_nats.url,), database=database)
        work = asyncio.create_task(run_workers(app, settings, stop=stop, on_ready=ready.set))
        await ready.wait()
        yield jet
        stop.set()
        await work


async def test_a_token_lets_another_process_wait_for_a_write(jet: Jet) -> None:
    accounts = jet.repository(Account)
    done = await accounts.execute("ada", Account.open, "ada")
    header = done.token.encode("ascii")
    assert header == f"{jet.name}:{done.position}@{(await jet.log()).identity}".encode()
    await jet.caught_up("balances", token=header.decode(), timeout_s=LONG_S)
    again = await accounts.execute("ada", Account.open, "ada")
    assert (again.events, again.token) == ((), done.token)
    (moved,) = await jet.transact(accounts.decide("ada", Account.deposit, Decimal(3)))
    await jet.caught_up("balances", token=moved.token, timeout_s=LONG_S)
    await jet.caught_up("balances", position=moved.position)


async def test_invalid_arguments_of_caught_up_are_refused(jet: Jet) -> None:
    call: Callable[..., Any] = jet.caught_up
    for wrong in ({}, {"position": 1, "token": f"{jet.name}:1"}):
        with pytest.raises(UsageError, match=r"a position or for a token. Give one"):
            await call("balances", **wrong)
    for position in ("3", -1, 2.0):
        with pytest.raises(UsageError, match="is not a position"):
            await call("balances", position=position)
    with pytest.raises(UsageError, match="is not a token"):
        await jet.caught_up("balances", token="1234")
    with pytest.raises(UsageError, match="is of the app 'other'"):
        await jet.caught_up("balances", token="other:1")
    with pytest.raises(UsageError, match=r"has no projection 'nope'. It has balances"):
        await jet.caught_up("nope", position=1)
