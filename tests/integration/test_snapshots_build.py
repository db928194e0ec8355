"""All snapshots of an aggregate type are built from one pass over the log, and equal what a replay gives."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from eventjet import Jet, Settings
from eventjet.cli.main import main
from eventjet.codec.subjects import snapshot_bucket
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import encode_id
from eventjet.errors import Refused, Unreachable, UsageError
from eventjet.log.snapshots import VALUE_MAX, BulkSnapshots, Offer
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild import EngineName, SnapshotReport, build_snapshots
from eventjet.spark.session import Started
from tests.hostile_ids import hostile_ids
from tests.integration.snapshot_log import Scene, known

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AGGREGATES = int(os.environ.get("EVENTJET_TEST_SNAPSHOTS", "600"))
AT_ONCE = 64


@pytest.fixture
def scene(nats: NatsServer, tmp_path: Path) -> Scene:
    return Scene.of(Settings.load({"servers": nats.url}, {}), tmp_path)


@pytest.fixture
async def jet(scene: Scene) -> AsyncIterator[Jet]:
    async with scene.connect() as jet:
        await jet.init()
        yield jet


async def build(scene: Scene, engine: EngineName = "local", **options: Any) -> SnapshotReport:
    return await build_snapshots(scene.ref, "tally", scene.settings, engine=engine, **options)


def possible_ids(count: int) -> list[str]:
    """Return hostile ids that a log accepts."""
    ids: list[str] = []
    for aggregate_id in dict.fromkeys(hostile_ids(4 * count, seed=11)):
        try:
            encode_id(aggregate_id)
        except Refused:
            continue
        ids.append(aggregate_id)
    assert len(ids) >= count
    return ids[:count]


async def test_every_load_starts_at_a_snapshot_and_equals_a_replay(scene: Scene, jet: Jet, spark: Started) -> None:
    lengths = {aggregate_id: 1 + number % 7 for number, aggregate_id in enumerate(possible_ids(AGGREGATES))}
    await scene.fill(jet, lengths.items())
    scene.put("p", "plain.noted", 1, b"{}", aggregate="plain")
    due = sum(length >= 3 for length in lengths.values())
    first = await build(scene, "spark")
    assert (first.tally.written, first.tally.newer, first.tally.broken) == (due, 0, 0), first.tally.faults
    assert (first.tally.aggregates, first.tally.events) == (AGGREGATES, sum(lengths.values()))
    assert first.tally.few == AGGREGATES - due
    replays, room = scene.histories(jet), asyncio.Semaphore(AT_ONCE)

    async def compare(aggregate_id: str, length: int) -> None:
        async with room:
            replayed = await replays.load(aggregate_id, None)
            assert replayed.version == length
            assert known(await scene.snapshot(jet, aggregate_id)) == (known(replayed) if length >= 3 else None)
            assert await jet.repository(scene.module.Tally).load(aggregate_id) == replayed.state

    await asyncio.gather(*(compare(*item) for item in lengths.items()))
    # The other engine builds the same snapshots; with a lower minimum the short histories get one, too.
    second = await build(scene, "local")
    assert (second.tally.written, second.tally.newer, second.tally.few) == (0, due, AGGREGATES - due)
    lower = await build(scene, "local", min_events=1)
    assert (lower.tally.written, lower.tally.newer, lower.tally.few) == (AGGREGATES - due, due, 0)
    for aggregate_id in [name for name, length in lengths.items() if length < 3][:100]:
        assert known(await scene.snapshot(jet, aggregate_id)) == known(await replays.load(aggregate_id, None))


async def test_a_build_during_commands_replaces_no_snapshot_by_an_older_one(scene: Scene, jet: Jet) -> None:
    ids = [f"a-{number}" for number in range(150)]
    await scene.fill(jet, [(aggregate_id, 5) for aggregate_id in ids])
    versions: dict[str, int] = {}
    async with scene.connect() as live:
        building = asyncio.create_task(build(scene))
        tallies = live.repository(scene.module.Tally)
        while not (building.done() and versions):
            for aggregate_id in ids:
                result = await tallies.execute(aggregate_id, scene.module.Tally.add, 1)
                if result.version % 3 == 0:
                    versions[aggregate_id] = result.version
                if building.done() and versions:
                    break
    report = await building
    assert report.tally.broken == 0
    assert report.tally.written + report.tally.newer == len(ids)
    replays = scene.histories(jet)
    for aggregate_id in ids:
        snapshot = await scene.snapshot(jet, aggregate_id)
        assert snapshot is not None
        assert snapshot.version >= versions.get(aggregate_id, 5)
        assert (
            await jet.repository(scene.module.Tally).load(aggregate_id)
            == (await replays.load(aggregate_id, None)).state
        )
        assert known(snapshot) == known(
            await replays.load_until(aggregate_id, version=snapshot.version, position=None, at=None)
        )


@pytest.mark.parametrize("engine", ["local", "spark"])
async def test_states_without_a_snapshot_are_counted_and_a_broken_history_is_named(
    scene: Scene, jet: Jet, spark: Started, engine: EngineName
) -> None:
    await scene.fill(jet, [("good", 4), ("few", 2), ("unkept", 3), ("gap", 3), ("odd", 3), ("thirteen", 3)])
    scene.put("unkept", "tally.spoiled", 4, b"{}")
    scene.put("gap", "tally.added", 5, b'{"n": 1}')
    scene.put("odd", "tally.unheard_of", 4, b"{}")
    scene.put("thirteen", "tally.added", 4, b'{"n": 13}')
    for version in (1, 2, 3):
        scene.put("huge", "tally.added", version, orjson.dumps({"n": 1, "note": "x" * (VALUE_MAX // 3)}))
    tally = (await build(scene, engine)).tally
    counts = (tally.aggregates, tally.written, tally.few, tally.unkept, tally.too_large, tally.broken)
    assert counts == (7, 2, 1, 1, 0, 3)
    faults = "\n".join(sorted(tally.faults))
    assert f"The history of {scene.name}.tally.gap is broken at position" in faults
    assert "version 5 follows version 3" in faults
    assert "'tally.unheard_of' schema 1" in faults
    assert f"Folding {scene.name}.tally.thirteen: Tally.evolve raised RuntimeError for " in faults
    snapshots = [await scene.snapshot(jet, aggregate_id) for aggregate_id in ("good", "huge", "gap", "odd")]
    assert [snapshot and snapshot.version for snapshot in snapshots] == [4, 3, None, None]


async def test_snapshots_of_another_revision_are_replaced(scene: Scene, jet: Jet) -> None:
    await scene.fill(jet, [("a", 4), ("b", 4)])
    assert (await build(scene)).tally.written == 2
    newer = Scene.of(scene.settings, scene.folder, scene.name, revision=2)
    report = await build(newer)
    assert (report.tally.written, report.tally.newer) == (2, 0)
    assert await scene.snapshot(jet, "a") is None
    assert known(await newer.snapshot(jet, "a")) == known(await newer.histories(jet).load("a", None))


async def test_only_a_snapshot_of_the_same_history_is_kept(scene: Scene, jet: Jet) -> None:
    await scene.fill(jet, [(aggregate_id, 4) for aggregate_id in ("same", "rubbish", "beyond", "stranger", "gone")])
    last = (await jet.log()).last
    replayed = {
        aggregate_id: await scene.histories(jet).load(aggregate_id, None)
        for aggregate_id in ("same", "rubbish", "beyond", "stranger")
    }
    bucket = scene.bucket(jet)

    async def store_changed(aggregate_id: str, **changed: Any) -> None:
        value = scene.codec.encode(replayed[aggregate_id])
        assert value is not None
        inner = {**orjson.loads(value)["snapshot"], **changed}
        from eventjet.codec.states import digest

        body = orjson.dumps(inner)
        await bucket.put("tally", aggregate_id, orjson.dumps({"checksum": digest(body), "snapshot": inner}))

    await store_changed("same")
    await bucket.put("tally", "rubbish", b"\xff")
    await store_changed("beyond", position=last + 1_000)
    await store_changed("stranger", event_id="another past")
    await bucket.put("tally", "gone", b"x")
    assert jet.client is not None
    purge = {"filter": f"$KV.{snapshot_bucket(scene.name)}.tally.gone"}
    await jet.client.api(f"STREAM.PURGE.KV_{snapshot_bucket(scene.name)}", purge)
    report = await build(scene)
    assert (report.tally.written, report.tally.newer) == (4, 1)
    for aggregate_id, aggregate in replayed.items():
        assert known(await scene.snapshot(jet, aggregate_id)) == known(aggregate)


async def test_a_concurrent_newer_snapshot_is_not_replaced(scene: Scene, jet: Jet) -> None:
    await scene.fill(jet, [("a", 3)])
    old = await scene.histories(jet).load("a", None)
    await jet.repository(scene.module.Tally).execute("a", scene.module.Tally.add, 1)
    new = await scene.histories(jet).load("a", None)
    values = {aggregate.position: scene.codec.encode(aggregate) for aggregate in (old, new)}
    assert None not in values.values()
    await scene.bucket(jet).put("tally", "a", b"first")
    loop = asyncio.get_running_loop()

    def write_meanwhile(value: bytes) -> Any:
        if value == b"first":
            meanwhile = scene.bucket(jet).put("tally", "a", values[new.position] or b"")
            asyncio.run_coroutine_threadsafe(meanwhile, loop).result(10)
        return scene.codec.decode(value)

    endpoint = Endpoint.of(scene.settings)
    with BulkSnapshots(endpoint, scene.name, snapshot_bucket(scene.name), old.position, write_meanwhile) as bulk:
        offer = Offer("tally.a", old.position, old.event_id, values[old.position] or b"")
        await asyncio.to_thread(bulk.put, [offer])
        assert (bulk.written, bulk.newer) == (0, 1)
    assert known(await scene.snapshot(jet, "a")) == known(new)


async def test_a_build_that_is_not_possible_is_refused_at_once(
    scene: Scene, jet: Jet, nats: NatsServer, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="keeps no snapshots"):
        await build_snapshots(scene.ref, "plain", scene.settings, engine="local")
    unreachable = replace(scene.settings, servers=("nats://127.0.0.1:1",))
    with pytest.raises(UsageError, match="It has plain, tally"):
        await build_snapshots(scene.ref, "nothing", unreachable, engine="local")
    with pytest.raises(UsageError, match="min_events is 0"):
        await build(scene, min_events=0)
    assert (await build(scene)).tally.aggregates == 0
    with pytest.raises(Unreachable, match="eventjet init"):
        await build(Scene.of(scene.settings, tmp_path))


def test_the_command_reports_and_fails_when_a_history_is_broken(
    nats: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene.of(Settings.load({"servers": nats.url}, {}), tmp_path)

    async def fill(version: int) -> None:
        async with scene.connect() as jet:
            await jet.init()
            await scene.fill(jet, [("a", 4), ("b", 1)])
            if version:
                scene.put("a", "tally.added", version, b'{"n": 1}')

    monkeypatch.setenv("EVENTJET_SERVERS", nats.url)
    command = ["snapshots", "build", "tally", "--engine", "local", "--app", f"{scene.ref.module}:app"]
    command += ["--app-dir", str(tmp_path)]
    asyncio.run(fill(0))
    assert main([*command, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["written"], output["few"], output["min_events"], output["engine"]) == (1, 1, 3, "local")
    asyncio.run(fill(6))
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "0 snapshots written from 6 events of 2 aggregates, at position 6" in " ".join(out.split())
    assert f"The history of {scene.name}.tally.a is broken" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert main([*command[:2], "plain", *command[3:]]) == 2
    assert "keeps no snapshots" in " ".join(capsys.readouterr().err.split())
