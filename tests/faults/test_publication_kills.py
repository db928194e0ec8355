"""Publications while workers are killed, and stopped and woken, and the server with them: once each, in order."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.jetstream.api import create_stream, stream_info
from eventjet.jetstream.client import Client
from eventjet.jetstream.reader import read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.faults.acting.bells import Bell
from tests.faults.acting.news import STREAM, town
from tests.faults.acting.trial import insist
from tests.faults.acting.troupe import Troupe

KILLS = int(os.environ.get("EVENTJET_TEST_KILLS", "10"))
EVENTS = min(20_000, int(os.environ.get("EVENTJET_TEST_EVENTS", "600")))
AGGREGATES = 20
SEED = int(os.environ.get("EVENTJET_TEST_SEED", "1"))
PATIENT_S = 900.0
POINTS = [
    f"{name}:{action}:{count}"
    for name, action, count in itertools.product(
        ("publication.before", "publication.stored", "cursor.before_write"), ("kill", "stop"), (1, 7)
    )
]


@pytest.mark.slow
@pytest.mark.timeout(300 + PATIENT_S)
async def test_messages_are_published_once_and_in_order(tmp_path: Path, report_lines: list[str]) -> None:
    chance, over = random.Random(SEED), asyncio.Event()
    with NatsServer() as server:
        settings = Settings(servers=(server.url,))
        async with town.connect(settings) as jet:
            client = jet.client
            assert client is not None
            # So short a window that the server drops no message for its id.
            config = {"name": STREAM, "subjects": [f"{STREAM}.>"], "allow_atomic": True}
            config["duplicate_window"] = 100_000_000
            await client.ask(create_stream(config))
            await jet.init()
            points = POINTS if KILLS >= 100 else POINTS[:3]
            with Troupe(server.url, tmp_path, 2, points, module="tests.faults.acting.news") as troupe:

                async def trouble() -> None:
                    for number in range(KILLS):
                        await asyncio.sleep(chance.uniform(0.2, 2))
                        await asyncio.to_thread(troupe.tend)
                        troupe.give_up_points(10.0)
                        if number % 2 or not troupe.left:
                            troupe.kill_worker(chance)
                        if number % 8 == 5:
                            await asyncio.to_thread(server.kill)
                            await asyncio.to_thread(server.start)
                    over.set()

                async def ring(bell: int) -> None:
                    rung = jet.repository(Bell)
                    for n in range(bell, EVENTS, AGGREGATES):
                        once = rung.command(f"ring-{n}")
                        await insist(lambda once=once, n=n: once.execute(f"b{bell}", Bell.ring, n))

                troubled = asyncio.ensure_future(trouble())
                await asyncio.gather(*(ring(bell) for bell in range(AGGREGATES)))
                await troubled
                recorded = [event async for event in jet.tail()]
                wanted = [(event.position, part) for event in recorded for part in range(1 + (event.data.n % 3 == 0))]
                deadline = asyncio.get_running_loop().time() + PATIENT_S
                while asyncio.get_running_loop().time() < deadline:
                    await asyncio.to_thread(troupe.tend)
                    count = await insist(lambda: messages(client, STREAM))
                    if count >= len(wanted):
                        break
                    await asyncio.sleep(0.2)
            pages = read_range(Endpoint.of(settings), STREAM, 1, count + 1)
            bodies = [json.loads(record[4]) for page in pages for record in page]
    sent = [(int(body["sequence"]), body["data"]["part"]) for body in bodies]
    report_lines.append(
        f"{len(recorded)} events, {len(sent)} messages, {troupe.killed + troupe.reached.total()} kills and stops: "
        f"{len(set(wanted) - set(sent))} missing, {len(sent) - len(set(sent))} twice, in order: {sent == sorted(sent)}"
    )
    assert len(recorded) == EVENTS
    assert sent == wanted


async def messages(client: Client, stream: str) -> int:
    """Return the number of messages in a stream."""
    return (await client.ask(stream_info(stream))).messages
