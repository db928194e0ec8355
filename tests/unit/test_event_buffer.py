"""The hand-over from the thread that reads to the loop that writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import pytest

from eventjet.subscriptions.reader import BYTES_MAX, Chunk, EventBuffer
from eventjet.writers.batch import Batch


def chunk(after: int, count: int, size: int = 10, left: int = 0) -> Chunk:
    return Chunk(after, after + count, f"id-{after + count}", [], count, size, left)


async def taken(batch: Awaitable[Batch | None]) -> tuple[int, int]:
    """The positions before and at the end of a batch."""
    async with asyncio.timeout(30):
        result = await batch
    assert result is not None
    return result.after, result.last


async def test_what_waits_is_merged_up_to_the_batch() -> None:
    buffer = EventBuffer(batch_max=10)
    for after, count in ((0, 4), (4, 6), (10, 1)):
        assert buffer.put(chunk(after, count))
    assert await taken(buffer.take(1)) == (0, 10)
    assert await taken(buffer.take(1)) == (10, 11)


async def test_nothing_in_time_is_none_and_so_is_a_wake() -> None:
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
    passed: list[bool] = []
    thread = threading.Thread(target=lambda: passed.append(buffer.put(chunk(full.last, 1))))
    thread.start()
    thread.join(0.05)
    assert passed == []
    assert await buffer.take(1) is not None
    await asyncio.to_thread(thread.join, 5)
    assert passed == [True]


async def test_a_closed_buffer_lets_the_reader_go() -> None:
    buffer = EventBuffer(batch_max=1)
    assert buffer.put(chunk(0, 2))
    passed: list[bool] = []
    thread = threading.Thread(target=lambda: passed.append(buffer.put(chunk(2, 1))))
    thread.start()
    buffer.close()
    await asyncio.to_thread(thread.join, 5)
    assert passed == [False]


async def test_a_failure_comes_after_what_was_read_before_it() -> None:
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 3))
    buffer.fail(LookupError("gone"))
    assert await buffer.take(1) is not None
    with pytest.raises(LookupError, match="gone"):
        await buffer.take(1)


async def test_a_piece_from_another_thread_wakes_the_loop() -> None:
    buffer = EventBuffer(batch_max=10)
    waiting = asyncio.create_task(buffer.take(60))
    await asyncio.to_thread(buffer.put, chunk(0, 3))
    assert await taken(waiting) == (0, 3)


async def test_far_behind_a_batch_is_waited_for_until_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.subscriptions.reader._GATHER_S", 30.0)
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=100))
    waiting = asyncio.create_task(buffer.take(60))
    await asyncio.to_thread(buffer.put, chunk(4, 6, left=94))
    assert await taken(waiting) == (0, 10)


async def test_near_the_end_what_is_there_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.subscriptions.reader._GATHER_S", 60.0)
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=10))
    assert await taken(buffer.take(60)) == (0, 4)


async def test_nobody_waits_long_for_a_whole_batch() -> None:
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=100))
    assert await taken(buffer.take(60)) == (0, 4)


async def test_whoever_wants_a_whole_batch_gets_none_other() -> None:
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 9))
    waiting = asyncio.create_task(buffer.take_whole())
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(buffer.put, chunk(9, 1))
    assert await taken(waiting) == (0, 10)
    buffer.put(chunk(10, 9))
    buffer.fail(LookupError("gone"))
    assert await buffer.take_whole() is None
    assert await taken(buffer.take(1)) == (10, 19)


async def test_once_nothing_more_will_be_put_nobody_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.subscriptions.reader._GATHER_S", 60.0)
    buffer = EventBuffer(batch_max=10)
    buffer.put(chunk(0, 4, left=1_000))
    waiting = asyncio.create_task(buffer.take_whole())
    await asyncio.sleep(0)
    await asyncio.to_thread(buffer.finish)
    async with asyncio.timeout(30):
        assert await waiting is None
        assert await taken(buffer.take(60)) == (0, 4)
        assert await buffer.take(60) is None
