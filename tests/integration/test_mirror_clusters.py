"""A log and its mirror in clusters of three servers, some of which fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet import failpoints
from eventjet.dev.nats import NatsServer
from eventjet.errors import StoreError, StoreUnavailable, Unreachable
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.operations import mirrors, promotion
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.reacting import working
from tests.integration.test_mirror import Filing
from tests.nats_cluster import wait_agreed
from tests.two_regions import two_clusters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]
APP = bank.name
PATIENT_S = 240.0


@dataclass(frozen=True)
class Clusters:
    """The three servers of each region."""

    east: list[NatsServer]
    west: list[NatsServer]
    settings: Settings


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    """Start all servers but the third of the west, so that the west has no leader yet."""
    with ExitStack() as stack:
        east, west = two_clusters(tmp_path, APP, stack)
        start_all(east)
        for server in west[:2]:
            server.start()
        settings = Settings(
            servers=tuple(server.url for server in east),
            read_from=tuple(server.url for server in west[:2]),
            database=f"sqlite:///{tmp_path}/models.db",
            replicas=3,
            save_timeout_s=PATIENT_S,
        )
        yield Clusters(east, west, settings)


def start_all(servers: list[NatsServer]) -> None:
    for server in servers:
        server.start()
    wait_agreed(servers, PATIENT_S)


async def create_mirrored_log(clusters: Clusters) -> int:
    """Make a log with some events, and its mirror; return the last position."""
    await asyncio.to_thread(start_all, clusters.west)
    async with bank.connect(clusters.settings) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        await accounts.execute("a-1", Account.open, "ada")
        result = await accounts.execute("a-1", Account.deposit, Decimal(1))
    create_tables(Database(clusters.settings.database).sync_engine(), bank.projections.values())
    await asyncio.to_thread(mirrors.create, APP, clusters.settings, 3)
    await asyncio.to_thread(until, lambda: mirrors.status(APP, clusters.settings).last == result.position)
    return result.position


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def await_leaderless(server: NatsServer, stream: str) -> None:
    """Wait until a replica answers that the stream has no leader."""
    deadline = time.monotonic() + PATIENT_S
    while time.monotonic() < deadline:
        with NatsConnection.open(Endpoint((server.url,))) as link:
            try:
                assert link.ask(stream_info(stream), timeout_s=30.0).cluster["leader"]
            except StoreUnavailable as error:
                if "the stream has no leader" in error.reason:
                    return
        time.sleep(0.1)
    raise AssertionError(f"{stream} still has a leader")


async def test_a_mirror_without_a_leader_is_not_taken_for_a_log(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "ELECTION_S", 0.5)
    end = await create_mirrored_log(clusters)
    for server in clusters.west[1:]:
        server.kill()
    await asyncio.to_thread(await_leaderless, clusters.west[0], APP)
    for call in (
        lambda: mirrors.status(APP, clusters.settings),
        lambda: promotion.preview(bank, clusters.settings),
        lambda: promotion.promote(bank, clusters.settings),
    ):
        with pytest.raises(StoreError, match=r"the stream has no leader, and what a replica says may be old. .*west1"):
            await asyncio.to_thread(call)
    monkeypatch.setattr(promotion, "ELECTION_S", PATIENT_S)
    await asyncio.to_thread(start_all, clusters.west)
    async with bank.connect(clusters.settings) as jet:  # nothing was sealed
        result = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
    assert (await asyncio.to_thread(promotion.promote, bank, clusters.settings)).end == result.position == end + 1


async def test_a_promotion_waits_for_the_election_of_leaders(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that just chooses its leader is alive: it is sealed, and not taken for gone."""
    monkeypatch.setattr(promotion, "ELECTION_S", PATIENT_S)
    end = await create_mirrored_log(clusters)
    for server in (*clusters.west[1:], *clusters.east[1:]):
        server.kill()
    for servers in (clusters.west, clusters.east):
        await asyncio.to_thread(await_leaderless, servers[0], APP)
    leaderless, run = set[NatsConnection](), NatsConnection.run

    def noting(connection: NatsConnection, *arguments: Any, **options: Any) -> Any:
        try:
            return run(connection, *arguments, **options)
        except StoreUnavailable:
            leaderless.add(connection)
            raise

    monkeypatch.setattr(NatsConnection, "run", noting)
    promoting = asyncio.create_task(asyncio.to_thread(promotion.promote, bank, clusters.settings))
    for count, servers in enumerate((clusters.west, clusters.east), start=1):
        await asyncio.to_thread(until, lambda: promoting.done() or len(leaderless) == count)  # noqa: B023
        await asyncio.to_thread(start_all, servers)
    promoted = await promoting
    assert (promoted.end, promoted.log_last, promoted.sealed) == (end, end, True)


