"""Any subscriber may answer a published message. Only the acknowledgement of the intended stream counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import pytest

from eventjet import App, Imported, Jet
from eventjet.archive.republish import Restore
from eventjet.codec.cloud_events import PublicMessage
from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import cursor_bucket, snapshot_bucket, stream_subjects, timer_stream
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.doctor.examine import examine
from eventjet.doctor.report import Installation
from eventjet.errors import LogUnusable, NotUnique, OutcomeUnknown, Refused, StoreUnavailable, Unreachable
from eventjet.jetstream.api import create_stream, stream_info, update_stream
from eventjet.jetstream.client import Client, connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.public_stream import PublicStream
from eventjet.log.skip_markers import record_skip_marker
from eventjet.log.snapshots import Bucket, KeyValueSnapshots
from eventjet.log.timers import JetStreamTimers
from eventjet.log.topology import declare, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.observability import logs
from eventjet.settings import Settings
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import Cursors, StoredCursor
from tests.archives import archive_of
from tests.contracts.unique_contract import Called, User
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.logs import block, fresh_name, records_of

Answers: TypeAlias = Callable[[str], Iterable[bytes]]
"""Returns the answers to a publish, given the name of the stream that it is for."""


def hostile(stream: str) -> list[bytes]:
    """Return answers that are no acknowledgement of the stream."""
    answers: list[Any] = [
        {"seq": 99},
        {"stream": "elsewhere", "seq": 99},
        {"stream": stream, "domain": "hub", "seq": 99},
        {"stream": [stream], "seq": 99},
        {"stream": stream, "seq": 99, "count": 77},
        {"stream": stream, "seq": 99, "domain": 7},
        *({"stream": stream, "seq": sequence} for sequence in (True, 99.0, "99", -1, 0, None, 1 << 63)),
        {"stream": "elsewhere", "error": {"code": 400, "err_code": 10054, "description": "too large"}, "seq": 0},
        {"error": {"code": 400, "err_code": 10054, "description": "too large"}},
        99,
        [stream, 99],
    ]
    acknowledgement = b'{"stream":"%b","seq":99}' % stream.encode()
    parts = (acknowledgement[:9], acknowledgement[9:])
    return [*map(orjson.dumps, answers), *parts, b"", b"+OK", b'{"stream":"%b","seq":%d}' % (stream.encode(), 1 << 70)]


def error(code: int) -> Answers:
    """Answer with an error that looks like the stream's own."""
    return lambda stream: [
        orjson.dumps({"error": {"code": 400, "err_code": code, "description": "no"}, "stream": stream, "seq": 0})
    ]


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), request_timeout_s=1.0, save_timeout_s=3.0)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[Client]:
    client = await connect(settings)
    yield client
    await client.close()


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[User])


@asynccontextmanager
async def rogue(settings: Settings, subjects: str, stream: str, answers: Answers) -> AsyncIterator[None]:
    """Subscribe to subjects, and answer every message on them."""
    client = await connect(settings)

    def heard(frame: Frame) -> None:
        for answer in answers(stream) if frame[2] else ():
            client.publish(frame[2].decode(), answer)

    try:
        await client.serve(subjects, heard)
        await client.api("INFO")  # answered after the subscription
        yield
    finally:
        await client.close()


@asynccontextmanager
async def relayed(settings: Settings) -> AsyncIterator[tuple[NatsProxy, Settings]]:
    """Start a relay before the server; yield it with settings that connect through it."""
    async with NatsProxy(settings.servers[0]) as relay:
        yield relay, replace(settings, servers=(relay.url,))


def answered_by_others(
    prefix: str, stream: str, answers: Answers, client: Client, *, stored: bool, times: int = 1
) -> Callable[[Publish], Fate]:
    """Let a message below the prefix be stored or lost, and let only the answers of others arrive."""

    def choose(publish: Publish) -> Fate:
        async def answer() -> None:
            for body in list(answers(stream)) * times if publish.reply else ():
                client.publish(publish.reply, body)

        if not publish.subject.startswith(prefix):
            return PASS
        return Fate(answer="lose", then=answer) if stored else Fate("lose", first=answer)

    return choose


