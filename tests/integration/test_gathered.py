"""The server gathers streams of several apps into the stream of an inbox."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from eventjet import App, Incoming, Jet, Origin, Reaction, Source, aggregate, event, inbox
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.doctor.report import Installation, Report
from eventjet.doctor.streams import check_streams
from eventjet.domain.reactor import Start
from eventjet.findings import Level
from eventjet.jetstream.api import create_stream
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_control import cursor_at
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import status
from tests.integration.reacting import eventually, until, working
from tests.integration.test_domains import started
from tests.logs import fresh_name


@event("town.rang")
class Rang:
    times: int


@event("port.landed")
class Landed:
    times: int


@event("noise.heard")
class Heard:
    times: int


@aggregate("noise")
class Noise:
    times: int = 0

    def hear(self, times: int) -> Heard:
        return Heard(times=times)

    def evolve(self, event: Heard) -> Noise:
        return replace(self, times=self.times + event.times)


@dataclass
class Ear:
    """The dependency of the handler, which records the messages."""

    received: list[Incoming[Rang | Landed]] = field(default_factory=list[Incoming[Rang | Landed]])

    def by_position(self) -> dict[int, Incoming[Rang | Landed]]:
        return {message.position: message for message in self.received}


def app_of(ear: Ear, stream: str, sources: Sequence[str | Source], start: Start = "beginning") -> App:
    @inbox("news", stream=stream, subject=">", start=start, sources=sources)
    async def news(message: Incoming[Rang | Landed], to: Reaction[Ear]) -> None:
        to.deps.received.append(message)
        await to.repository(Noise).execute("n", Noise.hear, message.data.times)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Ear]:
        yield ear

    return App(fresh_name(), aggregates=[Noise], reactors=[news], deps=opened)


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,))


async def make(jet: Jet, name: str, **config: Any) -> None:
    assert jet.client is not None
    await jet.client.ask(create_stream({"name": name, "subjects": [f"{name}.>"], **config}))


async def remove(jet: Jet, name: str) -> None:
    assert jet.client is not None
    await jet.client.api(f"STREAM.DELETE.{name}")


async def send(jet: Jet, subject: str, kind: str, times: int, name: str = "") -> None:
    """Publish a CloudEvent, or a plain message when `name` is empty."""
    assert jet.client is not None
    data = {"times": times}
    cloud = {"specversion": "1.0", "id": name, "source": subject.split(".", maxsplit=1)[0], "type": kind, "data": data}
    await jet.client.request(subject, json.dumps(cloud if name else data).encode())


async def heard(jet: Jet) -> int:
    return (await jet.repository(Noise).load("n")).times


def doctor_findings(app: App, settings: Settings) -> list[tuple[Level, str]]:
    report = Report("streams")
    check_streams(Installation(app, settings, (), 60.0, time.time), report, list)
    return [(finding.level, finding.what) for finding in report.findings if finding.check in ("inbox", "sources")]


async def test_an_inbox_that_starts_new_does_not_handle_older_messages_of_its_sources(settings: Settings) -> None:
    ear, town, stream = Ear(), f"town-{fresh_name()}", f"news-{fresh_name()}"
    app = app_of(ear, stream, [town], "new")
    async with app.connect(settings) as jet:
        await make(jet, town)
        for number in range(20):
            await send(jet, f"{town}.a", "town.rang", 1, f"old-{number}")
        assert (await jet.init()).unusable == ()
        assert (await jet.init()).unusable == ()
        await send(jet, f"{town}.a", "town.rang", 5, "new")
        async with working(app, settings):
            await until(lambda: len(ear.received) > 0)
        assert [message.id for message in ear.received] == ["new"]


async def test_an_inbox_over_two_apps_knows_the_origin_of_each_event(settings: Settings) -> None:
    ear, town, port, stream = Ear(), f"town-{fresh_name()}", f"port-{fresh_name()}", f"news-{fresh_name()}"
    app = app_of(ear, stream, [town, port])
    async with app.connect(settings) as jet:
        await make(jet, town, allow_atomic=True)
        await make(jet, port)
        topology = await jet.init()
        assert stream in topology.created
        assert topology.unusable == ()
        assert stream not in (await jet.init()).created
        for times in (1, 2):
            await send(jet, f"{town}.bells.b", "town.rang", times, f"t{times}")
        await send(jet, f"{port}.ships.s", "port.landed", 10, "p1")
        await send(jet, f"{port}.ships.s", "port.landed", 10, "p1")  # the same event, published twice
        await send(jet, f"{port}.ships.s", "port.sunk", 1000, "p2")  # its type is not one of the inbox
        async with working(app, settings):
            await until(lambda: len(ear.by_position()) == 4)

            async def is_quarantined() -> str:
                assert jet.client is not None
                quarantined = await cursor_control.listed(Cursors(jet.client, jet.name), "news")
                return quarantined[0].reason if quarantined else ""

            assert "its type 'port.sunk' is none of port.landed, town.rang" in await eventually(is_quarantined)
        assert await heard(jet) == 13
        origins = {(message.id, message.position): message.origin for message in ear.received}
        identities = {origin.stream: origin.made for origin in origins.values() if origin is not None}
        by_stream = [(origin.stream, origin.position) for origin in origins.values() if origin is not None]
        assert sorted(by_stream) == sorted([(town, 1), (town, 2), (port, 1), (port, 2)])
        assert identities.keys() == {town, port}
        assert all(identities.values())
        assert identities[town] != identities[port]
        assert {type(message.data) for message in ear.received if message.source == port} == {Landed}
        assert [level for level, _ in doctor_findings(app, settings)] == [Level.OK]


async def test_a_recreated_origin_is_reported_and_its_messages_are_handled_once(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    ear, town, stream = Ear(), f"town-{fresh_name()}", f"news-{fresh_name()}"

    @inbox("news", stream=stream, subject=">", start="beginning", sources=[town])
    async def news(message: Incoming[Rang], to: Reaction[Ear]) -> None:
        to.deps.received.append(message)
        await to.repository(Noise).execute("n", Noise.hear, message.data.times)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Ear]:
        yield ear

    app = App(fresh_name(), aggregates=[Noise], reactors=[news], deps=opened)
    async with app.connect(settings) as jet:
        await make(jet, town)
        await jet.init()
        await send(jet, f"{town}.b", "town.rang", 1)  # plain messages, which only their origin identifies
        async with working(app, settings):
            await until(lambda: len(ear.by_position()) == 1)
        await remove(jet, town)
        await make(jet, town)
        await send(jet, f"{town}.b", "town.rang", 20)
        async with working(app, settings):  # a worker that did not see the first stream
            await until(lambda: len(ear.by_position()) == 2)
        first, second = (ear.by_position()[position].origin for position in (1, 2))
        assert isinstance(first, Origin)
        assert isinstance(second, Origin)
        assert (first.position, second.position) == (1, 1)
        assert first.made != second.made
        assert await heard(jet) == 21
        warnings = [record.getMessage() for record in caplog.records if "made again" in record.getMessage()]
        assert len(warnings) == 1
        assert f"its source {town} was made again, and from position 2 on" in warnings[0]
        findings = [text for level, text in doctor_findings(app, settings) if level is Level.WARNING]
        assert any("it was made again before message 2 was gathered" in text for text in findings), findings
        # Read again from the beginning: every command is known.
        assert jet.client is not None
        at = await cursor_at(jet.store, jet.client, declarations_of(app)["news"], 0)
        await cursor_control.set_position(Cursors(jet.client, jet.name), at)
        count = len(ear.received)
        async with working(app, settings):
            await until(lambda: len(ear.received) >= count + 2)
        assert await heard(jet) == 21


async def test_a_missing_source_is_reported(settings: Settings) -> None:
    town, port, stream = f"town-{fresh_name()}", f"port-{fresh_name()}", f"news-{fresh_name()}"
    ear = Ear()
    app = app_of(ear, stream, [town, port])
    async with app.connect(settings) as jet:
        await make(jet, town)
        await jet.init()
        await send(jet, f"{town}.b", "town.rang", 1, "t1")

        async def is_reported() -> bool:
            (shown,) = await status(app, settings)
            return f"gets nothing from its source '{port}': stream not found" in (shown.reason or "")

        async with working(app, settings):
            await until(lambda: len(ear.received) == 1)  # the other source goes on
            await eventually(is_reported)
        warnings = [text for level, text in doctor_findings(app, settings) if level is Level.WARNING]
        assert any(f"its source '{port}': stream not found" in text for text in warnings), warnings
        await make(jet, port)
        await send(jet, f"{port}.s", "port.landed", 2, "p1")
        async with working(app, settings):
            await until(lambda: len(ear.by_position()) == 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config, town: {"subjects": [f"{config['name']}.>"]}, "it has subjects beside its sources"),
        (lambda config, town: {"duplicate_window": 120_000_000_000}, "it has a duplicate_window"),
        (lambda config, town: {"retention": "workqueue"}, "its retention is workqueue"),
        (lambda config, town: {"subject_transform": {"src": ">", "dest": "all.>"}}, "it transforms subjects"),
        (lambda config, town: {"sources": [{"name": "elsewhere"}]}, "and it gathers 'elsewhere'"),
        (lambda config, town: {"sources": [{"name": town, "filter_subject": f"{town}.a"}]}, "does not gather"),
    ],
)
async def test_a_stream_that_could_lose_or_mix_messages_is_refused(
    settings: Settings, change: Callable[[dict[str, Any], str], dict[str, Any]], reason: str
) -> None:
    town, stream = f"town-{fresh_name()}", f"news-{fresh_name()}"
    app = app_of(Ear(), stream, [town])
    async with app.connect(settings) as jet:
        assert jet.client is not None
        await make(jet, town)
        config: dict[str, Any] = {"name": stream, "sources": [{"name": town}]}
        await jet.client.ask(create_stream({**config, **change(config, town)}))
        (unusable,) = (await jet.init()).unusable
        assert f"The stream '{stream}' of the inbox 'news'" in str(unusable)
        assert reason in str(unusable), str(unusable)
        assert any(reason in text for level, text in doctor_findings(app, settings) if level is Level.FAULT)


async def test_a_source_of_another_domain_is_gathered_and_equal_subjects_are_refused(tmp_path: Path) -> None:
    ear = Ear()
    app = app_of(ear, "news", ["town", Source("port", domain="leaf")])
    with reserved_port() as port:
        hub = started(tmp_path, "hub", ", domain: hub", f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
        remote = f'leafnodes {{ remotes: [ {{ url: "nats://127.0.0.1:{port}" }} ] }}'
        with hub, started(tmp_path, "leaf", ", domain: leaf", remote) as leaf:
            settings, far = Settings(servers=(hub.url,)), Settings(servers=(leaf.url,))
            other = app_of(Ear(), "elsewhere", [])
            async with app.connect(settings) as jet, other.connect(far) as away:
                await make(jet, "town")
                await make(away, "port")
                assert (await jet.init()).unusable == ()
                await send(jet, "town.b", "town.rang", 1, "t1")
                await send(away, "port.s", "port.landed", 2)
                async with working(app, settings):
                    await until(lambda: len(ear.by_position()) == 2)
                origins = [message.origin for message in ear.by_position().values()]
                places = sorted((origin.api, origin.stream, origin.position) for origin in origins if origin)
                assert places == [("", "town", 1), ("$JS.leaf.API", "port", 1)]
                (plain,) = [message for message in ear.received if message.source == ""]
                assert plain.id.startswith("$JS.leaf.API/port/")
                assert [level for level, _ in doctor_findings(app, settings)] == [Level.OK]
                await remove(away, "port")
                await make(away, "port", subjects=["port.>", "town.b"])
                (unusable,) = (await jet.init()).unusable
                assert "'town' and 'port' ($JS.leaf.API) both have messages on town.> and town.b" in str(unusable)
