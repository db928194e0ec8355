"""A whole cluster is killed under load, or its log moves, and the mirror in the other region's cluster is promoted.

Every acknowledged command is in the promoted log, or named by position; no row is wrong afterwards. The number of
tries is `EVENTJET_TEST_PROMOTIONS`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet import Committed, Jet
from eventjet.codec.headers import VERSION, number_of
from eventjet.codec.subjects import subject_of
from eventjet.dev.nats import NatsServer
from eventjet.errors import EventjetError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.jetstream.client import connected
from eventjet.operations import mirrors, promotion
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.reacting import eventually, working
from tests.nats_cluster import wait_agreed
from tests.two_regions import crossing, two_clusters

TRIES = int(os.environ.get("EVENTJET_TEST_PROMOTIONS", "1"))
WRITERS = 8
PATIENT_S = 240.0


def started(servers: list[NatsServer]) -> None:
    """Start all servers of a cluster that do not run, and wait until they agree on their leaders."""
    for server in servers:
        server.start()
    wait_agreed(servers, PATIENT_S)


async def writing(jet: Jet, account: str, acknowledged: list[Committed[Account, Any]]) -> None:
    """Deposit until the log answers no more."""
    accounts = jet.repository(Account)
    with suppress(EventjetError):
        await accounts.execute(account, Account.open, account)
        while True:
            acknowledged.append(await accounts.execute(account, Account.deposit, Decimal(1)))


@pytest.mark.timeout(900 * TRIES)
async def test_after_a_cluster_is_killed_every_acknowledged_command_is_kept_or_named(tmp_path: Path) -> None:
    for number in range(TRIES):
        await killed_and_promoted(tmp_path / str(number), lags=number % 2 == 0)


@pytest.mark.timeout(900 * TRIES)
async def test_a_log_moves_between_clusters_under_load_without_a_loss(tmp_path: Path) -> None:
    for number in range(TRIES):
        await moved(tmp_path / str(number))


@asynccontextmanager
async def mirrored(folder: Path) -> AsyncGenerator[tuple[list[NatsServer], list[NatsServer], Settings]]:
    """Make a cluster in the east with an empty log, and one in the west with the log's mirror."""
    with ExitStack() as stack:
        east, west = two_clusters(folder, bank.name, stack)
        for servers in (east, west):
            await asyncio.to_thread(started, servers)
        settings = Settings(
            servers=tuple(server.url for server in east),
            read_from=tuple(server.url for server in west),
            database=f"sqlite:///{folder}/models.db",
            replicas=3,
            save_timeout_s=10.0,
        )
        async with bank.connect(settings, save_timeout_s=PATIENT_S) as jet:
            await jet.init()
        create_tables(Database(settings.database).sync_engine(), bank.projections.values())
        await asyncio.to_thread(mirrors.create, bank.name, settings, settings.replicas)
        yield east, west, settings


async def killed_and_promoted(folder: Path, *, lags: bool) -> None:
    """Go through a disaster; with `lags` the mirror is away when it happens, so that it lacks the last acknowledged."""
    acknowledged: list[Committed[Account, Any]] = []
    async with mirrored(folder) as (east, west, settings):
        async with bank.connect(settings) as jet, working(bank, settings):
            writers = [asyncio.ensure_future(writing(jet, f"a-{number}", acknowledged)) for number in range(WRITERS)]
            await acknowledging(acknowledged, writers, 300 + random.randrange(300))
            if lags:
                for server in west:
                    server.kill()
                await acknowledging(acknowledged, writers, len(acknowledged) + 50)
            for server in east:
                server.kill()
            await asyncio.wait(writers, timeout=PATIENT_S)
        await asyncio.to_thread(started, west)
        promoted = await asyncio.to_thread(promotion.promote, bank, settings)
        assert not lags or acknowledged[-1].position > promoted.end
        await goes_on(settings, promoted, acknowledged)
        await asyncio.to_thread(started, east)
        assert await asyncio.to_thread(crossing, east[0].url, west[0].url, bank.name) == set()
        fenced = await asyncio.to_thread(promotion.promote, bank, settings)
        assert fenced.sealed
        assert max(commit.position for commit in acknowledged) <= fenced.known_last
        lost = sum(commit.position > promoted.end for commit in acknowledged)
        print(f"{len(acknowledged)} commands acknowledged, {lost} not in the mirror, each of them named")  # noqa: T201


async def moved(folder: Path) -> None:
    """Go through a planned move, while commands are recorded until they are refused."""
    acknowledged: list[Committed[Account, Any]] = []
    async with mirrored(folder) as (_, _, settings):
        async with bank.connect(settings) as jet, working(bank, settings):
            writers = [asyncio.ensure_future(writing(jet, f"a-{number}", acknowledged)) for number in range(WRITERS)]
            await acknowledging(acknowledged, writers, 300 + random.randrange(300))
            promoted = await asyncio.to_thread(promotion.promote, bank, settings)
            await asyncio.wait(writers, timeout=PATIENT_S)
        assert (promoted.sealed, promoted.end) == (True, promoted.log_last)
        assert max(commit.position for commit in acknowledged) <= promoted.end
        await goes_on(settings, promoted, acknowledged)
        print(f"{len(acknowledged)} commands acknowledged, and all moved")  # noqa: T201


async def acknowledging(
    acknowledged: list[Committed[Account, Any]], writers: Sequence[asyncio.Future[None]], count: int
) -> None:
    """Wait until so many commands were acknowledged; the writers go on."""

    async def busy() -> bool:
        assert not all(writer.done() for writer in writers)
        return len(acknowledged) >= count

    await eventually(busy)


async def goes_on(
    settings: Settings, promoted: promotion.Promotion, acknowledged: list[Committed[Account, Any]]
) -> None:
    """Record in the promoted log, and compare its events and its read models with what was acknowledged."""
    after = replace(settings.for_reads(), database=settings.database, replicas=3, save_timeout_s=PATIENT_S)
    await none_is_lost_unnamed(after, promoted, acknowledged)
    async with bank.connect(after) as jet, working(bank, after):
        await jet.init()
        done = await jet.repository(Account).execute("new", Account.open, "new")
        assert done.position == promoted.end + 1
        if not promoted.beyond:
            await jet.caught_up("balances", token=done.token, timeout_s=PATIENT_S)
    if promoted.beyond:
        await rebuild(bank, ["balances", "postings"], after, engine="local")
    for name in ("balances", "postings"):
        report = await verify(bank, name, after, engine="local")
        assert (report.differences, report.position) == (0, done.position)


async def none_is_lost_unnamed(
    after: Settings, promoted: promotion.Promotion, acknowledged: list[Committed[Account, Any]]
) -> None:
    """Assert that each acknowledged event up to the mirror's end is at its position in the promoted log."""
    async with connected(after) as client, bank.connect(after) as jet:
        assert client.domain == "west"
        stored = {
            record[0]: (record[2].decode(), number_of(record[3], VERSION)) async for record in jet.store.records()
        }
        assert list(stored) == list(range(1, promoted.end + 1))
        for commit in acknowledged:
            if commit.position <= promoted.end:
                subject = subject_of(bank.name, "account", commit.state.owner or "")
                assert stored[commit.position] == (subject, commit.version)