async def a_save(jet: Jet) -> int:
    return (await jet.repository(User).execute("ada", User.call, "a@bank")).position


async def a_batch(jet: Jet) -> int:
    users = jet.repository(User)
    done = await jet.transact(
        users.decide("eve", User.call, "e@bank"),
        users.decide("bob", User.call, "b@bank"),
    )
    return max(outcome.position for outcome in done)


async def an_import(jet: Jet) -> int:
    events = [Imported(User, f"u-{n}", Called(email=""), datetime(2001, 5, 1, tzinfo=UTC)) for n in range(5)]
    report = await jet.append_many(events, source="book")
    assert report.stored == 5
    return (await jet.log()).last


Action: TypeAlias = Callable[[Jet], Coroutine[Any, Any, int]]


@pytest.mark.parametrize("action", [a_save, a_batch, an_import])
async def test_an_answer_of_another_stream_or_subscriber_is_no_acknowledgement(
    app: App, settings: Settings, client: Client, action: Action
) -> None:
    async with relayed(settings) as (relay, through), app.connect(through) as jet:
        await jet.init()
        relay.choose = answered_by_others(f"{app.name}.", app.name, hostile, client, stored=True)
        assert await action(jet) == (await jet.log()).last


async def test_a_unique_value_is_claimed_once_though_others_answer(
    app: App, settings: Settings, client: Client
) -> None:
    async with relayed(settings) as (relay, through), app.connect(through) as jet:
        await jet.init()
        relay.choose = answered_by_others(f"{app.name}.", app.name, hostile, client, stored=True)
        users = jet.repository(User)
        await users.execute("ada", User.call, "a@bank")
        with pytest.raises(NotUnique):
            await users.execute("eve", User.call, "a@bank")


@pytest.mark.parametrize("action", [a_save, a_batch, an_import])
async def test_a_save_that_only_others_acknowledge_is_not_reported_as_stored(
    app: App, settings: Settings, client: Client, action: Action
) -> None:
    async with relayed(settings) as (relay, through), app.connect(through) as jet:
        await jet.init()
        relay.choose = answered_by_others(f"{app.name}.", app.name, hostile, client, stored=False)
        with pytest.raises(OutcomeUnknown, match="answered"):
            await action(jet)
        assert (await jet.log()).last == 0


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("code", [10054, 10071, 10164, 10201])
async def test_an_error_from_another_subscriber_does_not_hide_a_stored_save(
    app: App, settings: Settings, client: Client, code: int, times: int
) -> None:
    async with relayed(settings) as (relay, through), app.connect(through) as jet:
        await jet.init()
        relay.choose = answered_by_others(f"{app.name}.", app.name, error(code), client, stored=True, times=times)
        assert await a_save(jet) == (await jet.log()).last
        assert await a_batch(jet) == (await jet.log()).last


async def test_a_save_ends_though_answers_never_stop(app: App, settings: Settings, client: Client) -> None:
    chatter: list[asyncio.Task[None]] = []

    async def chat(reply: str) -> None:
        while reply:
            client.publish(reply, b'{"seq":1}')
            await asyncio.sleep(0.05)

    def choose(publish: Publish) -> Fate:
        if not publish.subject.startswith(f"{app.name}."):
            return PASS
        chatter.append(asyncio.ensure_future(chat(publish.reply)))
        return Fate("lose")

    async with relayed(settings) as (relay, through), app.connect(through) as jet:
        await jet.init()
        relay.choose = choose
        try:
            async with asyncio.timeout(60):
                with pytest.raises(OutcomeUnknown):
                    await a_save(jet)
        finally:
            for task in chatter:
                task.cancel()
    assert chatter


