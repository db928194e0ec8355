"""`eventjet doctor` over three servers and a PostgreSQL that waits for its disk: nothing to say, until one is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet.dev.postgres import PostgresServer
from eventjet.findings import Level
from eventjet.settings import Settings
from tests.integration.doctored import UNREACHABLE, WARNING, Sick, kinds
from tests.integration.reacting import eventually, working
from tests.nats_cluster import NatsCluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_java")]


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster


async def test_three_servers_have_nothing_wrong_until_one_is_gone(cluster: NatsCluster, tmp_path: Path) -> None:
    with PostgresServer() as postgres:
        # One is named, and tells of the others.
        settings = Settings(servers=(cluster.urls[0],), database=postgres.url, replicas=3)
        monitoring = tuple(server.monitor_url for server in cluster.servers)
        sick = await Sick(settings, tmp_path, monitoring=monitoring).made()
        async with working(sick.app, settings):
            last = await sick.deposited(Decimal(5))
            async with sick.app.connect(settings) as jet:
                await jet.caught_up("deposits", position=last, timeout_s=100)

            async def is_whole() -> bool:
                return kinds(await sick.found()) == set()  # once all copies are current

            await eventually(is_whole)
        (said,) = [one.what for one in await sick.found() if one.check == "version"]
        assert all(url.removeprefix("nats://") in said for url in cluster.urls)

        sick.settings = replace(settings, replicas=1)
        assert ("streams", "replicas", WARNING) in kinds(await sick.found())
        sick.settings = settings
        cluster.servers[2].kill()

        async def is_missed() -> bool:
            told = kinds(await sick.found())
            return {("streams", "copies", WARNING), ("monitoring", "monitoring", UNREACHABLE)} <= told

        await eventually(is_missed)
        assert not [one for one in await sick.found() if one.level is Level.FAULT]
