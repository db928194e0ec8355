"""The reader in JavaScript that the page on the wire format shows finds what is in a log without skipped records."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from eventjet import Metadata
from eventjet.log.skip_markers import record_skip_marker
from tests import javascript
from tests.clients.bells import BELLS, Bell, Town
from tests.docs.pages import blocks_of

PAGE = Path(__file__).parents[2] / "docs/reference/wire-format.md"
BOUND_S = 120.0

pytestmark = pytest.mark.slow


async def read(town: Town, folder: Path) -> tuple[int, list[dict[str, object]], str]:
    (source,) = [block.text for block in blocks_of(PAGE) if block.path == "reader.mjs"]
    (folder / "reader.mjs").write_text(source, encoding="utf-8")
    environ = {**os.environ, "EVENTJET_SERVERS": town.server}
    done = await asyncio.to_thread(
        javascript.run, ["reader.mjs", town.log], folder=folder, environ=environ, timeout_s=BOUND_S
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


async def test_the_reader_finds_every_event_as_it_is(town: Town, tmp_path: Path) -> None:
    await town.ring(9)
    bells = town.jet.repository(Bell)
    once = bells.command("wish 17 %", metadata=Metadata(actor="ann é", correlation="c/1"))
    await once.execute(BELLS[2], Bell.ring, 7)
    await town.jet.transact(bells.decide(BELLS[0], Bell.ring, 1), bells.decide(BELLS[1], Bell.ring, 2))
    status, found, said = await read(town, tmp_path)
    assert (status, said) == (0, "")
    expected = [one async for one in town.jet.tail()]
    assert len(expected) == 12
    assert [
        (
            one["position"],
            one["aggregate"],
            one["id"],
            one["version"],
            one["event_id"],
            one.get("command"),
            one.get("correlation"),
            one.get("actor"),
            one["data"],
        )
        for one in found
    ] == [
        (
            one.position,
            one.aggregate,
            one.aggregate_id,
            one.version,
            one.event_id,
            one.command_id,
            one.metadata.correlation,
            one.metadata.actor,
            {"times": one.data.times},
        )
        for one in expected
    ]
    assert {(one["type"], one["schema"]) for one in found} == {("bell.rung", 1)}
    for one, known in zip(found, expected, strict=True):
        apart = abs(datetime.fromisoformat(str(one["recorded_at"])) - known.recorded_at)
        assert apart < timedelta(milliseconds=2)


async def test_what_is_void_is_passed_over_and_what_is_strange_stops_it(town: Town, tmp_path: Path) -> None:
    await town.ring(3)
    assert town.jet.client is not None
    await town.jet.client.request(f"{town.log}.bell.hall", b"not an event")
    status, found, said = await read(town, tmp_path)
    assert status != 0
    assert "the chain is broken at position 4" in said
    assert len(found) == 3
    assert await record_skip_marker(town.jet.client, town.log, 4, "a stray message")
    await town.jet.skipped()
    await town.jet.repository(Bell).execute("hall", Bell.ring, 5)
    status, found, said = await read(town, tmp_path)
    assert (status, said) == (0, "")
    assert [(one["position"], one["version"]) for one in found] == [(1, 1), (2, 1), (3, 1), (6, 2)]