async def a_timer(client: Client, app: str) -> None:
    await JetStreamTimers(client, app).set("egg", "a", 1, datetime.now(UTC) + timedelta(hours=1))


async def a_cursor(client: Client, app: str) -> None:
    cursor = Cursor("letters", "reactor", "log")
    await Cursors(client, app).write(StoredCursor(cursor, 0), cursor)


async def a_publication(client: Client, app: str) -> None:
    public = PublicStream(client, f"{app}_public", "lights")
    messages = [PublicMessage(f"{app}_public.lights.{n}", (), b"{}") for n in range(2)]
    await public.publish(messages, 7)


async def a_snapshot(client: Client, app: str) -> None:
    await KeyValueSnapshots(snapshot_bucket(app), client).put("user", "ada", b"{}")


async def a_skip_marker(client: Client, app: str) -> None:
    await record_skip_marker(client, app, 3, "garbage")


WRITES = {
    a_timer: (timer_stream, lambda app: f"_EJ.{app}."),
    a_cursor: (lambda app: f"KV_{cursor_bucket(app)}", lambda app: f"$KV.{cursor_bucket(app)}."),
    a_publication: (lambda app: f"{app}_public", lambda app: f"{app}_public."),
    a_snapshot: (lambda app: f"KV_{snapshot_bucket(app)}", lambda app: f"$KV.{snapshot_bucket(app)}."),
    a_skip_marker: (lambda app: app, lambda app: f"{app}."),
}


@pytest.mark.parametrize("answers", [hostile, error(10071)], ids=["others", "conflict"])
@pytest.mark.parametrize("write", list(WRITES))
async def test_a_write_ignores_acknowledgements_and_conflicts_of_other_subscribers(
    settings: Settings, client: Client, write: Any, answers: Answers
) -> None:
    app = fresh_name()
    await declare(client, app, 1, cursors=True, timers=True)
    public = {"name": f"{app}_public", "subjects": [f"{app}_public.>"], "allow_atomic": True}
    await client.ask(create_stream(public))
    stream, prefix = (name_of(app) for name_of in WRITES[write])
    async with relayed(settings) as (relay, through):
        relay.choose = answered_by_others(prefix, stream, answers, client, stored=False)
        writer = await connect(through)
        try:
            if write is a_snapshot and answers is not hostile:
                await write(writer, app)  # the conflict means that a newer snapshot is stored
            elif write is a_publication and answers is not hostile:
                with pytest.raises(Exception, match="lights"):  # the publication reads its position again
                    await write(writer, app)
            else:
                with pytest.raises((StoreUnavailable, LogUnusable)):
                    await write(writer, app)
        finally:
            await writer.close()


async def test_a_snapshot_over_its_own_connection_ignores_answers_of_others(settings: Settings, client: Client) -> None:
    app = fresh_name()
    await declare(client, app, 1)
    bucket = snapshot_bucket(app)
    async with relayed(settings) as (relay, through):
        relay.choose = answered_by_others(f"$KV.{bucket}.", f"KV_{bucket}", hostile, client, stored=False)

        def write() -> None:
            with NatsConnection.open(Endpoint.of(through)) as link:
                link.ask(Bucket(bucket).write("user.ada", b"{}"), timeout_s=1.0)

        with pytest.raises((StoreUnavailable, LogUnusable)):
            await asyncio.to_thread(write)


async def test_another_answering_stream_is_logged_once_with_its_domain(
    app: App, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    def of_hub(stream: str) -> list[bytes]:
        return [orjson.dumps({"stream": stream, "domain": "hub", "seq": 99})]

    def warnings() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if vars(record).get("event") == "eventjet.answered_by_another"
        ]

    caplog.set_level(logging.WARNING)
    async with app.connect(settings) as jet:
        await jet.init()
        async with rogue(settings, stream_subjects(app.name), app.name, of_hub):
            for number in range(5):
                await jet.repository(User).execute(f"u-{number}", User.call, f"{number}@bank")
            async with asyncio.timeout(60):
                while not warnings():
                    await asyncio.sleep(0.01)
    (line,) = warnings()
    assert f"the stream {app.name} of the JetStream domain hub" in line
    assert "deny_imports" in line
    assert logs.ANSWERED_BY_ANOTHER.level == logging.WARNING


