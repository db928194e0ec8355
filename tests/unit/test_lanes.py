"""KeyedExecutor: one at a time for a key, many keys at once, and a floor below which everything is done."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventjet.subscriptions.keyed_executor import KeyedExecutor, Work


async def idle(lanes: KeyedExecutor) -> None:
    """Until no work is left."""
    while lanes._tasks:
        await asyncio.sleep(0)


async def test_drained_lanes_finish_what_has_begun_and_begin_nothing_more() -> None:
    lanes, gate, begun = KeyedExecutor(2, 1_000), asyncio.Event(), list[int]()

    def work(position: int) -> Work:
        async def run() -> None:
            begun.append(position)
            await gate.wait()

        return run

    for position in range(1, 7):
        lanes.add(position, "", [(position % 3, work(position))])
    while len(begun) < 2:
        await asyncio.sleep(0)
    draining = asyncio.ensure_future(lanes.drained())
    await asyncio.sleep(0)
    assert not draining.done()
    gate.set()
    await draining
    assert begun == [1, 2]
    assert (lanes.position, lanes.done_beyond()) == (2, ())
    await lanes.close()


async def test_what_pauses_leaves_its_place_to_other_keys_and_keeps_its_own_waiting() -> None:
    lanes, done = KeyedExecutor(1, 1_000), list[str]()

    def work(name: str, pause_s: float | None) -> Work:
        async def run() -> None:
            if pause_s is not None:
                await lanes.pause(pause_s)
            done.append(name)

        return run

    lanes.add(1, "", [("a", work("a", 0.05))])
    lanes.add(2, "", [("a", work("a again", None))])
    lanes.add(3, "", [("b", work("b", None))])
    lanes.add_due("c", work("c", 0.05))
    lanes.add_due("d", work("d", None))
    await idle(lanes)
    assert done[:2] == ["b", "d"]
    assert done.index("a") < done.index("a again")
    assert lanes.position == 3
    await lanes.close()


async def test_the_floor_stops_below_what_is_not_done() -> None:
    lanes = KeyedExecutor(8, 1_000, position=10, event_id="e10")
    gate = asyncio.Event()

    async def nothing() -> None:
        pass

    async def wait() -> None:
        await gate.wait()

    lanes.add(11, "e11", [("a", nothing)])
    lanes.add(13, "e13", [("b", wait), ("c", nothing)])
    lanes.add(14, "e14", [])
    lanes.add(17, "e17", [("d", nothing)])
    lanes.add(18, "e18", [("b", nothing)])
    lanes.add(20, "e20", [("e", nothing)])
    while lanes.done_beyond() != ((14, 17), (20, 20)):
        await asyncio.sleep(0)
    assert (lanes.position, lanes.event_id) == (11, "e11")
    gate.set()
    await idle(lanes)
    assert (lanes.position, lanes.done_beyond()) == (20, ())
    await lanes.close()


async def test_what_was_done_beyond_the_floor_is_done_until_it_is_come_to() -> None:
    lanes = KeyedExecutor(8, 1_000, position=10, event_id="e10", done=((12, 14), (17, 20)))
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    assert lanes.done_beyond() == ((12, 14), (17, 20))
    lanes.add(11, "e11", [("a", wait)])
    lanes.add(13, "e13", [])
    assert lanes.done_beyond() == ((13, 13), (14, 14), (17, 20))
    lanes.add(18, "e18", [])
    assert lanes.done_beyond() == ((13, 18), (19, 20))
    gate.set()
    await idle(lanes)
    lanes.add(21, "e21", [])
    assert (lanes.position, lanes.done_beyond()) == (21, ())
    await lanes.close()


async def test_reading_waits_for_room_and_what_is_due_does_not() -> None:
    lanes = KeyedExecutor(1, 3)
    gate, due = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    async def come_due() -> None:
        due.set()

    for position in (1, 2, 3):
        lanes.add(position, "", [(position, wait)])
    room = asyncio.ensure_future(lanes.room())
    lanes.add_due("p", come_due)
    await due.wait()
    assert not room.done()
    gate.set()
    await room
    await idle(lanes)
    await lanes.close()


async def test_what_work_raises_is_told_and_ends_its_lane_alone() -> None:
    lanes = KeyedExecutor(4, 1_000)
    done: list[int] = []

    async def fail() -> None:
        raise ValueError("broken")

    async def note() -> None:
        done.append(1)

    lanes.add(1, "", [("a", fail)])
    lanes.add(2, "", [("a", note)])
    lanes.add(3, "", [("b", note)])
    with pytest.raises(ValueError, match="broken"):
        await lanes.failed
    while not done:
        await asyncio.sleep(0)
    assert (done, lanes.position, lanes.done_beyond()) == ([1], 0, ((3, 3),))
    await lanes.close()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), keys=st.integers(1, 6), width=st.integers(1, 5))
def test_keys_keep_their_order_and_the_width_and_the_floor_is_what_was_done(
    seed: int, count: int, keys: int, width: int
) -> None:
    async def run() -> None:
        chance = random.Random(seed)
        lanes = KeyedExecutor(width, 1_000)
        done, added, active = set[int](), list[int](), set[int]()
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
                done.add(position)

            return do

        position = 0
        for _ in range(count):
            position, key = position + chance.randrange(1, 4), chance.randrange(keys)
            added.append(position)
            lanes.add(position, str(position), [(key, work(key, position))])
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            reported = {each for each in added if each <= lanes.position}
            reported |= {each for each in added if any(first <= each <= last for first, last in lanes.done_beyond())}
            assert reported <= done
        await idle(lanes)
        assert (lanes.position, lanes.event_id, lanes.done_beyond()) == (added[-1], str(added[-1]), ())
        assert all(positions == sorted(positions) for positions in begun.values())
        await lanes.close()

    asyncio.run(run())
