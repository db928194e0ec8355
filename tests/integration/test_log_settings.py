"""Every stream setting is compared or listed as indifferent, and errors name a setting that was changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from eventjet import App, aggregate, event
from eventjet.codec.subjects import snapshot_bucket
from eventjet.dev.nats import NatsServer
from eventjet.doctor.report import Report
from eventjet.doctor.streams import check_stream
from eventjet.domain.history import FoldedState
from eventjet.errors import LogDrifted, LogUnusable, Refused, StoreError, Unreachable
from eventjet.jet import Jet
from eventjet.jetstream.api import StreamState, create_stream, stream_info
from eventjet.jetstream.client import Client, connect
from eventjet.log.integrity import check_running
from eventjet.log.public_stream import PublicStream, check_public_stream
from eventjet.log.snapshots import BulkSnapshots, Offer
from eventjet.log.timers import JetStreamTimers
from eventjet.log.topology import (
    INDIFFERENT,
    SETTINGS,
    compare,
    every_config,
    stream_config,
    unknown_settings,
)
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.subscriptions.cursor_store import Cursors
from tests.logs import fresh_name

SAVE_S = 3.0
BOUND_S = 60.0


@event("tally.added")
class Added:
    n: int


@aggregate("tally")
class Tally:
    total: int = 0

    def add(self, n: int) -> Added:
        return Added(n=n)

    def add_twice(self, n: int) -> list[Added]:
        return [Added(n=n), Added(n=n)]

    def evolve(self, event: Added) -> Tally:
        return replace(self, total=self.total + event.n)


@pytest.fixture
async def client(eventjet_nats: NatsServer) -> AsyncIterator[Client]:
    client = await connect(Settings(servers=(eventjet_nats.url,)))
    yield client
    await client.close()


async def edit(client: Client, stream: str, change: Mapping[str, Any]) -> None:
    config = (await client.ask(stream_info(stream))).config
    await client.api(f"STREAM.UPDATE.{stream}", {**config, **change})


# Comparison of settings.


async def test_every_setting_of_a_stream_is_compared_or_listed_as_indifferent(
    client: Client,
) -> None:
    """A setting of a newer server fails here: classify it in `topology`."""
    name = fresh_name()
    for config in every_config(name, 1):
        created = await client.ask(create_stream(config))
        assert compare(config, created.config) == []
        assert unknown_settings(created) == []
        assert {*created.config, *config} <= SETTINGS.keys() | INDIFFERENT
    assert SETTINGS.keys().isdisjoint(INDIFFERENT)


CHANGED: dict[str, Any] = {
    "no_ack": True,
    "mirror": {"name": "other"},
    "sources": [{"name": "other"}],
    "subject_transform": {"src": "a", "dest": "b"},
    "republish": {"src": ">", "dest": "copy.>"},
    "discard_new_per_subject": True,
    "sealed": True,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": True,
    "allow_msg_ttl": True,
    "subject_delete_marker_ttl": 1_000_000_000,
    "allow_msg_counter": True,
    "allow_msg_schedules": True,
    "allow_atomic": False,
    "allow_batched": True,
    "persist_mode": "async",
    "consumer_limits": {"max_ack_pending": 1},
    "template_owner": "another",
    "subjects": ["x.tally.*"],
    "storage": "memory",
    "retention": "interest",
    "discard": "old",
    "max_consumers": 1,
    "max_msgs": 1,
    "max_bytes": 1,
    "max_age": 1,
    "max_msgs_per_subject": 1,
    "max_msg_size": 100,
    "duplicate_window": 1,
    "allow_direct": False,
    "num_replicas": 3,
}


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_each_changed_setting_is_a_drift_with_its_cost(setting: str) -> None:
    declared = stream_config("x", 1)
    assert declared.get(setting, SETTINGS[setting].unset) != CHANGED[setting]
    (drift,) = compare(declared, {**declared, setting: CHANGED[setting]})
    assert (drift.setting, drift.actual, drift.cost) == (setting, CHANGED[setting], SETTINGS[setting].cost)


def test_doctor_reports_an_unknown_setting() -> None:
    app = App("x", aggregates=[Tally])
    declared = stream_config("x", 1)
    state = StreamState("x", 1, 0, 0, 0, 0, 0, {"eventjet.log": "a"}, {**declared, "allow_forgetting": True})
    report = Report("streams")
    check_stream(report, app, declared, state)
    assert any("allow_forgetting is True" in finding.what for finding in report.findings)


# Changes while a process is connected.


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Tally])


@pytest.fixture
async def jet(app: App, eventjet_nats: NatsServer) -> AsyncIterator[Jet]:
    """Yield a connection to a log with an event of the aggregate `old`."""
    async with app.connect(servers=eventjet_nats.url, save_timeout_s=SAVE_S) as jet:
        await jet.init()
        await jet.repository(Tally).execute("old", Tally.add, 1)
        yield jet


def changes(name: str) -> dict[str, Mapping[str, Any]]:
    transform = {"src": f"{name}.tally.*", "dest": f"{name}.count.{{{{wildcard(1)}}}}"}
    return {
        "subject_transform": {"subject_transform": transform},
        "no_ack": {"no_ack": True},
        "subjects": {"subjects": [f"{name}.other.*"]},
        "retention": {"retention": "interest"},
        "max_age": {"max_age": 10**15},
        "max_msgs": {"max_msgs": 10_000, "discard": "old"},
        "max_bytes": {"max_bytes": 10_000_000, "discard": "old"},
        "max_msgs_per_subject": {"max_msgs_per_subject": 10_000},
        "allow_atomic": {"allow_atomic": False},
        "max_msg_size": {"max_msg_size": 100},
        "sealed": {"sealed": True},
    }


@pytest.mark.parametrize("setting", changes(""))
async def test_a_command_on_a_log_with_a_changed_setting_fails_and_names_it(
    setting: str, app: App, jet: Jet, client: Client
) -> None:
    await edit(client, app.name, changes(app.name)[setting])
    tallies = jet.repository(Tally)
    async with asyncio.timeout(BOUND_S):
        while True:  # until the change is noticed, a save may still be recorded
            try:
                await tallies.execute("old", Tally.add_twice, 1)
            except StoreError as error:
                message = str(error)
                break
    assert setting in message


@pytest.mark.parametrize("limit", ["max_msgs", "max_bytes", "max_msgs_per_subject"])
async def test_a_limit_that_only_refuses_new_events_is_allowed_until_it_is_reached(
    limit: str, app: App, jet: Jet, client: Client, eventjet_nats: NatsServer
) -> None:
    refusing = {limit: 10_000_000, "discard_new_per_subject": limit == "max_msgs_per_subject"}
    await edit(client, app.name, refusing)
    async with app.connect(servers=eventjet_nats.url) as other:
        assert limit in {drift.setting for drift in (await other.init()).drifts}
        assert (await other.repository(Tally).execute("old", Tally.add, 1)).state.total == 2


async def test_an_unnoticed_transform_is_not_reported_as_a_conflict(app: App, jet: Jet, client: Client) -> None:
    """A process that may not hear of the change reads the stream's settings after the refusal."""
    tallies = jet.repository(Tally)
    await edit(client, app.name, changes(app.name)["subject_transform"])
    known = jet.store.stream  # pyright: ignore[reportAttributeAccessIssue]
    async with asyncio.timeout(BOUND_S):
        while not known._drifts:
            await known.look()
    known._drifts, known._state = (), replace(known._state, config=stream_config(app.name, 1))
    known._looked_at = time.monotonic()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(LogDrifted, match="subject_transform") as caught:
            await tallies.execute("old", Tally.add, 1)
    assert list(caught.value.settings) == ["subject_transform"]