async def test_init_and_doctor_name_a_subscriber_that_answers(app: App, settings: Settings) -> None:
    async with app.connect(settings) as jet:
        assert (await jet.init()).others == ()
    async with rogue(settings, f"{app.name}.user.*", app.name, lambda _: [b"thanks"]):
        async with app.connect(settings) as jet:
            others: tuple[str, ...] = ()
            async with asyncio.timeout(60):
                while not others:
                    others = (await jet.init()).others
            assert (await jet.log()).last == 0
        examined = await asyncio.to_thread(examine, Installation(app, settings, (), 60.0, time.time))
    assert "a subscriber that is no stream" in others[0]
    findings = [finding for finding in examined.findings if finding.check == "answers"]
    assert [finding.level for finding in findings] == ["warning"]
    assert "a subscriber that is no stream" in findings[0].what


async def test_a_refusal_of_the_stream_is_still_reported(app: App, settings: Settings, client: Client) -> None:
    async with app.connect(settings) as jet:
        await jet.init()
        state = await client.ask(stream_info(app.name))
        await client.ask(update_stream({**state.config, "max_msg_size": 100}))
        with pytest.raises(Refused, match="size"):
            await jet.repository(User).execute("ada", User.call, "a" * 200)


# A leaf node and its hub each have the log of the same app in the same account.


class Pair:
    """A hub and a leaf node."""

    def __init__(self, hub: NatsServer, leaf: NatsServer) -> None:
        self.hub = hub
        self.leaf = leaf


def linked(folder: Path, name: str, domain: str, links: str) -> NatsServer:
    """Return a server with its own JetStream."""
    own = f", domain: {domain}" if domain else ""
    sync = "2m" if name == "hub" else "always"  # so the hub answers first
    store = f'jetstream {{ store_dir: "{folder / name}/data", sync_interval: "{sync}"{own} }}'
    return NatsServer(folder / name, jetstream=False, config=f"server_name: {name}\n{links}\n{store}")


