"""Rebuilds while commands keep arriving, readers keep reading and workers keep working: nobody notices a swap."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from eventjet.dev.nats import NatsServer
from eventjet.sql.database import Database
from tests.faults.rebuilding import NAMES, RebuildProcess, Stage, stage

EVENTS = int(os.environ.get("EVENTJET_TEST_REBUILD_EVENTS", "5000"))
"""Events in the log when the rebuilds begin."""
REBUILDS = int(os.environ.get("EVENTJET_TEST_REBUILDS", "2"))
RATE = float(os.environ.get("EVENTJET_TEST_REBUILD_RATE", "150"))
"""Commands in a second; 700 are requested to get 500 on two cores."""


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * REBUILDS)
async def test_readers_see_no_swap_while_commands_keep_arriving(
    eventjet_nats: NatsServer, database: str, tmp_path: Path
) -> None:
    with stage(eventjet_nats.url, database, tmp_path, events=EVENTS, rate=RATE) as scene:
        before, began = scene.feed.stored, time.monotonic()
        generations = [await asyncio.to_thread(rebuilt, scene) for _ in range(REBUILDS)]
        rate = (scene.feed.stored - before) / (time.monotonic() - began)
        scene.feed.pause()
        # Workers go on by themselves, in the new tables.
        await asyncio.to_thread(caught_up, scene)
        await scene.check()
        scene.summary.append(f"{REBUILDS} rebuilds of two read models while {rate:,.0f} commands a second arrived")
    assert generations == sorted(set(generations))
    assert rate > RATE / 5


def rebuilt(scene: Stage) -> int:
    """Rebuild as a program, so that the writers have an interpreter of their own; return the generation it made."""
    with RebuildProcess(scene) as run:
        assert run.ended() == 0, run.logged()
    with Database(scene.ledger.settings.database).sync_engine("fault tests").connect() as connection:
        query = text("select name, generation from eventjet_projection")
        generations = {row[0]: row[1] for row in connection.execute(query)}
    return min(generations[name] for name in NAMES)


def caught_up(scene: Stage) -> None:
    """Wait until the live read models are where the log is."""
    last = scene.feed.stored
    query = text("select min(position) from eventjet_projection")
    deadline = time.monotonic() + 300
    while True:
        with Database(scene.ledger.settings.database).sync_engine("fault tests").connect() as connection:
            position = connection.scalar(query)
        if position is not None and position >= last:
            return
        assert time.monotonic() < deadline, (position, last)
        time.sleep(0.05)
