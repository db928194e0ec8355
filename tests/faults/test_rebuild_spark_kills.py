"""Processes of a rebuild on Spark killed: a Python worker, which is replaced, and the driver amid its tasks."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests.faults.processes import await_it
from tests.faults.rebuilding import STARTS_S, RebuildProcess, stage

KILLS = int(os.environ.get("EVENTJET_TEST_REBUILD_KILLS", "0"))
"""The number of each kind; by default one."""
IN_TASKS = ("rebuild.rows_copied", "task.folded", "task.begun", "rebuild.part_begun", "rebuild.part_loaded")
"""On SQLite the driver loads, so there the first is the second's."""
ON_SPARK = ("--master", "local[2]")


def some(first: int) -> list[str]:
    """Return the places in a task, one after the other."""
    return [IN_TASKS[(first + number) % len(IN_TASKS)] for number in range(max(1, KILLS))]


@pytest.mark.slow
@pytest.mark.skipif(not KILLS, reason="most of a minute of Spark: `make faults` runs it")
@pytest.mark.timeout(600 + 60 * KILLS)
async def test_a_task_is_repeated_after_its_python_worker_is_killed(
    eventjet_nats: NatsServer, eventjet_database: str, tmp_path: Path
) -> None:
    killed: Counter[str] = Counter()
    with stage(eventjet_nats.url, eventjet_database, tmp_path) as scene:
        for name in some(0):
            with RebuildProcess(scene, *ON_SPARK, at=name) as run:
                assert run.ended() == 0, run.logged()
                assert run.fired.exists(), run.logged()
            killed[name] += 1
            await scene.check()
        scene.summary.append(f"Python workers of Spark killed (SIGKILL): {dict(killed)}; every rebuild finished")


@pytest.mark.slow
@pytest.mark.skipif(not KILLS, reason="most of a minute of Spark: `make faults` runs it")
@pytest.mark.timeout(600 + 60 * KILLS)
async def test_a_driver_killed_during_its_tasks_leaves_nothing_behind(
    eventjet_nats: NatsServer, eventjet_database: str, tmp_path: Path
) -> None:
    killed: Counter[str] = Counter()
    with stage(eventjet_nats.url, eventjet_database, tmp_path) as scene:
        for name in some(1):
            with RebuildProcess(scene, *ON_SPARK, at=name, action="stop") as run:
                (stopped,) = run.await_stop()
                assert stopped != run.process.pid
                run.process.kill()
                run.process.wait(30)
                # Others rebuild while the task may still be there, in the middle of its transaction perhaps.
                await scene.settle()
                for pid in run.stopped():
                    os.kill(pid, signal.SIGCONT)
                everything_ended = lambda run=run: run.others() == {}  # noqa: E731
                await_it(everything_ended, lambda run=run: f"{run.others()}\n{run.logged()}", STARTS_S)
            await scene.check()
            killed[name] += 1
        scene.summary.append(f"drivers killed (SIGKILL) with a task stopped in the middle: {dict(killed)}")