@pytest.fixture(scope="module", params=[("hub", "leaf"), ("", "leaf"), ("", ""), ("one", "one")], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    domains = request.param
    with reserved_port() as port:
        hub = linked(folder, "hub", domains[0], f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
        leaf = linked(folder, "leaf", domains[1], f'leafnodes {{ remotes: [ {{ url: "nats://127.0.0.1:{port}" }} ] }}')
        with hub, leaf:
            asyncio.run(joined(hub, leaf))
            yield Pair(hub, leaf)


async def joined(hub: NatsServer, leaf: NatsServer) -> None:
    """Return once messages from the leaf node reach the hub."""
    hub_client, leaf_client = await connect(Settings(servers=(hub.url,))), await connect(Settings(servers=(leaf.url,)))
    heard = asyncio.Event()
    await hub_client.serve("joined", lambda _: heard.set())
    async with asyncio.timeout(60):
        while not heard.is_set():
            leaf_client.publish("joined", b"")
            await asyncio.sleep(0.05)
    await hub_client.close()
    await leaf_client.close()


@pytest.mark.slow
async def test_acknowledged_saves_on_a_leaf_node_are_in_its_log_though_the_hub_answers_too(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(fresh_name(), aggregates=[User])
    async with app.connect(servers=pair.hub.url) as jet:
        await jet.init()
        for number in range(7):  # the hub's log is ahead
            await jet.repository(User).execute(f"hub-{number}", User.call, f"{number}@hub")
    async with app.connect(servers=pair.leaf.url, save_timeout_s=60.0) as jet:
        async with asyncio.timeout(60):
            while not (await jet.init()).others:
                await asyncio.sleep(0.05)
        users = jet.repository(User)
        positions: dict[tuple[str, int], int] = {}

        async def write(name: str) -> None:
            for number in range(5):
                done = await users.execute(name, User.call, f"{name}-{number}@leaf")
                positions[name, number] = done.position

        await asyncio.gather(*(write(f"leaf-{number}") for number in range(8)))
        await a_batch(jet)
    stored = {record[0]: record for record in records_of(Endpoint((pair.leaf.url,)), app.name)}
    for (name, number), position in positions.items():
        bodies = b"".join(stored[near][4] for near in range(position - 1, position + 2) if near in stored)
        assert f"{name}-{number}@leaf".encode() in bodies
    assert any("answers what is published" in record.getMessage() for record in caplog.records)
    examined = await asyncio.to_thread(
        examine, Installation(app, Settings(servers=(pair.leaf.url,)), (), 60.0, time.time)
    )
    assert any(finding.check == "answers" and finding.level == "warning" for finding in examined.findings)


@pytest.mark.slow
async def test_a_restore_into_a_leaf_node_succeeds_though_the_hub_answers_too(pair: Pair) -> None:
    name = fresh_name()
    headers = [block("user.called", 1, 1, Nats_Expected_Last_Subject_Sequence="0") for _ in range(30)]
    records: list[RawRecord] = [
        (n + 1, 1_700_000_000_000_000_000 + n, f"{name}.user.u-{n}".encode(), headers[n], b'{"email":""}')
        for n in range(30)
    ]
    client = await connect(Settings(servers=(pair.hub.url,)))
    await client.ask(create_stream(stream_config(name, 1)))
    await client.request(f"{name}.user.other", b"{}")
    await client.close()
    restore = Restore(Endpoint((pair.leaf.url,)), archive_of(records, stream=name), timeout_s=20.0)
    assert (await asyncio.to_thread(restore.run)).published == 30


# A leaf node has JetStream in another account, and this account uses the hub's API.


@pytest.fixture
def lodger(tmp_path: Path) -> Iterator[Settings]:
    """Yield settings of a leaf node's account that has no JetStream and sends its API requests to the hub."""
    accounts = """accounts {
      OWN { jetstream: enabled, users: [ {user: own, password: own} ] }
      LODGER { users: [ {user: lodger, password: lodger} ], mappings: { "$JS.API.>": "$JS.hub.API.>" } }
    }"""
    with reserved_port() as port:
        remote = f'leafnodes {{ remotes: [ {{ url: "nats://127.0.0.1:{port}", account: LODGER }} ] }}'
        hub = linked(tmp_path, "hub", "hub", f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
        leaf = linked(tmp_path, "leaf", "leaf", f"{remote}\n{accounts}")
        with hub, leaf:
            yield Settings(servers=(leaf.url.replace("nats://", "nats://lodger:lodger@"),), save_timeout_s=60.0)


async def test_an_acknowledgement_must_come_from_the_domain_that_the_api_names(
    lodger: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(fresh_name(), aggregates=[User])
    async with asyncio.timeout(60):
        while True:
            try:
                client = await connect(lodger)
                break
            except Unreachable:  # the leaf node has not reached its hub yet
                await asyncio.sleep(0.05)
        await client.close()
    async with app.connect(lodger) as jet:
        await jet.init()
        assert await a_save(jet) > 0
        with NatsConnection.open(Endpoint.of(lodger)) as link:
            expected, strangers = await asyncio.to_thread(link.probe, [(app.name, f"{app.name}.user.eve")], 0.5)
            sent = link.request(f"{app.name}.user.eve", b"{}", stream=app.name)
    assert (expected[0].domain, strangers) == ("hub", ())
    assert orjson.loads(sent[4])["domain"] == "hub"
    assert not [record for record in caplog.records if "answers what is published" in record.getMessage()]
