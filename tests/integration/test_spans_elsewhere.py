"""Spans of what is no command: phases of a rebuild, and snapshots."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from eventjet import Settings
from eventjet.dev.nats import NatsServer
from eventjet.errors import HandlerFailed
from eventjet.observability import spans
from eventjet.rebuild import rebuild
from tests.integration.rebuild_log import Book
from tests.integration.snapshot_log import Scene
from tests.traced import ids, of, traced

SECRET = "of the handler"
PHASES = {"start", "read", "load", "index", "catch up", "swap"}


async def test_the_phases_of_a_rebuild_are_beneath_one_span_one_after_the_other(book: Book) -> None:
    book.fill(300)
    with traced() as (exporter, _, _):
        report = await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert report.events == 300
    (whole,) = [one for one in exporter.get_finished_spans() if one.name == spans.REBUILD.name]
    phases = of(exporter, spans.PHASE)
    assert {(one.attributes or {})["eventjet.phase"] for one in phases} == PHASES
    assert all(one.name == f"{spans.PHASE.name} {(one.attributes or {})['eventjet.phase']}" for one in phases)
    assert {(ids(one)[0], one.parent.span_id if one.parent else 0) for one in phases} == {ids(whole)}
    times = sorted((one.start_time or 0, one.end_time or 0) for one in phases)
    assert all(start <= end for start, end in times)
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    assert (whole.start_time or 0) <= times[0][0] <= times[-1][1] <= (whole.end_time or 0)


async def test_a_rebuild_that_fails_says_in_which_phase_and_by_which_error(book: Book) -> None:
    book.fill(50)
    broken = book.altered(
        (
            "    match event.data:\n        case Opened",
            f"    raise OSError({SECRET!r})\n    match event.data:\n        case Opened",
        )
    )
    with traced() as (exporter, _, _), pytest.raises(HandlerFailed):
        await rebuild(broken, ["balances"], book.settings, engine="local")
    failed = [one for one in of(exporter, spans.PHASE) if not one.status.is_ok]
    assert [(one.attributes or {})[spans.ERROR] for one in failed] == ["HandlerFailed"]
    assert not [one for one in exporter.get_finished_spans() if SECRET in one.to_json()]


async def test_a_snapshot_has_a_span_of_its_own_in_no_commands_trace(nats: NatsServer, tmp_path: Path) -> None:
    scene = Scene.of(Settings(servers=(nats.url,)), tmp_path)
    tally = scene.module.Tally
    with traced() as (exporter, _, _):
        async with scene.connect() as jet:
            await jet.init()
            for n in range(20):
                await jet.repository(tally).execute("t-1", tally.add, 1 + n % 3)
    written = of(exporter, spans.SNAPSHOT)
    assert written
    assert {(one.attributes or {})["eventjet.aggregate"] for one in written} == {"tally"}
    commands = {ids(one)[0] for one in exporter.get_finished_spans() if one.name == "tally.add"}
    assert len(commands) == 20
    assert not commands & {ids(one)[0] for one in written}
    assert all(one.parent is None for one in written)