async def test_a_read_of_a_log_without_direct_gets_names_the_setting_at_once(
    app: App, client: Client, eventjet_nats: NatsServer
) -> None:
    async with app.connect(servers=eventjet_nats.url, save_timeout_s=10 * BOUND_S) as jet:
        await jet.init()
        await edit(client, app.name, {"allow_direct": False})
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(LogDrifted, match="allow_direct"):
                await jet.repository(Tally).load("any")


async def test_init_names_settings_that_were_changed_before_it_connected(
    app: App, jet: Jet, client: Client, eventjet_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    await edit(client, app.name, {**changes(app.name)["subject_transform"], "max_age": 10**15})
    with caplog.at_level(logging.WARNING):
        async with app.connect(servers=eventjet_nats.url) as other:
            drifts = (await other.init()).drifts
            with pytest.raises(LogDrifted, match="another subject"):
                await other.repository(Tally).execute("new", Tally.add, 1)
    assert {drift.setting for drift in drifts} == {"subject_transform", "max_age"}
    assert "subject_transform is" in caplog.text
    assert "max_age is" in caplog.text


async def test_a_repair_removes_settings_that_eventjet_never_sets(
    app: App, jet: Jet, eventjet_nats: NatsServer, client: Client
) -> None:
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.log.integrity import repair

    await edit(client, app.name, {**changes(app.name)["subject_transform"], "no_ack": True, "description": "ours"})
    identity = (await jet.init()).identity
    with NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection:
        healed = await asyncio.to_thread(repair, connection, app.name, 1, identity, accept_loss=False)
    assert len(healed) == 2
    assert (await jet.init()).drifts == ()
    assert (await client.ask(stream_info(app.name))).config["description"] == "ours"
    assert (await jet.repository(Tally).execute("old", Tally.add, 1)).state.total == 2


async def test_errors_of_a_sealed_log_point_to_the_promoted_mirror(
    app: App, jet: Jet, eventjet_nats: NatsServer, client: Client
) -> None:
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.log.integrity import repair

    identity = (await jet.init()).identity
    await edit(client, app.name, {"sealed": True})
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(Refused, match="set EVENTJET_SERVERS to the mirror's servers") as caught:
            await jet.repository(Tally).execute("old", Tally.add, 1)
    assert "--repair" not in str(caught.value)
    with (
        NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection,
        pytest.raises(Unreachable, match="set EVENTJET_SERVERS to the mirror's servers"),
    ):
        await asyncio.to_thread(repair, connection, app.name, 1, identity, accept_loss=False)


async def test_a_worker_stops_on_a_log_that_stores_events_elsewhere(app: App, jet: Jet, client: Client) -> None:
    from eventjet.subscriptions.cursor import Cursor

    log = (await jet.log()).identity
    stand = Cursor("any", "reactor", log)
    await check_running(client, app.name, stand, log)
    await edit(client, app.name, changes(app.name)["subject_transform"])
    with pytest.raises(LogDrifted, match="subject_transform"):
        await check_running(client, app.name, stand, log)


async def test_cursors_timers_and_snapshots_name_the_setting_of_their_stream(
    client: Client, eventjet_nats: NatsServer
) -> None:
    from datetime import UTC, datetime

    name = fresh_name()
    for config in every_config(name, 1):
        await client.ask(create_stream(config))
        if config["name"] != name:
            await edit(client, str(config["name"]), {"max_msg_size": 10, "allow_direct": False})
    with pytest.raises(LogDrifted, match="max_msg_size is 10"):
        await Cursors(client, name).beat("sums", "me", 1, 5.0)
    with pytest.raises(LogDrifted, match="max_msg_size is 10"):
        await JetStreamTimers(client, name).set("transfer", "t-1", 1, datetime.now(UTC))

    def nothing(_: bytes) -> FoldedState[Any] | None:
        return None

    endpoint = Endpoint((eventjet_nats.url,))
    snapshots = BulkSnapshots(endpoint, name, snapshot_bucket(name), 1, nothing)
    with snapshots, pytest.raises(LogDrifted, match="allow_direct is False"):
        await asyncio.to_thread(snapshots.put, [Offer("tally.old", 1, "id", b"{}")])


async def test_sealed_cursors_and_timers_name_the_promoted_mirror_and_no_repair(client: Client) -> None:
    from datetime import UTC, datetime

    name = fresh_name()
    for config in every_config(name, 1):
        await client.ask(create_stream(config))
        await edit(client, str(config["name"]), {"sealed": True})
    with pytest.raises(LogDrifted, match="set EVENTJET_SERVERS to the mirror's servers") as of_cursors:
        await Cursors(client, name).beat("sums", "me", 1, 5.0)
    with pytest.raises(LogDrifted, match="set EVENTJET_SERVERS to the mirror's servers") as of_timers:
        await JetStreamTimers(client, name).set("transfer", "t-1", 1, datetime.now(UTC))
    assert "--repair" not in f"{of_cursors.value}{of_timers.value}"


# Streams of publications.


@event("tally.heard")
class Heard:
    n: int


@pytest.mark.parametrize("setting", ["subject_transform", "no_ack", "sealed"])
async def test_a_stream_that_may_lose_messages_of_a_publication_is_refused(setting: str, client: Client) -> None:
    name = fresh_name("town")
    config = {"name": name, "subjects": [f"{name}.tallies.>"], "allow_atomic": True}
    await client.ask(create_stream(config))
    await check_public_stream(client, name, "tallies")
    transform = {"src": f"{name}.*.x", "dest": f"{name}.tallies.y.{{{{wildcard(1)}}}}"}
    await edit(client, name, {"subject_transform": transform} if setting == "subject_transform" else {setting: True})
    with pytest.raises(LogUnusable, match=setting):
        await check_public_stream(client, name, "tallies")


async def test_a_publication_names_a_setting_that_was_changed_while_it_publishes(client: Client) -> None:
    from eventjet.codec.cloud_events import PublicMessage

    name = fresh_name("town")
    await client.ask(create_stream({"name": name, "subjects": [f"{name}.tallies.>"], "allow_atomic": True}))
    public = PublicStream(client, name, "tallies")
    assert await public.published_until() == 0
    await edit(client, name, {"sealed": True})
    with pytest.raises(LogUnusable, match="sealed is set on it"):
        await public.publish([PublicMessage(f"{name}.tallies.a", (("Nats-Msg-Id", "1"),), b"{}")], 1)