async def test_the_mirror_of_a_log_without_a_leader_can_be_promoted(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining server may still send heartbeats to the mirror, so the user declares the log lost."""
    monkeypatch.setattr(promotion, "ELECTION_S", 0.5)
    end = await create_mirrored_log(clusters)
    for server in clusters.east[1:]:
        server.kill()
    await asyncio.to_thread(await_leaderless, clusters.east[0], APP)
    promoted = await asyncio.to_thread(promotion.promote, bank, clusters.settings, log_is_gone=True)
    assert (promoted.end, promoted.log_last, promoted.sealed) == (end, None, False)
    await asyncio.to_thread(start_all, clusters.east)
    assert (await asyncio.to_thread(promotion.promote, bank, clusters.settings)).sealed


async def test_a_mirror_can_be_created_during_an_election(clusters: Clusters) -> None:
    async with bank.connect(clusters.settings) as jet:
        await jet.init()
    with pytest.raises(Unreachable, match="choose the leader of their JetStream once all of them run"):
        await connect(clusters.settings.for_reads())
    creating = asyncio.create_task(asyncio.to_thread(mirrors.create, APP, clusters.settings, 3))
    await asyncio.to_thread(clusters.west[2].start)
    assert await creating == [APP]


async def test_a_promotion_succeeds_although_servers_of_the_mirror_die_at_each_step(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    filing = Filing(APP)
    app = filing.app
    await asyncio.to_thread(start_all, clusters.west)
    async with app.connect(clusters.settings) as jet:
        await jet.init()
        assert len(await asyncio.to_thread(mirrors.create, app.name, clusters.settings, 3)) == 3
        bodies = [await filing.file(jet, number) for number in range(3)]
        async with working(app, clusters.settings):
            await asyncio.to_thread(until, lambda: len(filing.filed) == 3)
    deaths: list[NatsServer] = []

    def reach(name: str) -> None:
        if name.startswith("promote.") and len(deaths) < 8:
            start_all(clusters.west)
            deaths.append(clusters.west[len(deaths) % 3])
            deaths[-1].kill()

    def promote() -> promotion.Promotion:
        deadline = time.monotonic() + PATIENT_S
        while True:
            try:
                return promotion.promote(app, clusters.settings)
            except (StoreError, Unreachable):
                assert time.monotonic() < deadline

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", reach)
        promoted = await asyncio.to_thread(promote)
    assert (promoted.end, promoted.sealed, promoted.beyond) == (3, True, ())
    await asyncio.to_thread(start_all, clusters.west)
    new_settings = replace(clusters.settings.for_reads(), database=clusters.settings.database, save_timeout_s=PATIENT_S)
    async with app.connect(new_settings) as jet:
        await jet.init()
        async with working(app, new_settings):
            bodies.append(await filing.file(jet, 3))
            await asyncio.to_thread(until, lambda: len(filing.filed) == 4)
        assert sorted(filing.filed) == [1, 2, 3, 4]
        read = [await jet.blobs.read(event.data.scan, max_bytes=1 << 20) async for event in jet.tail()]
        assert read == bodies
