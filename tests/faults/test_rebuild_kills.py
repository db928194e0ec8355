"""Rebuilds and verifications killed at every step, alone and two at once: the live table is always whole."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from eventjet import failpoints
from eventjet.dev.nats import NatsServer
from tests.faults.rebuilding import RebuildProcess, Stage, stage

KILLS = int(os.environ.get("EVENTJET_TEST_REBUILD_KILLS", "0"))
"""How often two at once, and a fifth of that at each place; by default at every fourth place, others on the other
database."""
ALONE = tuple(name for name in failpoints.NAMES if name.startswith(("rebuild.", "verify.")))
NOT_ON_SQLITE = ("rebuild.keys_made",)
"""On SQLite the shadow table has its keys from the start."""
PAIRS = max(1, KILLS)


def places(*, sqlite: bool) -> list[str]:
    """Return where runs are killed, one after the other."""
    named = ALONE * max(1, KILLS // 5) if KILLS else ALONE[2 * int(sqlite) + 1 :: 4]
    return [name for name in named if not (sqlite and name in NOT_ON_SQLITE)]


def coverage(killed: Counter[str]) -> list[str]:
    return [f"  {name:24} killed {killed[name]:3}" for name in ALONE if killed[name]]


@pytest.mark.slow
@pytest.mark.timeout(900 + 60 * KILLS * len(ALONE))
async def test_a_run_killed_at_any_step_leaves_the_live_table_whole(
    eventjet_nats: NatsServer, database: str, tmp_path: Path
) -> None:
    killed: Counter[str] = Counter()
    with stage(eventjet_nats.url, database, tmp_path) as scene:
        for name in places(sqlite=scene.is_sqlite):
            command = name.partition(".")[0]
            with RebuildProcess(scene, at=name, command=command) as run:
                run.killed()
            killed[name] += 1
            await scene.settle()
        scene.summary += [f"{killed.total()} runs killed (SIGKILL) at {len(killed)} places", *coverage(killed)]


@pytest.mark.slow
@pytest.mark.timeout(600 + 120 * PAIRS)
async def test_a_rebuild_completes_while_a_concurrent_one_is_killed(
    eventjet_nats: NatsServer, database: str, tmp_path: Path
) -> None:
    chance = random.Random(PAIRS)
    killed: Counter[str] = Counter()
    with stage(eventjet_nats.url, database, tmp_path) as scene:
        await both_done(scene)
        for _ in range(PAIRS):
            there = [name for name in ALONE if name.startswith("rebuild.")]
            name = chance.choice([name for name in there if not (scene.is_sqlite and name in NOT_ON_SQLITE)])
            with RebuildProcess(scene, at=name) as armed, RebuildProcess(scene) as other:
                armed.killed()
                assert other.ended() == 0, other.logged()
            killed[name] += 1
            await scene.settle()
        scene.summary += [f"{killed.total()} times two at once, one of them killed", *coverage(killed)]


async def both_done(scene: Stage) -> None:
    with RebuildProcess(scene) as first, RebuildProcess(scene) as second:
        assert (first.ended(), second.ended()) == (0, 0), first.logged() + second.logged()
    await scene.check()
