"""`eventjet doctor` examines three servers and a durable PostgreSQL, and reports the server that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet.dev.postgres import PostgresServer
from eventjet.findings import Level
from eventjet.settings import Settings
from tests.integration.doctored import UNREACHABLE, WARNING, Deployment, kinds
from tests.integration.reacting import eventually, working
from tests.nats_cluster import NatsCluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_java")]


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster


async def test_a_healthy_cluster_has_no_findings_until_a_server_is_lost(cluster: NatsCluster, tmp_path: Path) -> None:
    with PostgresServer() as postgres:
        # The settings name one server, which knows the others.
        settings = Settings(servers=(cluster.urls[0],), database=postgres.url, replicas=3)
        monitoring = tuple(server.monitor_url for server in cluster.servers)
        deployment = await Deployment(settings, tmp_path, monitoring=monitoring).init()
        async with working(deployment.app, settings):
            last = await deployment.deposit(Decimal(5))
            async with deployment.app.connect(settings) as jet:
                await jet.caught_up("deposits", position=last, timeout_s=100)

            async def is_healthy() -> bool:
                return kinds(await deployment.findings()) == set()  # once all copies are current

            await eventually(is_healthy)
        (version,) = [finding.what for finding in await deployment.findings() if finding.check == "version"]
        assert all(url.removeprefix("nats://") in version for url in cluster.urls)

        deployment.settings = replace(settings, replicas=1)
        assert ("streams", "replicas", WARNING) in kinds(await deployment.findings())
        deployment.settings = settings
        cluster.servers[2].kill()

        async def reports_lost_server() -> bool:
            reported = kinds(await deployment.findings())
            return {("streams", "copies", WARNING), ("monitoring", "monitoring", UNREACHABLE)} <= reported

        await eventually(reports_lost_server)
        assert not [finding for finding in await deployment.findings() if finding.level is Level.FAULT]
