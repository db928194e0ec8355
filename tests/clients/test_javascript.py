"""The JavaScript client of NATS reads the log in every way it has, and publications as CloudEvents.

The part in node is `log.mjs`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import javascript
from tests.clients.bells import Town, fact_of, told_of

SCRIPT = Path(__file__).with_name("log.mjs")
BOUND_S = 120.0

pytestmark = pytest.mark.slow


class Reader:
    """The script in a folder of its own."""

    def __init__(self, town: Town, folder: Path) -> None:
        self._folder = folder
        self._environ = {**os.environ, "EVENTJET_SERVERS": town.server}
        shutil.copy(SCRIPT, folder)

    async def read(self, how: str, stream: str, subject: str, count: int | str = "all") -> list[dict[str, Any]]:
        """Return the messages that it printed."""
        done = await asyncio.to_thread(
            javascript.run,
            [SCRIPT.name, how, stream, subject, str(count)],
            folder=self._folder,
            environ=self._environ,
            timeout_s=BOUND_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def reader(town: Town, tmp_path: Path) -> Reader:
    return Reader(town, tmp_path)


def facts(messages: list[dict[str, Any]]) -> list[Any]:
    return [
        fact_of(message["position"], message["subject"], message["headers"], json.loads(message["body"]))
        for message in messages
    ]


async def test_a_durable_pull_consumer_continues_after_its_acknowledgements(town: Town, reader: Reader) -> None:
    await town.ring(20)
    first = facts(await reader.read("pull-durable", town.log, town.subject, 7))
    assert len(first) == 7
    await town.ring(5)
    rest = facts(await reader.read("pull-durable", town.log, town.subject))
    assert first + rest == await town.facts()


@pytest.mark.parametrize("how", ["pull-ephemeral", "pull-ordered", "push-durable", "push-ordered"])
async def test_every_other_consumer_reads_the_log_in_order_and_does_not_change_the_stream(
    town: Town, reader: Reader, how: str
) -> None:
    await town.ring(20)
    before = await town.config(town.log)
    assert facts(await reader.read(how, town.log, town.subject)) == await town.facts()
    assert await town.config(town.log) == before


async def test_a_durable_push_consumer_is_shared_by_a_queue_group(town: Town, reader: Reader) -> None:
    await town.ring(40)
    messages = await reader.read("push-group", town.log, town.subject)
    assert sorted(facts(messages)) == await town.facts()
    assert {message["by"] for message in messages} == {"one", "two"}


async def test_a_publication_is_read_as_cloud_events_in_order(town: Town, reader: Reader) -> None:
    await town.ring(12)
    await town.tell()
    first = await reader.read("pull-durable", town.public, town.public_subject, 5)
    await town.ring(12)
    await town.tell()
    messages = first + await reader.read("pull-durable", town.public, town.public_subject)
    assert [told_of(message["body"]) for message in messages] == await town.told()
    assert {message["headers"]["Content-Type"] for message in messages} == {"application/cloudevents+json"}
