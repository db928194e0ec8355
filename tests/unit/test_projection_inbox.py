"""The hand-over from the thread that reads to the loop that writes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from eventjet.workers.buffer import BYTES_MAX, EventBuffer, Piece


def piece(after: int, count: int, size: int = 10, left: int = 0) -> Piece:
    return Piece(after, after + count, f"id-{after + count}", [], count, size, left)


async def test_what_waits_is_merged_up_to_the_batch() -> None:
    inbox = EventBuffer(batch_max=10)
    for after, count in ((0, 4), (4, 6), (10, 1)):
        assert inbox.put(piece(after, count))
    first = await inbox.take(1)
    second = await inbox.take(1)
    assert first is not None
    assert second is not None
    assert (first.after, first.last, first.event_id) == (0, 10, "id-10")
    assert (second.after, second.last) == (10, 11)


async def test_nothing_in_time_is_none_and_so_is_a_wake() -> None:
    inbox = EventBuffer(batch_max=10)
    assert await inbox.take(0.01) is None
    waiting = asyncio.create_task(inbox.take(30))
    await asyncio.sleep(0)
    inbox.wake()
    assert await waiting is None


@pytest.mark.parametrize("full", [piece(0, 20), piece(0, 1, size=BYTES_MAX)], ids=["records", "bytes"])
async def test_a_reader_that_is_two_batches_ahead_waits(full: Piece) -> None:
    inbox = EventBuffer(batch_max=10)
    assert inbox.put(full)
    passed: list[bool] = []
    thread = threading.Thread(target=lambda: passed.append(inbox.put(piece(full.last, 1))))
    thread.start()
    thread.join(0.05)
    assert passed == []
    assert await inbox.take(1) is not None
    await asyncio.to_thread(thread.join, 5)
    assert passed == [True]


async def test_a_closed_inbox_lets_the_reader_go() -> None:
    inbox = EventBuffer(batch_max=1)
    assert inbox.put(piece(0, 2))
    passed: list[bool] = []
    thread = threading.Thread(target=lambda: passed.append(inbox.put(piece(2, 1))))
    thread.start()
    inbox.close()
    await asyncio.to_thread(thread.join, 5)
    assert passed == [False]


async def test_a_failure_comes_after_what_was_read_before_it() -> None:
    inbox = EventBuffer(batch_max=10)
    inbox.put(piece(0, 3))
    inbox.fail(LookupError("gone"))
    assert await inbox.take(1) is not None
    with pytest.raises(LookupError, match="gone"):
        await inbox.take(1)


async def test_a_piece_from_another_thread_wakes_the_loop() -> None:
    inbox = EventBuffer(batch_max=10)
    waiting = asyncio.create_task(inbox.take(60))
    await asyncio.to_thread(inbox.put, piece(0, 3))
    found = await waiting
    assert found is not None
    assert found.last == 3


async def test_far_behind_a_batch_is_waited_for_until_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.workers.buffer._GATHER_S", 30.0)
    inbox = EventBuffer(batch_max=10)
    inbox.put(piece(0, 4, left=100))
    waiting = asyncio.create_task(inbox.take(60))
    await asyncio.to_thread(inbox.put, piece(4, 6, left=94))
    found = await waiting
    assert found is not None
    assert (found.after, found.last) == (0, 10)


async def test_near_the_end_what_is_there_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.workers.buffer._GATHER_S", 60.0)
    inbox = EventBuffer(batch_max=10)
    inbox.put(piece(0, 4, left=10))
    async with asyncio.timeout(30):
        found = await inbox.take(60)
    assert found is not None
    assert found.last == 4


async def test_nobody_waits_long_for_a_whole_batch() -> None:
    inbox = EventBuffer(batch_max=10)
    inbox.put(piece(0, 4, left=100))
    found = await inbox.take(60)
    assert found is not None
    assert found.last == 4


async def test_whoever_wants_a_whole_batch_gets_none_other() -> None:
    inbox = EventBuffer(batch_max=10)
    inbox.put(piece(0, 9))
    waiting = asyncio.create_task(inbox.take_whole())
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(inbox.put, piece(9, 1))
    found = await waiting
    assert found is not None
    assert (found.after, found.last) == (0, 10)
    inbox.put(piece(10, 9))
    inbox.fail(LookupError("gone"))
    assert await inbox.take_whole() is None
    rest = await inbox.take(1)
    assert rest is not None
    assert rest.last == 19
