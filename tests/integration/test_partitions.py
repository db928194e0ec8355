"""Workers share the partitions of a reactor, and `init` divides it into another number of them."""

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
        topology = await jet.init()
        assert topology.cursors == tuple((name, 0) for name in PARTS)
        yield jet


def cursors_of(jet: Jet) -> Cursors:
    assert jet.client is not None
    return Cursors(jet.client, jet.name)


async def ring(jet: Jet, *numbers: int) -> None:
    for n in numbers:
        for bell in BELLS:
            await jet.repository(Bell).execute(bell, Bell.ring, n)


async def shares(jet: Jet) -> list[int]:
    """Return how many partitions each worker has, in ascending order."""
    owners = [(await cursors_of(jet).read(name)).cursor.owner for name in PARTS]
    return sorted(Counter(owner for owner in owners if owner is not None).values())


async def wait_shares(jet: Jet, *expected: int) -> None:
    async def has_shares() -> bool:
        return await shares(jet) == list(expected)

    await eventually(has_shares)


@asynccontextmanager
async def ringing(jet: Jet, town: Town) -> AsyncGenerator[list[int]]:
    """Ring the bells within the block as fast as they are heard; yield the growing list of rings."""
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


async def test_workers_share_partitions_and_hand_them_over_in_order(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    async with ringing(jet, town) as rung:
        async with working(app, settings):
            await wait_shares(jet, 4)
            async with working(app, settings):
                await wait_shares(jet, 2, 2)
                before = len(rung)
                await until(lambda: len(rung) > before + 3)
            await wait_shares(jet, 4)
        async with working(app, settings):
            await wait_shares(jet, 4)
    async with working(app, settings):
        await until(lambda: all(town.order(bell) == rung for bell in BELLS))
    assert sorted(await counted(jet)) == sorted((bell, n) for bell in BELLS for n in rung)
    assert {partition_of(("bell", bell), 4) for bell in BELLS} == {0, 1, 2, 3}


async def test_a_worker_may_be_limited_to_named_partitions(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    stop = asyncio.Event()
    working_on_one = asyncio.ensure_future(run_workers(app, settings, [PARTS[1]], stop=stop, options=QUICK))
    await ring(jet, 1)
    bells_of_partition = {bell for bell in BELLS if partition_of(("bell", bell), 4) == 1}
    await until(lambda: {bell for bell, *_ in town.heard} == bells_of_partition)
    assert [work_status.name for work_status in await status(app, settings) if work_status.owner is not None] == [
        PARTS[1]
    ]
    stop.set()
    await working_on_one


async def test_a_quarantined_event_belongs_to_its_partition(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    town.fails = lambda bell, n, attempt: ValueError("poison") if (bell, n) == ("b0", 1) else None
    number = partition_of(("bell", "b0"), 4)
    async with working(app, settings):
        await ring(jet, 1, 2)

        async def quarantined_counts() -> list[int]:
            counts = [len(await cursors_of(jet).quarantined(name)) for name in PARTS]
            return counts if sum(counts) == 2 else []

        assert await eventually(quarantined_counts) == [2 * (part == number) for part in range(4)]
        await until(lambda: all(town.order(bell) == [1, 2] for bell in BELLS[1:]))
        town.fails = lambda bell, n, attempt: None
        await cursor_control.retry(cursors_of(jet), PARTS[number], None)
        await until(lambda: town.order("b0") == [1, 2])


@pytest.mark.parametrize("after", [1, 2, 8])
async def test_init_changes_the_number_of_partitions_at_one_common_position(
    app: App, jet: Jet, settings: Settings, town: Town, after: int
) -> None:
    town.fails = lambda bell, n, attempt: ValueError("poison") if n == 2 and bell in ("b0", "b1", "b2") else None
    async with working(app, settings):
        await ring(jet, 1, 2, 3)
        await until(lambda: all(town.order(bell) == [1, 2, 3] for bell in BELLS[3:]))

        async def are_quarantined() -> bool:
            return sum([len(await cursors_of(jet).quarantined(name)) for name in PARTS]) == 6

        await eventually(are_quarantined)
    await wait_idle(app, jet, settings)
    new_app = app_of(town, partitions=after, name=app.name)
    names = ["echo"] if after == 1 else [f"echo-{number}-of-{after}" for number in range(1, after + 1)]
    async with new_app.connect(settings) as new_jet:
        assert [name for name, _ in (await new_jet.init()).cursors] == names
        assert (await new_jet.init()).cursors == ()
        cursors = cursors_of(new_jet)
        assert sorted(work_status.name for work_status in await status(new_app, settings)) == names
        keys_by_cursor = {name: [entry.key for entry in await cursors.quarantined(name)] for name in names}
        assert sum(len(keys) for keys in keys_by_cursor.values()) == 6
        declared = declarations_of(new_app)
        assert all(declared[name].has(key) for name, keys in keys_by_cursor.items() for key in keys)
        town.fails = lambda bell, n, attempt: None
        async with working(new_app, settings):
            await ring(new_jet, 4)
            await until(lambda: all(town.order(bell)[-1] == 4 for bell in BELLS[3:]))
            for name in names:
                await cursor_control.retry(cursors, name, None)
            await until(lambda: all(town.order(bell) == [1, 2, 3, 4] for bell in BELLS))
        with pytest.raises(CursorMissing, match="End a worker of an earlier release instead"):
            await run_workers(app, settings, stop=asyncio.Event(), options=QUICK)
    assert sorted(await counted(jet)) == sorted((bell, n) for bell in BELLS for n in (1, 2, 3, 4))


async def wait_idle(app: App, jet: Jet, settings: Settings) -> None:
    """Wait until all partitions are at one position without an owner."""

    async def rests() -> bool:
        async with working(app, settings):
            pass
        cursors = [(await cursors_of(jet).read(name)).cursor for name in PARTS]
        return len({cursor.position for cursor in cursors}) == 1 and not any(
            cursor.done or cursor.owner for cursor in cursors
        )

    await eventually(rests)


async def test_partitions_at_different_positions_are_divided_only_from_a_given_position(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    async with working(app, settings):
        await ring(jet, 1, 2)
        await until(lambda: all(town.order(bell) == [1, 2] for bell in BELLS))
    await wait_idle(app, jet, settings)
    assert jet.client is not None
    declared = declarations_of(app)
    behind = await cursor_at(jet.store, jet.client, declared[PARTS[1]], 5)
    await move_cursors(cursors_of(jet), jet.client, [declared[PARTS[1]]], behind, jet.store.at)
    new_app = app_of(town, partitions=2, name=app.name)
    async with new_app.connect(settings) as new_jet:
        assert new_jet.client is not None
        with pytest.raises(UsageError, match=r"into 2 and it has 4 cursors. They stand at 5, \d+, and"):
            await new_jet.init()
        parts = list(declarations_of(new_app).values())
        target = await cursor_at(new_jet.store, new_jet.client, parts[0], 5)
        positions = await position_range(cursors_of(new_jet), parts)
        assert positions is not None
        assert positions[0] == 5 < positions[1]
        with pytest.raises(UsageError, match="or put all of them somewhere"):
            await move_cursors(cursors_of(new_jet), new_jet.client, parts[:1], target, new_jet.store.at)
        assert await move_cursors(cursors_of(new_jet), new_jet.client, parts, target, new_jet.store.at) == []
        assert (await new_jet.init()).cursors == ()
        before = len(town.heard)
        async with working(new_app, settings):
            rung = [event for bell in BELLS for event in await jet.repository(Bell).history(bell)]
            after = sum(event.position > 5 for event in rung)
            await until(lambda: len({key for _, _, key, _ in town.heard[before:]}) == after)
    assert sorted(await counted(jet)) == sorted((bell, n) for bell in BELLS for n in (1, 2))


async def test_init_does_not_divide_a_reactor_while_a_worker_runs(
    app: App, jet: Jet, settings: Settings, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_app = app_of(town, partitions=2, name=app.name)
    async with working(app, settings), new_app.connect(settings) as new_jet:
        await wait_shares(jet, 4)
        with pytest.raises(UsageError, match="A worker is at it: stop those of the release before"):
            await new_jet.init()
    # A killed worker has left its name.
    monkeypatch.setattr(cursor_control, "_SILENT_S", 0.1)
    cursors = cursors_of(jet)
    stored = await cursors.read(PARTS[1])
    await cursors.write(stored, stored.cursor.taken("a dead process", 1))
    await cursor_control.pause(cursors, [PARTS[3]])
    async with new_app.connect(settings) as new_jet:
        await new_jet.init()
        assert {work_status.state for work_status in await status(new_app, settings)} == {"paused"}


async def test_a_worker_of_the_earlier_release_stands_by(app: App, jet: Jet, settings: Settings, town: Town) -> None:
    stored = await cursors_of(jet).read(PARTS[0])
    other_app = app_of(town, partitions=2, name=app.name)
    async with working(app, settings):
        await wait_shares(jet, 4)
        parts = list(declarations_of(other_app).values())
        await cursors_of(jet).divide(
            await cursors_of(jet).of("echo"),
            [stored.cursor.divided(part.name, 1, paused=False) for part in parts],
            (),
        )
        async with working(other_app, settings):
            await ring(jet, 1)
            await until(lambda: all(town.order(bell) == [1] for bell in BELLS))


async def test_a_worker_takes_every_partition_that_other_workers_may_not_take(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    """A worker of a single partition counts as a worker: another one takes more than its share."""
    stop = asyncio.Event()
    alone = asyncio.ensure_future(run_workers(app, settings, PARTS[:1], stop=stop, options=QUICK))
    others = asyncio.ensure_future(run_workers(app, settings, PARTS[1:], stop=stop, options=QUICK))
    await wait_shares(jet, 1, 3)
    await ring(jet, 1)
    await until(lambda: all(town.order(bell) == [1] for bell in BELLS))
    stop.set()
    await asyncio.gather(alone, others)


async def test_a_handler_is_not_cut_off_when_its_partition_is_handed_over(
    app: App, jet: Jet, settings: Settings, town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    town.gate.clear()
    async with working(app, settings):
        await wait_shares(jet, 4)
        await ring(jet, 1, 2)
        await until(lambda: town.begun == set(BELLS))
        async with working(app, settings):
            for _ in range(5):  # it has nothing to let go of before its handlers are done
                await asyncio.sleep(0.1)
                assert await shares(jet) == [4]
            town.gate.set()
            await wait_shares(jet, 2, 2)
            await until(lambda: all(town.order(bell) == [1, 2] for bell in BELLS))
    assert "cut off" not in caplog.text


async def test_the_cursors_of_a_concurrent_init_are_not_overwritten(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    """Between the read and the write of one `init`, another creates the cursors, and an event is recorded."""
    assert jet.client is not None
    cursors = cursors_of(jet)
    cursor = await cursor_at(jet.store, jet.client, declarations_of(app)[PARTS[0]], 0)
    with pytest.raises(CursorFenced):
        await cursors.divide((), [replace(cursor, name=name, position=1) for name in PARTS], ())
    assert [(await cursors.read(name)).cursor.position for name in PARTS] == [0, 0, 0, 0]


async def test_a_damaged_cursor_can_be_set_only_together_with_the_others(
    app: App, jet: Jet, settings: Settings, town: Town
) -> None:
    assert jet.client is not None
    await ring(jet, 1)
    await jet.client.request(f"$KV.{cursor_bucket(app.name)}.c.{PARTS[0]}", b"no cursor")
    cursors, parts = cursors_of(jet), list(declarations_of(app).values())
    target = await cursor_at(jet.store, jet.client, parts[0], 0)
    with pytest.raises(UsageError, match="are not there, or cannot be read"):
        await move_cursors(cursors, jet.client, parts[:1], target, jet.store.at)
    assert await move_cursors(cursors, jet.client, parts, target, jet.store.at) == []
    async with working(app, settings):
        await until(lambda: all(town.order(bell) == [1] for bell in BELLS))


async def test_partitions_are_paused_and_resumed_together_or_by_themselves(
    app: App, jet: Jet, settings: Settings
) -> None:
    cursors = cursors_of(jet)
    await cursor_control.pause(cursors, PARTS)
    await cursor_control.resume(cursors, PARTS[:1])
    assert [change.changed for change in await cursor_control.resume(cursors, PARTS)] == [False, True, True, True]
    with pytest.raises(UsageError, match="Nothing to resume"):
        await cursor_control.resume(cursors, PARTS)
