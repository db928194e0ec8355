"""Large bodies on three replicas, whose leader is killed during an upload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256

import pytest

from eventjet import Blob
from eventjet.domain.blob import CHUNK_BYTES
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.objects import Bucket
from eventjet.log.sweep import faults_of, references_of, sweep_objects
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.blobs import Document, documents
from tests.logs import fresh_name
from tests.nats_cluster import NatsCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PIECE = bytes(range(256)) * (CHUNK_BYTES // 256)
PIECES = 12


async def test_an_upload_continues_after_a_leader_change_and_a_sweep_removes_orphans() -> None:
    name = fresh_name()
    bucket, killed = Bucket(name), list[str]()
    with NatsCluster(sync_interval="1m") as cluster:

        async def content() -> AsyncIterator[bytes]:
            for number in range(PIECES):
                yield PIECE[number:] + PIECE[:number]
                if number == PIECES // 2:
                    leader = await asyncio.to_thread(cluster.stream_leader, bucket.stream)
                    assert leader is not None
                    leader.kill()
                    killed.append(leader.url)

        settings = Settings(servers=tuple(cluster.urls), replicas=3, save_timeout_s=120.0)
        async with documents(name).connect(settings) as jet:
            await jet.init()
            scan = await jet.blobs.put(content())
            assert killed
            done = await jet.repository(Document).execute("d-1", Document.file, scan, (Blob.of(b"a page"),))
            orphan = await jet.blobs.put(b"nobody refers to it")
            received = sha256()
            async for chunk in jet.blobs.chunks(done.events[0].scan):
                received.update(chunk)
            assert (f"sha256:{received.hexdigest()}", scan.size) == (scan.digest, PIECES * CHUNK_BYTES)
        cluster.start()
        endpoint = Endpoint(tuple(cluster.urls))
        with NatsConnection.open(endpoint) as link:
            config = link.api(f"STREAM.INFO.{bucket.stream}")["config"]
            swept = sweep_objects(link, endpoint, name, age_s=0, removes=True)
            assert (config["num_replicas"], swept.removed, swept.missing) == (3, 1, ())
            assert [blob.digest for blob in swept.orphans] == [orphan.digest]
            references = references_of(link, endpoint, name)
            assert list(faults_of(link, name, references.values())) == []
        cluster.kill()  # an orderly stop would take some seconds
