"""How a rebuild is stopped, and its estimate for the engine that was not used."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from eventjet import Settings
from eventjet.codec.headers import RawRecord
from eventjet.rebuild import job
from eventjet.rebuild.progress import Stopped, Watch
from eventjet.runtime import read_ahead


def test_work_begun_after_the_stop_is_interrupted() -> None:
    watch = Watch()
    watch.stop()
    interruptions: list[bool] = []
    with watch.interrupted_by(lambda: interruptions.append(True)):
        pass
    assert interruptions == [True]


def test_a_pause_ends_at_the_stop() -> None:
    watch = Watch()
    threading.Timer(0.05, watch.stop).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        watch.wait(30)
    assert time.monotonic() - began < 25


def test_reading_from_a_silent_server_ends_at_the_stop() -> None:
    silence = threading.Event()

    def nothing() -> Generator[list[RawRecord]]:
        silence.wait(30)
        yield []

    watch = Watch()
    threading.Timer(0.05, watch.stop).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        list(read_ahead(nothing(), watch.check))
    assert time.monotonic() - began < 25
    silence.set()


def test_the_time_of_the_local_engine_is_estimated_from_measured_phases() -> None:
    watch = Watch()
    watch.seconds |= {"start": 1.0, "spark": 8.0, "read": 3.0, "swap": 0.5}
    assert watch.local_at_most_s() is None
    watch.cores = 2
    assert watch.local_at_most_s() == pytest.approx(7.5)


async def test_an_error_of_abandoned_work_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "STOP_TIMEOUT_S", 0.01)
    loop = asyncio.get_running_loop()
    logged: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: logged.append(context))
    began, may_end, ended = threading.Event(), threading.Event(), asyncio.Event()

    def work(watch: Watch) -> None:
        began.set()
        try:
            may_end.wait(60)
            watch.check()
        finally:
            loop.call_soon_threadsafe(ended.set)

    task = asyncio.create_task(job.in_thread(Settings(), None, work))
    await asyncio.to_thread(began.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    await ended.wait()
    await loop.shutdown_default_executor()
    await asyncio.sleep(0)  # the executor's future passes its error to the loop's
    del task
    gc.collect()
    assert logged == []
