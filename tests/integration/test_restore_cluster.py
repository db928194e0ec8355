"""A restore into three replicas, one of which is killed on the way."""

from __future__ import annotations

import pytest

from eventjet.archive.republish import BATCH_MAX, Restore, lasting
from eventjet.codec.headers import RawRecord
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from tests.archives import archive_of
from tests.integration.restoring import NAME, records_of
from tests.logs import block
from tests.nats_cluster import NatsCluster

EVENTS = 6 * BATCH_MAX + 7


def leader_of(urls: list[str]) -> str:
    with NatsConnection.open(Endpoint(tuple(urls))) as link:
        return str(link.api(f"STREAM.INFO.{NAME}")["cluster"]["leader"])


@pytest.mark.slow
def test_a_restore_survives_a_kill_of_the_leader() -> None:
    records: list[RawRecord] = []
    places: dict[int, int] = {}
    for position in range(1, EVENTS + 1):
        expected = places.get(position % 10, 0)
        headers = block(version=1, Nats_Expected_Last_Subject_Sequence=str(expected))
        records.append((position, 10**18 + position, b"bank.account.%d" % (position % 10), headers, b"{}"))
        places[position % 10] = position
    killed: list[str] = []
    with NatsCluster(sync_interval="1m") as cluster:

        def kill_leader(phase: str, done: int, _total: int) -> None:
            if phase == "publish" and done == 2 * BATCH_MAX:
                killed.append(leader_of(cluster.urls))
                cluster.named(killed[0]).kill()

        endpoint = Endpoint(tuple(cluster.urls))
        report = Restore(endpoint, archive_of(records), replicas=3, progress=kill_leader, timeout_s=2.0).run()
        assert len(killed) == 1
        assert (report.published, report.events) == (EVENTS, EVENTS)
        alive = next(server.url for server in cluster.servers if server.running)
        assert [lasting(record) for record in records_of(alive)] == [lasting(record) for record in records]
        cluster.kill()  # an orderly stop would take some seconds
