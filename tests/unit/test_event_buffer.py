"""The buffer between the reading thread and the writing loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import pytest

from eventjet.subscriptions.reader import BYTES_MAX, Chunk, EventBuffer
from eventjet.writers.batch import Batch


def chunk(after: int, count: int, size: int = 10, left: int = 0) -> Chunk:
    return Chunk(after, after + count, f"id-{after + count}", [], count, size, left)


async def bounds_of(batch: Awaitable[Batch | None]) -> tuple[int, int]:
    """The positions before and at the end of a batch."""
    async with asyncio.timeout(30):
        result = await batch
    assert result is not None
    return result.after, result.last


async def test_waiting_chunks_are_merged_up_to_the_size_of_a_batch() -> None:
    buffer = EventBuffer(batch_max=10)
    for after, count in ((0, 4), (4, 6), (10, 1)):
        assert buffer.put(chunk(after, count))
    assert await bounds_of(buffer.take(1)) == (0, 10)
    assert await bounds_of(buffer.take(1)) == (10, 11)


async def test_a_timeout_and_a_wake_return_none() -> None:
    buffer = EventBuffer(batch_max=10)
    assert await buffer.take(0.01) is None
    waiting = asyncio.create_task(buffer.take(30))
    await asyncio.sleep(0)
    buffer.wake()
    assert await waiting is None


@pytest.mark.parametrize("full", [chunk(0, 20), chunk(0, 1, size=BYTES_MAX)], ids=["records", "bytes"])
async def test_a_reader_that_is_two_batches_ahead_waits(full: Chunk) -> None:
    buffer = EventBuffer(batch_max=10)
    assert buffer.put(full)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(buffer.put(chunk(full.last, 1))))
    thread.start()
    thread.join(0.05)
    assert results == []
    assert await buffer.take(1) is not None
    await asyncio.to_thread(thread.join, 5)
    assert results == [True]


async def test_closing_a_buffer_releases_the_reader() -> None:
    buffer = EventBuffer(batch_max=1)
    assert buffer.put(chunk(0, 2))
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(buffer.put(chunk(2, 1))))
    thread.start()
    buffer.close()
    await asyncio.to_thread(thread.join, 5)
    assert results == [False]


async def test_a_failure_is_raised_after_the_records_before_it() -> None:
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 3))
    buffer.fail(LookupError("gone"))
    assert await buffer.take(1) is not None
    with pytest.raises(LookupError, match="gone"):
        await buffer.take(1)


async def test_a_chunk_from_another_thread_wakes_the_loop() -> None:
    buffer = EventBuffer(batch_max=10)
    waiting = asyncio.create_task(buffer.take(60))
    await asyncio.to_thread(buffer.put, chunk(0, 3))
    assert await bounds_of(waiting) == (0, 3)


async def test_far_behind_a_take_waits_for_a_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.subscriptions.reader._GATHER_S", 30.0)
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=100))
    waiting = asyncio.create_task(buffer.take(60))
    await asyncio.to_thread(buffer.put, chunk(4, 6, left=94))
    assert await bounds_of(waiting) == (0, 10)


async def test_near_the_end_a_take_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.subscriptions.reader._GATHER_S", 60.0)
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=10))
    assert await bounds_of(buffer.take(60)) == (0, 4)


async def test_a_take_does_not_wait_long_for_a_whole_batch() -> None:
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=100))
    assert await bounds_of(buffer.take(60)) == (0, 4)


async def test_take_whole_returns_only_a_whole_batch() -> None:
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 9))
    waiting = asyncio.create_task(buffer.take_whole())
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(buffer.put, chunk(9, 1))
    assert await bounds_of(waiting) == (0, 10)
    buffer.put(chunk(10, 9))
    buffer.fail(LookupError("gone"))
    assert await buffer.take_whole() is None
    assert await bounds_of(buffer.take(1)) == (10, 19)


async def test_a_finished_buffer_makes_no_take_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.subscriptions.reader._GATHER_S", 60.0)
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=1_000))
    waiting = asyncio.create_task(buffer.take_whole())
    await asyncio.sleep(0)
    await asyncio.to_thread(buffer.finish)
    async with asyncio.timeout(30):
        assert await waiting is None
        assert await bounds_of(buffer.take(60)) == (0, 4)
        assert await buffer.take(60) is None
