"""After an import or its server is killed, the next run stores the missing events, and no event twice."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from eventjet.codec.headers import COMMAND, MSG_ID, VERSION, header, number_of
from eventjet.codec.subjects import entity_of
from eventjet.dev.nats import NatsServer
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests import logs
from tests.integration.importing import SOURCE, app_named, events
from tests.nats_cluster import NatsCluster

KILLS = int(os.environ.get("EVENTJET_TEST_IMPORT_KILLS", "4"))
COUNT = 3_000 * KILLS
PATIENT_S = 120.0
ROOT = Path(__file__).parents[2]


class Import:
    """A process that imports, and prints its progress."""

    def __init__(self, name: str, urls: list[str]) -> None:
        self._command = [sys.executable, "-m", "tests.integration.importing", name, ",".join(urls), str(COUNT)]

    async def until(self, batches: int) -> asyncio.subprocess.Process:
        """Start the process, and return once it has stored this number of batches or has ended."""
        process = await asyncio.create_subprocess_exec(*self._command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(PATIENT_S):
            for _ in range(batches):
                if not await process.stdout.readline():
                    break
        return process


def check_whole(urls: list[str], name: str) -> None:
    """Check that all events are in the log once, and in order within each aggregate."""
    ordinals: dict[tuple[str, str], list[int]] = defaultdict(list)
    ids: set[str] = set()
    records = logs.records_of(Endpoint(tuple(urls)), name)
    for record in records:
        key = entity_of(record[2])
        ordinals[key].append(int((header(record[3], COMMAND) or "").removeprefix(f"{SOURCE}/")))
        assert number_of(record[3], VERSION) == len(ordinals[key])
        ids.add(header(record[3], MSG_ID) or "")
    assert len(records) == len(ids) == COUNT
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in ordinals.values())


async def wait_for_end(process: asyncio.subprocess.Process, *, is_killed: bool = False) -> None:
    """Wait for the end of a process, which has stored all events unless it was killed."""
    async with asyncio.timeout(PATIENT_S):
        await process.communicate()
    assert is_killed or process.returncode == 0


async def finish(name: str, urls: list[str], *, at_least: int = 0) -> None:
    async with app_named(name).connect(servers=urls) as jet:
        report = await jet.append_many(events(COUNT), source=SOURCE)
    assert (report.stored + report.skipped, report.different) == (COUNT, 0)
    assert report.skipped >= at_least
    await asyncio.to_thread(check_whole, urls, name)


@pytest.mark.slow
async def test_an_import_that_is_killed_repeatedly_is_finished_by_the_next_run(eventjet_nats: NatsServer) -> None:
    name, urls, chance = logs.fresh_name(), [eventjet_nats.url], random.Random(7)
    async with app_named(name).connect(servers=urls) as jet:
        await jet.init()
    for number in range(1, KILLS + 1):
        process = await Import(name, urls).until(2 * number)
        await asyncio.sleep(chance.random() * 0.05)  # anywhere within a batch
        process.kill()
        assert await process.wait() == -signal.SIGKILL
    await finish(name, urls, at_least=2_000 * KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
async def test_an_import_is_resumed_after_its_server_was_killed(replicas: int) -> None:
    name, chance = logs.fresh_name(), random.Random(11)
    with NatsServer() if replicas == 1 else NatsCluster() as servers:
        urls = [servers.url] if isinstance(servers, NatsServer) else servers.urls
        async with app_named(name).connect(Settings(servers=tuple(urls), replicas=replicas)) as jet:
            await jet.init()
        kills = stored = 0
        for number in itertools.count(1):
            process = await Import(name, urls).until(2 * number)
            await asyncio.sleep(chance.random() * 0.05)
            if process.returncode is not None or number > KILLS // 2:
                break
            struck = servers if isinstance(servers, NatsServer) else servers.stream_leader(name)
            assert struck is not None
            before = await asyncio.to_thread(logs.records_of, Endpoint(tuple(urls)), name)
            # A run that was not killed stored all events; the servers are killed during the comparison of later runs.
            assert len(before) > stored or stored == COUNT, "the last run had stored some more"
            stored = len(before)
            await asyncio.to_thread(struck.kill)
            kills += 1
            if is_killed := number % 2 == 1:
                process.kill()
            await asyncio.to_thread(servers.start)
            await wait_for_end(process, is_killed=is_killed)
        await wait_for_end(process)
        assert kills > 0
        await finish(name, urls)
