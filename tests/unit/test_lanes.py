"""KeyedExecutor: one task at a time for a key, many keys at once, and a position below which all is done."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventjet.subscriptions.keyed_executor import KeyedExecutor, Work


async def idle(executor: KeyedExecutor) -> None:
    """Wait until no work is left."""
    while executor._tasks:
        await asyncio.sleep(0)


async def test_a_drained_executor_finishes_begun_work_and_begins_no_more() -> None:
    executor, gate, begun = KeyedExecutor(2, 1_000), asyncio.Event(), list[int]()

    def work(position: int) -> Work:
        async def run() -> None:
            begun.append(position)
            await gate.wait()

        return run

    for position in range(1, 7):
        executor.add(position, "", [(position % 3, work(position))])
    while len(begun) < 2:
        await asyncio.sleep(0)
    draining = asyncio.ensure_future(executor.drained())
    await asyncio.sleep(0)
    assert not draining.done()
    gate.set()
    await draining
    assert begun == [1, 2]
    assert (executor.position, executor.done_beyond()) == (2, ())
    await executor.close()


async def test_paused_work_lets_other_keys_run_and_blocks_its_own_key() -> None:
    executor, names = KeyedExecutor(1, 1_000), list[str]()

    def work(name: str, pause_s: float | None) -> Work:
        async def run() -> None:
            if pause_s is not None:
                await executor.pause(pause_s)
            names.append(name)

        return run

    executor.add(1, "", [("a", work("a", 0.05))])
    executor.add(2, "", [("a", work("a again", None))])
    executor.add(3, "", [("b", work("b", None))])
    executor.add_due("c", work("c", 0.05))
    executor.add_due("d", work("d", None))
    await idle(executor)
    assert names[:2] == ["b", "d"]
    assert names.index("a") < names.index("a again")
    assert executor.position == 3
    await executor.close()


async def test_the_position_stays_below_unfinished_work() -> None:
    executor = KeyedExecutor(8, 1_000, position=10, event_id="e10")
    gate = asyncio.Event()

    async def nothing() -> None:
        pass

    async def wait() -> None:
        await gate.wait()

    executor.add(11, "e11", [("a", nothing)])
    executor.add(13, "e13", [("b", wait), ("c", nothing)])
    executor.add(14, "e14", [])
    executor.add(17, "e17", [("d", nothing)])
    executor.add(18, "e18", [("b", nothing)])
    executor.add(20, "e20", [("e", nothing)])
    while executor.done_beyond() != ((14, 17), (20, 20)):
        await asyncio.sleep(0)
    assert (executor.position, executor.event_id) == (11, "e11")
    gate.set()
    await idle(executor)
    assert (executor.position, executor.done_beyond()) == (20, ())
    await executor.close()


async def test_work_done_beyond_the_position_stays_done_until_it_is_reached() -> None:
    executor = KeyedExecutor(8, 1_000, position=10, event_id="e10", done=((12, 14), (17, 20)))
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    assert executor.done_beyond() == ((12, 14), (17, 20))
    executor.add(11, "e11", [("a", wait)])
    executor.add(13, "e13", [])
    assert executor.done_beyond() == ((13, 13), (14, 14), (17, 20))
    executor.add(18, "e18", [])
    assert executor.done_beyond() == ((13, 18), (19, 20))
    gate.set()
    await idle(executor)
    executor.add(21, "e21", [])
    assert (executor.position, executor.done_beyond()) == (21, ())
    await executor.close()


async def test_reading_waits_for_room_and_due_work_does_not() -> None:
    executor = KeyedExecutor(1, 3)
    gate, due = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    async def come_due() -> None:
        due.set()

    for position in (1, 2, 3):
        executor.add(position, "", [(position, wait)])
    room = asyncio.ensure_future(executor.room())
    executor.add_due("p", come_due)
    await due.wait()
    assert not room.done()
    gate.set()
    await room
    await idle(executor)
    await executor.close()


async def test_an_error_of_work_is_reported_and_stops_only_its_key() -> None:
    executor = KeyedExecutor(4, 1_000)
    calls: list[int] = []

    async def fail() -> None:
        raise ValueError("broken")

    async def note() -> None:
        calls.append(1)

    executor.add(1, "", [("a", fail)])
    executor.add(2, "", [("a", note)])
    executor.add(3, "", [("b", note)])
    with pytest.raises(ValueError, match="broken"):
        await executor.failed
    while not calls:
        await asyncio.sleep(0)
    assert (calls, executor.position, executor.done_beyond()) == ([1], 0, ((3, 3),))
    await executor.close()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), keys=st.integers(1, 6), width=st.integers(1, 5))
def test_keys_keep_their_order_and_reported_positions_are_done(seed: int, count: int, keys: int, width: int) -> None:
    async def run() -> None:
        chance = random.Random(seed)
        executor = KeyedExecutor(width, 1_000)
        done_positions, added, active = set[int](), list[int](), set[int]()
        begun: defaultdict[int, list[int]] = defaultdict(list)

        def work(key: int, position: int) -> Work:
            async def do() -> None:
                assert key not in active
                assert len(active) < width
                active.add(key)
                begun[key].append(position)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                active.discard(key)
                done_positions.add(position)

            return do

        position = 0
        for _ in range(count):
            position, key = position + chance.randrange(1, 4), chance.randrange(keys)
            added.append(position)
            executor.add(position, str(position), [(key, work(key, position))])
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            reported = {added_position for added_position in added if added_position <= executor.position}
            reported |= {
                added_position
                for added_position in added
                if any(first <= added_position <= last for first, last in executor.done_beyond())
            }
            assert reported <= done_positions
        await idle(executor)
        assert (executor.position, executor.event_id, executor.done_beyond()) == (added[-1], str(added[-1]), ())
        assert all(positions == sorted(positions) for positions in begun.values())
        await executor.close()

    asyncio.run(run())
