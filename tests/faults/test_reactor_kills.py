"""Reactors and deadlines while workers and the server are killed: every effect, in order; each deadline once."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.faults.acting.bells import Bell, Counted, Egg, Tower, bells, bells_of
from tests.faults.acting.trial import insist
from tests.faults.acting.troupe import Troupe

KILLS = int(os.environ.get("EVENTJET_TEST_KILLS", "10"))
EVENTS = min(20_000, int(os.environ.get("EVENTJET_TEST_EVENTS", "600")))
DEADLINES = min(10_000, int(os.environ.get("EVENTJET_TEST_EVENTS", "150")))
AGGREGATES = 20
WORKERS = 2
SEED = int(os.environ.get("EVENTJET_TEST_SEED", "1"))
AT_ONCE = 32
PATIENT_S = 900.0
MODULE = "tests.faults.acting.bells"


async def killed(troupe: Troupe, server: NatsServer, times: int, over: asyncio.Event) -> None:
    """Kill workers, and now and then the server with them."""
    chance = random.Random(SEED)
    for number in range(times):
        if over.is_set():
            return
        await asyncio.sleep(chance.uniform(0.3, 3))
        await asyncio.to_thread(troupe.tend)
        troupe.kill_worker(chance)
        if number % 5 == 2:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(chance.random())
            await asyncio.to_thread(server.start)


async def tended(troupe: Troupe, over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.to_thread(troupe.tend)
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300 + PATIENT_S)
@pytest.mark.parametrize("partitions", [1, 4])
async def test_every_effect_happens_in_order_under_one_key_with_one_command(
    partitions: int, tmp_path: Path, report_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With partitions, they move to the other worker with each kill, and back with its successor."""
    monkeypatch.setenv("BELLS_PARTITIONS", str(partitions))
    over = asyncio.Event()
    with NatsServer() as server:
        async with bells_of(partitions).connect(Settings(servers=(server.url,))) as jet:
            await jet.init()
            with Troupe(server.url, tmp_path, WORKERS, module=MODULE) as troupe:
                trouble = asyncio.ensure_future(killed(troupe, server, KILLS, over))
                tending = asyncio.ensure_future(tended(troupe, over))

                async def ring(bell: int) -> None:
                    rung = jet.repository(Bell)
                    for n in range(bell, EVENTS, AGGREGATES):
                        once = rung.command(f"ring-{n}")
                        await insist(lambda once=once, n=n: once.execute(f"b{bell}", Bell.ring, n))

                await asyncio.gather(*(ring(bell) for bell in range(AGGREGATES)))
                await trouble
                deadline = asyncio.get_running_loop().time() + PATIENT_S
                towers = [f"b{bell}" for bell in range(AGGREGATES)]
                while True:
                    states = [await insist(lambda tower=tower: jet.repository(Tower).load(tower)) for tower in towers]
                    counted = [state.counted for state in states]
                    if sum(counted) >= EVENTS or asyncio.get_running_loop().time() > deadline:
                        break
                    await asyncio.sleep(0.2)
                over.set()
                await tending
            recorded = {tower: [event.data for event in await jet.repository(Tower).history(tower)] for tower in towers}
    keys: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    first: defaultdict[str, list[int]] = defaultdict(list)
    for line in troupe.outside.read_text().splitlines():
        bell, n, key = line.split()
        if not keys[bell, int(n)]:
            first[bell].append(int(n))
        keys[bell, int(n)][key] += 1
    calls = sum(count.total() for count in keys.values())
    report_lines.append(
        f"{EVENTS} events of {AGGREGATES} aggregates in {partitions} partitions, {troupe.killed} killed: "
        f"{len(keys)} effects in {calls} calls, "
        f"{sum(len(count) > 1 for count in keys.values())} under two keys; {sum(counted)} commands recorded"
    )
    assert len(keys) == EVENTS
    assert all(len(count) == 1 for count in keys.values())
    assert all(numbers == sorted(numbers) for numbers in first.values())
    wanted = {f"b{bell}": [Counted(n=n) for n in range(bell, EVENTS, AGGREGATES)] for bell in range(AGGREGATES)}
    assert recorded == wanted


@pytest.mark.slow
@pytest.mark.timeout(300 + PATIENT_S)
async def test_every_deadline_is_decided_once_and_never_early(tmp_path: Path, report_lines: list[str]) -> None:
    over, chance = asyncio.Event(), random.Random(SEED)
    within_s = max(15.0, DEADLINES / 100)
    with NatsServer() as server:
        async with bells.connect(Settings(servers=(server.url,))) as jet:
            await jet.init()
            eggs, room = jet.repository(Egg), asyncio.Semaphore(AT_ONCE)
            names = [f"e{number}" for number in range(DEADLINES)]
            with Troupe(server.url, tmp_path, WORKERS, module=MODULE) as troupe:
                trouble = asyncio.ensure_future(killed(troupe, server, KILLS, over))
                tending = asyncio.ensure_future(tended(troupe, over))

                async def lay(name: str) -> None:
                    async with room:
                        until = datetime.now(UTC) + timedelta(seconds=chance.uniform(1, within_s))
                        await insist(lambda: eggs.execute(name, Egg.lay, until))

                await asyncio.gather(*map(lay, names))
                await trouble
                end = asyncio.get_running_loop().time() + PATIENT_S
                undecided = names
                while undecided and asyncio.get_running_loop().time() < end:
                    undecided = [
                        name for name in undecided if not (await insist(lambda name=name: eggs.load(name))).taken
                    ]
                    await asyncio.sleep(0.2)
                over.set()
                await tending
            late: list[float] = []
            counts: Counter[int] = Counter()
            for name in names:
                laid, *decided = await eggs.history(name)
                counts[len(decided)] += 1
                late += [(decision.recorded_at - laid.data.until).total_seconds() for decision in decided]  # type: ignore[union-attr]
    late.sort()
    report_lines.append(
        f"{DEADLINES} deadlines, {troupe.killed} killed: decided {dict(counts)}, {sum(s < 0 for s in late)} early; "
        f"late {late[len(late) // 2]:.2f} s in the middle, {late[-1]:.2f} s at most"
    )
    assert counts == {1: DEADLINES}
    assert late[0] >= 0
