"""The reader in JavaScript of the page on the wire format reads a log, and leaves out skipped records."""

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


async def test_the_reader_reads_every_event_correctly(town: Town, tmp_path: Path) -> None:
    await town.ring(9)
    bells = town.jet.repository(Bell)
    once = bells.command("wish 17 %", metadata=Metadata(actor="ann é", correlation="c/1"))
    await once.execute(BELLS[2], Bell.ring, 7)
    await town.jet.transact(bells.decide(BELLS[0], Bell.ring, 1), bells.decide(BELLS[1], Bell.ring, 2))
    status, events, errors = await read(town, tmp_path)
    assert (status, errors) == (0, "")
    expected = [event async for event in town.jet.tail()]
    assert len(expected) == 12
    assert [
        (
            row["position"],
            row["aggregate"],
            row["id"],
            row["version"],
            row["event_id"],
            row.get("command"),
            row.get("correlation"),
            row.get("actor"),
            row["data"],
        )
        for row in events
    ] == [
        (
            event.position,
            event.aggregate,
            event.aggregate_id,
            event.version,
            event.event_id,
            event.command_id,
            event.metadata.correlation,
            event.metadata.actor,
            {"times": event.data.times},
        )
        for event in expected
    ]
    assert {(row["type"], row["schema"]) for row in events} == {("bell.rung", 1)}
    for row, known in zip(events, expected, strict=True):
        apart = abs(datetime.fromisoformat(str(row["recorded_at"])) - known.recorded_at)
        assert apart < timedelta(milliseconds=2)


async def test_the_reader_passes_over_skipped_records_and_stops_at_unknown_ones(town: Town, tmp_path: Path) -> None:
    await town.ring(3)
    assert town.jet.client is not None
    await town.jet.client.request(f"{town.log}.bell.hall", b"not an event")
    status, events, errors = await read(town, tmp_path)
    assert status != 0
    assert "the chain is broken at position 4" in errors
    assert len(events) == 3
    assert await record_skip_marker(town.jet.client, town.log, 4, "a stray message")
    await town.jet.skipped()
    await town.jet.repository(Bell).execute("hall", Bell.ring, 5)
    status, events, errors = await read(town, tmp_path)
    assert (status, errors) == (0, "")
    assert [(row["position"], row["version"]) for row in events] == [(1, 1), (2, 1), (3, 1), (6, 2)]
