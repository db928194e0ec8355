"""A reactor divided among several cursors, on a real server: workers share them, and `init` divides them anew."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from eventjet import App, Jet
from eventjet.codec.subjects import cursor_bucket
from eventjet.dev.nats import NatsServer
from eventjet.domain.reactor import partition_of
from eventjet.errors import CursorFenced, CursorMissing, UsageError
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_control import cursor_at, move_cursors, position_range
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import status
from eventjet.subscriptions.supervisor import run_workers
from tests.integration.reacting import QUICK, Bell, Town, app_of, counted, eventually, until, working

PARTS = [f"echo-{number}-of-4" for number in (1, 2, 3, 4)]
BELLS = [f"b{n}" for n in range(12)]


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,))


@pytest.fixture
def town() -> Town:
    return Town()


@pytest.fixture
def app(town: Town) -> App:
    return app_of(town, partitions=4)


@pytest.fixture
async def jet(app: App, settings: Settings) -> AsyncGenerator[Jet]:
    async with app.connect(settings) as jet:
        made = await jet.init()
        assert made.cursors == tuple((name, 0) for name in PARTS)
        yield jet


def cursors_of(jet: Jet) -> Cursors:
    assert jet.client is not None
    return Cursors(jet.client, jet.name)


async def ring(jet: Jet, *numbers: int) -> None:
    for n in numbers:
        for bell in BELLS:
            await jet.repository(Bell).execute(bell, Bell.ring, n)


async def shares(jet: Jet) -> list[int]:
    """How many partitions each worker has, the smallest first."""
    held = [(await cursors_of(jet).read(name)).cursor.owner for name in PARTS]
    return sorted(Counter(owner for owner in held if owner is not None).values())


async def shared(jet: Jet, *wanted: int) -> None:
    async def look() -> bool:
        return await shares(jet) == list(wanted)

    await eventually(look)


@asynccontextmanager
async def ringing(jet: Jet, town: Town) -> AsyncGenerator[list[int]]:
    """Within the block the bells ring, as fast as they are heard; how often is what is yielded, as it grows."""
    rung: list[int] = []
    stop = asyncio.Event()

    async def run() -> None:
        for n in itertools.count():
            await ring(jet, n)
            rung.append(n)
            while not stop.is_set() and len(town.heard) < len(BELLS) * (n - 1):
                await asyncio.sleep(0.01)
            if stop.is_set():
                return

    task = asyncio.ensure_future(run())
    try:
        yield rung
    finally:
        stop.set()
        await task


async def test_workers_share_the_partitions_and_hand_them_over_in_order(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    async with ringing(jet, town) as rung:
        async with working(app, settings):
            await shared(jet, 4)
            async with working(app, settings):
                await shared(jet, 2, 2)
                before = len(rung)
                await until(lambda: len(rung) > before + 3)
            await shared(jet, 4)
        async with working(app, settings):
            await shared(jet, 4)
    async with working(app, settings):
        await until(lambda: all(town.order(bell) == rung for bell in BELLS))
    assert sorted(await counted(jet)) == sorted((bell, n) for bell in BELLS for n in rung)
    assert {partition_of(("bell", bell), 4) for bell in BELLS} == {0, 1, 2, 3}


async def test_a_worker_may_be_told_which_partitions_to_work_on(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    stop = asyncio.Event()
    working_on_one = asyncio.ensure_future(run_workers(app, settings, [PARTS[1]], stop=stop, options=QUICK))
    await ring(jet, 1)
    own = {bell for bell in BELLS if partition_of(("bell", bell), 4) == 1}
    await until(lambda: {bell for bell, *_ in town.heard} == own)
    assert [one.name for one in await status(app, settings) if one.owner is not None] == [PARTS[1]]
    stop.set()
    await working_on_one


async def test_what_is_parked_is_of_its_partition(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    town.fails = lambda bell, n, attempt: ValueError("poison") if (bell, n) == ("b0", 1) else None
    number = partition_of(("bell", "b0"), 4)
    async with working(app, settings):
        await ring(jet, 1, 2)

        async def parked() -> list[int]:
            found = [len(await cursors_of(jet).parked(name)) for name in PARTS]
            return found if sum(found) == 2 else []

        assert await eventually(parked) == [2 * (part == number) for part in range(4)]
        await until(lambda: all(town.order(bell) == [1, 2] for bell in BELLS[1:]))
        town.fails = lambda bell, n, attempt: None
        await cursor_control.retry(cursors_of(jet), PARTS[number], None)
        await until(lambda: town.order("b0") == [1, 2])


@pytest.mark.parametrize("after", [1, 2, 8])
async def test_init_divides_them_anew_where_they_stand_at_one_position(
    app: App, jet: Jet, settings: Settings, town: Town, after: int
) -> None:
    town.fails = lambda bell, n, attempt: ValueError("poison") if n == 2 and bell in ("b0", "b1", "b2") else None
    async with working(app, settings):
        await ring(jet, 1, 2, 3)
        await until(lambda: all(town.order(bell) == [1, 2, 3] for bell in BELLS[3:]))

        async def parked() -> bool:
            return sum([len(await cursors_of(jet).parked(name)) for name in PARTS]) == 6

        await eventually(parked)
    await come_to_rest(app, jet, settings)
    anew = app_of(town, partitions=after, name=app.name)
    names = ["echo"] if after == 1 else [f"echo-{number}-of-{after}" for number in range(1, after + 1)]
    async with anew.connect(settings) as other:
        assert [name for name, _ in (await other.init()).cursors] == names
        assert (await other.init()).cursors == ()
        cursors = cursors_of(other)
        assert sorted(one.name for one in await status(anew, settings)) == names
        moved = {name: [entry.key for entry in await cursors.parked(name)] for name in names}
        assert sum(len(keys) for keys in moved.values()) == 6
        declared = declarations_of(anew)
        assert all(declared[name].has(key) for name, keys in moved.items() for key in keys)
        town.fails = lambda bell, n, attempt: None
        async with working(anew, settings):
            await ring(other, 4)
            await until(lambda: all(town.order(bell)[-1] == 4 for bell in BELLS[3:]))
            for name in names:
                await cursor_control.retry(cursors, name, None)
            await until(lambda: all(town.order(bell) == [1, 2, 3, 4] for bell in BELLS))
        with pytest.raises(CursorMissing, match="End a worker of an earlier release instead"):
            await run_workers(app, settings, stop=asyncio.Event(), options=QUICK)
    assert sorted(await counted(jet)) == sorted((bell, n) for bell in BELLS for n in (1, 2, 3, 4))


async def come_to_rest(app: App, jet: Jet, settings: Settings) -> None:
    """All at one position, and nobody there: a stop cuts off what takes long."""

    async def rests() -> bool:
        async with working(app, settings):
            pass
        held = [(await cursors_of(jet).read(name)).cursor for name in PARTS]
        return len({one.position for one in held}) == 1 and not any(one.done or one.owner for one in held)

    await eventually(rests)


async def test_what_stands_apart_is_divided_only_where_somebody_says_where_to_go_on(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    async with working(app, settings):
        await ring(jet, 1, 2)
        await until(lambda: all(town.order(bell) == [1, 2] for bell in BELLS))
    await come_to_rest(app, jet, settings)
    assert jet.client is not None
    declared = declarations_of(app)
    behind = await cursor_at(jet.store, jet.client, declared[PARTS[1]], 5)
    await move_cursors(cursors_of(jet), jet.client, [declared[PARTS[1]]], behind, jet.store.at)
    anew = app_of(town, partitions=2, name=app.name)
    async with anew.connect(settings) as other:
        assert other.client is not None
        with pytest.raises(UsageError, match=r"into 2 and it has 4 cursors. They stand at 5, \d+, and"):
            await other.init()
        parts = list(declarations_of(anew).values())
        at = await cursor_at(other.store, other.client, parts[0], 5)
        stood = await position_range(cursors_of(other), parts)
        assert stood is not None
        assert stood[0] == 5 < stood[1]
        with pytest.raises(UsageError, match="or put all of them somewhere"):
            await move_cursors(cursors_of(other), other.client, parts[:1], at, other.store.at)
        assert await move_cursors(cursors_of(other), other.client, parts, at, other.store.at) == []
        assert (await other.init()).cursors == ()
        before = len(town.heard)
        async with working(anew, settings):
            rung = [event for bell in BELLS for event in await jet.repository(Bell).history(bell)]
            after = sum(event.position > 5 for event in rung)
            await until(lambda: len({key for _, _, key, _ in town.heard[before:]}) == after)
    assert sorted(await counted(jet)) == sorted((bell, n) for bell in BELLS for n in (1, 2))


async def test_nothing_is_divided_under_a_worker(
    app: App, jet: Jet, settings: Settings, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    anew = app_of(town, partitions=2, name=app.name)
    async with working(app, settings), anew.connect(settings) as other:
        await shared(jet, 4)
        with pytest.raises(UsageError, match="A worker is at it: stop those of the release before"):
            await other.init()
    # One that was killed has left its name.
    monkeypatch.setattr(cursor_control, "_SILENT_S", 0.1)
    cursors = cursors_of(jet)
    held = await cursors.read(PARTS[1])
    await cursors.write(held, held.cursor.taken("a dead process", 1))
    await cursor_control.pause(cursors, [PARTS[3]])
    async with anew.connect(settings) as other:
        await other.init()
        assert {one.state for one in await status(anew, settings)} == {"paused"}


async def test_a_worker_of_the_release_before_stands_by(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    held = await cursors_of(jet).read(PARTS[0])
    other = app_of(town, partitions=2, name=app.name)
    async with working(app, settings):
        await shared(jet, 4)
        parts = list(declarations_of(other).values())
        await cursors_of(jet).divide(
            await cursors_of(jet).of("echo"),
            [held.cursor.divided(one.name, 1, paused=False) for one in parts],
            (),
        )
        async with working(other, settings):
            await ring(jet, 1)
            await until(lambda: all(town.order(bell) == [1] for bell in BELLS))


async def test_what_another_worker_may_not_take_is_not_left_lying(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    """One that works on a partition alone counts as a worker: another takes more than its share."""
    stop = asyncio.Event()
    alone = asyncio.ensure_future(run_workers(app, settings, PARTS[:1], stop=stop, options=QUICK))
    others = asyncio.ensure_future(run_workers(app, settings, PARTS[1:], stop=stop, options=QUICK))
    await shared(jet, 1, 3)
    await ring(jet, 1)
    await until(lambda: all(town.order(bell) == [1] for bell in BELLS))
    stop.set()
    await asyncio.gather(alone, others)


async def test_a_handler_is_not_cut_off_where_its_partition_is_only_handed_over(
    app: App, jet: Jet, settings: Settings, town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    town.gate.clear()
    async with working(app, settings):
        await shared(jet, 4)
        await ring(jet, 1, 2)
        await until(lambda: town.begun == set(BELLS))
        async with working(app, settings):
            for _ in range(5):  # it has nothing to let go of before its handlers are done
                await asyncio.sleep(0.1)
                assert await shares(jet) == [4]
            town.gate.set()
            await shared(jet, 2, 2)
            await until(lambda: all(town.order(bell) == [1, 2] for bell in BELLS))
    assert "cut off" not in caplog.text


async def test_another_init_is_not_overwritten(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    """Between the look of one and its write another makes the cursors, and an event comes."""
    assert jet.client is not None
    cursors = cursors_of(jet)
    at = await cursor_at(jet.store, jet.client, declarations_of(app)[PARTS[0]], 0)
    with pytest.raises(CursorFenced):
        await cursors.divide((), [replace(at, name=name, position=1) for name in PARTS], ())
    assert [(await cursors.read(name)).cursor.position for name in PARTS] == [0, 0, 0, 0]


async def test_a_damaged_cursor_is_put_anywhere_with_the_others(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    assert jet.client is not None
    await ring(jet, 1)
    await jet.client.request(f"$KV.{cursor_bucket(app.name)}.c.{PARTS[0]}", b"no cursor")
    cursors, parts = cursors_of(jet), list(declarations_of(app).values())
    at = await cursor_at(jet.store, jet.client, parts[0], 0)
    with pytest.raises(UsageError, match="are not there, or cannot be read"):
        await move_cursors(cursors, jet.client, parts[:1], at, jet.store.at)
    assert await move_cursors(cursors, jet.client, parts, at, jet.store.at) == []
    async with working(app, settings):
        await until(lambda: all(town.order(bell) == [1] for bell in BELLS))


async def test_partitions_are_paused_and_resumed_together_or_by_themselves(
    app: App, jet: Jet, settings: Settings
) -> None:
    cursors = cursors_of(jet)
    await cursor_control.pause(cursors, PARTS)
    await cursor_control.resume(cursors, PARTS[:1])
    assert [one.changed for one in await cursor_control.resume(cursors, PARTS)] == [False, True, True, True]
    with pytest.raises(UsageError, match="Nothing to resume"):
        await cursor_control.resume(cursors, PARTS)
