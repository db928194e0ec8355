"""No task of a worker ends unnoticed, neither while it works nor while it stops."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from eventjet import App, Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.health import HealthMonitor
from eventjet.subscriptions.status import StatusReader
from eventjet.subscriptions.supervisor import Workers
from eventjet.subscriptions.work_status import StatusSnapshot, WorkStatus


def workers() -> Workers:
    return Workers(App("supervised", aggregates=[]), Settings(), WorkerOptions(drain_s=5.0), lambda _: None)


async def until_stopped(stop: asyncio.Event) -> None:
    await stop.wait()


@pytest.mark.parametrize("stops", [False, True], ids=["while it works", "while it stops"])
async def test_a_task_that_fails_ends_the_worker_with_its_error(stops: bool, caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()

    async def failing(stop: asyncio.Event) -> None:
        if stops:
            await stop.wait()
        raise RuntimeError("odd")

    working = workers()
    working.add("good", until_stopped)
    working.add("bad", failing)
    if stops:
        asyncio.get_running_loop().call_later(0.05, stop.set)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="odd"):
        await working.run(stop)
    assert "bad has ended" in caplog.text


async def test_tasks_that_end_when_asked_to_stop_are_no_error() -> None:
    stop = asyncio.Event()
    working = workers()
    working.add("good", until_stopped)
    asyncio.get_running_loop().call_later(0.05, stop.set)
    await working.run(stop)


async def test_a_failing_health_look_is_followed_by_another() -> None:
    class Odd:
        looks = 0

        async def read(self) -> StatusSnapshot:
            self.looks += 1
            return StatusSnapshot(0.0, cast("list[WorkStatus]", [None] if self.looks == 1 else []))

        async def __aenter__(self) -> Odd:
            return self

        async def __aexit__(self, *_: object) -> None: ...

    reader: Any = Odd()
    monitor = HealthMonitor(cast("StatusReader", reader), "me", WorkerOptions(look_s=0.01), [])
    stop = asyncio.Event()
    keeping = asyncio.create_task(monitor.keep(stop))
    while reader.looks < 2:
        assert not keeping.done()
        await asyncio.sleep(0.01)
    stop.set()
    await keeping
    assert monitor.status().healthy
