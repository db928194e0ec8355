"""Transfers while their workers and servers are killed, stopped and woken."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from eventjet import failpoints
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.faults.acting.trial import Transfers, insist
from tests.faults.acting.troupe import Troupe
from tests.faults.acting.worker import transfers
from tests.nats_cluster import NatsCluster

KILLS = int(os.environ.get("EVENTJET_TEST_KILLS", "10"))
"""The number of kills at random moments."""
TRANSFERS = max(30, int(1.5 * KILLS))
WORKERS = 2
SEED = int(os.environ.get("EVENTJET_TEST_SEED", "1"))
ACTING = ("cursor.", "step.", "timer.", "due.", "reaction.")
POINTS = [name for name in failpoints.NAMES if name.startswith(ACTING)]
EVERY_DAY = ("step.decided", "step.stored", "cursor.before_write", "timer.set", "due.stored", "reaction.stored")
ZOMBIES = ("step.decided",)
"""Failpoints at which workers are killed, and stopped to be woken as zombies, in every run; `make faults` has all."""
_REACHED_S = 10.0
"""After so long the failpoint of a worker that stands by is given to another."""
_BETWEEN_S = 0.2
_LIMIT_S = 600 + 12 * KILLS


async def acted(
    url: str,
    folder: Path,
    points: list[str],
    trouble: Callable[[Troupe, random.Random], Awaitable[None]],
    replicas: int = 1,
) -> str:
    """Ask for transfers until the trouble is over and every failpoint was reached; then all must have come right."""
    settings = Settings(servers=tuple(url.split(",")), replicas=replicas)
    async with transfers.connect(settings) as jet:
        run = Transfers(jet, SEED)
        await run.open()
        with Troupe(url, folder, WORKERS, points) as troupe:
            task = asyncio.ensure_future(trouble(troupe, random.Random(SEED)))
            while len(run.requested) < TRANSFERS or not task.done() or troupe.left:
                await run.ask()
                await asyncio.to_thread(troupe.tend)
                troupe.give_up_points(_REACHED_S)
                await asyncio.sleep(_BETWEEN_S)
            await task
            ended = await run.ended(troupe)
        ends = await insist(lambda: run.reckon(troupe))
        summary = (
            f"{len(run.requested)} transfers, {troupe.killed} killed, {troupe.reached.total()} at failpoints: {ends}"
        )
        assert ended, summary
        assert ends.is_right, summary
        assert set(troupe.reached) == {point.rpartition(":")[0] for point in points}, troupe.reached
        return summary


async def killed_at_random(troupe: Troupe, chance: random.Random) -> None:
    for _ in range(KILLS):
        await asyncio.sleep(chance.uniform(0.2, 2.5))
        troupe.kill_worker(chance)


async def nothing(_troupe: Troupe, _chance: random.Random) -> None:
    """The failpoints are the trouble."""


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
async def test_transfers_complete_while_workers_are_killed_at_random(tmp_path: Path, report_lines: list[str]) -> None:
    with NatsServer() as server:
        report_lines.append(await acted(server.url, tmp_path, [], killed_at_random))


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
async def test_transfers_complete_while_workers_are_killed_and_stopped_at_failpoints(
    tmp_path: Path, report_lines: list[str]
) -> None:
    """At every failpoint, and stopped ones wake as zombies."""
    kills = POINTS if KILLS >= 100 else EVERY_DAY
    stops = POINTS if KILLS >= 100 else ZOMBIES
    counts = itertools.cycle((1, 2))
    wanted = [(name, "kill") for name in kills] + [(name, "stop") for name in stops]
    points = [f"{name}:{action}:{next(counts)}" for name, action in wanted]
    random.Random(SEED).shuffle(points)
    with NatsServer() as server:
        report_lines.append(await acted(server.url, tmp_path, points, nothing))


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
async def test_transfers_complete_while_the_server_is_killed(tmp_path: Path, report_lines: list[str]) -> None:
    async def kill_servers(troupe: Troupe, chance: random.Random) -> None:
        for _ in range(max(2, KILLS // 10)):
            await asyncio.sleep(chance.uniform(0.5, 3))
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(chance.random())
            await asyncio.to_thread(server.start)
            troupe.kill_worker(chance)

    with NatsServer() as server:
        report_lines.append(await acted(server.url, tmp_path, [], kill_servers))


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
async def test_transfers_complete_on_three_replicas_while_leaders_are_killed(
    tmp_path: Path, report_lines: list[str]
) -> None:
    async def kill_leaders(troupe: Troupe, chance: random.Random) -> None:
        for _ in range(max(2, KILLS // 10)):
            await asyncio.sleep(chance.uniform(0.5, 3))
            victim = chance.choice(cluster.servers)
            await asyncio.to_thread(victim.kill)
            await asyncio.sleep(chance.random())
            await asyncio.to_thread(victim.start)
            troupe.kill_worker(chance)
            with suppress(Exception):
                await asyncio.to_thread(cluster.wait_ready)

    with NatsCluster() as cluster:
        report_lines.append(await acted(cluster.url, tmp_path, [], kill_leaders, replicas=3))
