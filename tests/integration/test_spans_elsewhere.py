"""Spans of rebuild phases and of snapshots."""

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


async def test_the_phases_of_a_rebuild_are_consecutive_children_of_its_span(book: Book) -> None:
    book.fill(300)
    with traced() as (exporter, _, _):
        report = await rebuild(book.ref, ["balances"], book.settings, engine="local")
    assert report.events == 300
    (rebuild_span,) = [span for span in exporter.get_finished_spans() if span.name == spans.REBUILD.name]
    phases = of(exporter, spans.PHASE)
    assert {(span.attributes or {})["eventjet.phase"] for span in phases} == PHASES
    assert all(span.name == f"{spans.PHASE.name} {(span.attributes or {})['eventjet.phase']}" for span in phases)
    assert {(ids(span)[0], span.parent.span_id if span.parent else 0) for span in phases} == {ids(rebuild_span)}
    times = sorted((span.start_time or 0, span.end_time or 0) for span in phases)
    assert all(start <= end for start, end in times)
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    assert (rebuild_span.start_time or 0) <= times[0][0] <= times[-1][1] <= (rebuild_span.end_time or 0)


async def test_a_failed_rebuild_has_its_phase_and_error_type(book: Book) -> None:
    book.fill(50)
    broken = book.altered(
        (
            "    match event.data:\n        case Opened",
            f"    raise OSError({SECRET!r})\n    match event.data:\n        case Opened",
        )
    )
    with traced() as (exporter, _, _), pytest.raises(HandlerFailed):
        await rebuild(broken, ["balances"], book.settings, engine="local")
    failed_phases = [span for span in of(exporter, spans.PHASE) if not span.status.is_ok]
    assert [(span.attributes or {})[spans.ERROR] for span in failed_phases] == ["HandlerFailed"]
    assert not [span for span in exporter.get_finished_spans() if SECRET in span.to_json()]


async def test_a_snapshot_has_its_own_span_outside_the_traces_of_commands(nats: NatsServer, tmp_path: Path) -> None:
    scene = Scene.of(Settings(servers=(nats.url,)), tmp_path)
    tally = scene.module.Tally
    with traced() as (exporter, _, _):
        async with scene.connect() as jet:
            await jet.init()
            for n in range(20):
                await jet.repository(tally).execute("t-1", tally.add, 1 + n % 3)
    snapshots = of(exporter, spans.SNAPSHOT)
    assert snapshots
    assert {(span.attributes or {})["eventjet.aggregate"] for span in snapshots} == {"tally"}
    commands = {ids(span)[0] for span in exporter.get_finished_spans() if span.name == "tally.add"}
    assert len(commands) == 20
    assert not commands & {ids(span)[0] for span in snapshots}
    assert all(span.parent is None for span in snapshots)
