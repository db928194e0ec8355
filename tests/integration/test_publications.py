"""Publications on a real server: exactly once, in the order of the log, as CloudEvents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from eventjet import App, DefinitionError, Jet, Recorded, aggregate, event, publication
from eventjet.codec.headers import MSG_ID, header
from eventjet.dev.nats import NatsServer
from eventjet.errors import ConcurrencyConflict, LogUnusable
from eventjet.jetstream.api import create_stream, next_message
from eventjet.log.public_stream import PublicStream
from eventjet.settings import Settings
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.event_source import EventSource
from eventjet.subscriptions.handlers import PublicationHandler
from eventjet.subscriptions.status import status
from tests.integration.reacting import eventually, working
from tests.logs import fresh_name


@event("lamp.switched")
class Switched:
    times: int


@event("lamp.broken")
class Broken:
    pass


@aggregate("lamp")
class Lamp:
    def switch(self, times: int) -> Switched:
        return Switched(times=times)

    def fall(self) -> Broken:
        return Broken()

    def evolve(self, event: Switched | Broken) -> Lamp:
        return replace(self)


@event("light.changed")
class Changed:
    number: int


@dataclass
class PublishedMessages:
    """The messages of a public stream."""

    messages: list[tuple[str, dict[str, Any], str | None]]

    @property
    def numbers(self) -> list[int]:
        return [body["data"]["number"] for _, body, _ in self.messages]


def app_of(stream: str, name: str | None = None) -> App:
    @publication("lights", stream=stream, source="https://lamps.example/lights", start="beginning")
    def lights(event: Recorded[Switched]) -> list[Changed] | None:
        if event.data.times < 0:
            raise ValueError("less than nothing")
        return [Changed(number=number) for number in range(event.data.times)] or None

    return App(name or fresh_name(), aggregates=[Lamp], publications=[lights])


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,))


@pytest.fixture
def app() -> App:
    return app_of(f"pub-{fresh_name()}")


@pytest.fixture
async def jet(app: App, settings: Settings) -> AsyncGenerator[Jet]:
    stream = app.publications["lights"].stream
    async with app.connect(settings) as jet:
        assert jet.client is not None
        await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_atomic": True}))
        await jet.init()
        yield jet


async def published(jet: Jet, stream: str) -> PublishedMessages:
    assert jet.client is not None
    messages: list[tuple[str, dict[str, Any], str | None]] = []
    position = 1
    while (record := await jet.client.ask(next_message(stream, position))) is not None:
        messages.append((record[2].decode(), json.loads(record[4]), header(record[3], MSG_ID)))
        position = record[0] + 1
    return PublishedMessages(messages)


async def is_published(app: App, settings: Settings) -> bool:
    (work_status,) = await status(app, settings)
    return not work_status.lag_events


async def test_events_are_published_once_and_in_order_as_cloud_events(app: App, jet: Jet, settings: Settings) -> None:
    stream = app.publications["lights"].stream
    lamps = jet.repository(Lamp)
    async with working(app, settings):
        for times in (1, 3, 0, 2):
            await lamps.execute("hall/1", Lamp.switch, times)
        await lamps.execute("hall/1", Lamp.fall)
        await eventually(lambda: is_published(app, settings))
    content = await published(jet, stream)
    assert content.numbers == [0, 0, 1, 2, 0, 1]
    (first, *_) = await lamps.history("hall/1")
    subject, body, name = content.messages[0]
    assert subject == f"{stream}.lights.hall=2F1"
    assert name == body["id"] == f"{first.event_id}.lights.0"
    assert body == {
        "specversion": "1.0",
        "id": f"{first.event_id}.lights.0",
        "source": "https://lamps.example/lights",
        "type": "light.changed",
        "subject": "hall/1",
        "time": body["time"],
        "datacontenttype": "application/json",
        "sequence": f"{first.position:020d}",
        "data": {"number": 0},
    }


async def test_a_cursor_that_is_set_back_publishes_no_event_again(app: App, jet: Jet, settings: Settings) -> None:
    assert jet.client is not None
    stream = app.publications["lights"].stream
    for _ in range(5):
        await jet.repository(Lamp).execute("l", Lamp.switch, 2)
    async with working(app, settings):
        await eventually(lambda: is_published(app, settings))
    cursors = Cursors(jet.client, jet.name)
    stored = await cursors.read("lights")
    await cursors.write(stored, stored.cursor.set_to(stored.cursor.log, 0, ""))
    await jet.repository(Lamp).execute("l", Lamp.switch, 1)
    async with working(app, settings):
        await eventually(lambda: is_published(app, settings))
    assert (await published(jet, stream)).numbers == [0, 1] * 5 + [0]


async def test_two_publications_of_one_event_do_not_deduplicate_each_other(settings: Settings) -> None:
    """The server drops a message whose id its stream had within two minutes on any subject."""
    stream, source = f"pub-{fresh_name()}", "https://lamps.example/lights"

    @publication("lights", stream=stream, source=source, start="beginning")
    def lights(event: Recorded[Switched]) -> Changed:
        return Changed(number=event.data.times)

    @publication("bills", stream=stream, source=source, start="beginning")
    def bills(event: Recorded[Switched]) -> list[Changed]:
        return [Changed(number=-event.data.times)] * event.data.times

    app = App(fresh_name(), aggregates=[Lamp], publications=[lights, bills])
    async with app.connect(settings) as jet:
        assert jet.client is not None
        await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_atomic": True}))
        await jet.init()
        for times in (1, 2, 1):
            await jet.repository(Lamp).execute("l", Lamp.switch, times)
        async with working(app, settings):

            async def are_published() -> bool:
                return not any(work_status.lag_events for work_status in await status(app, settings))

            await eventually(are_published)
        content = await published(jet, stream)
    assert sorted(content.numbers) == [-2, -2, -1, -1, 1, 1, 2]
    assert len({(body["source"], body["id"]) for _, body, _ in content.messages}) == 7


async def test_concurrent_publishers_publish_every_event_once(app: App, jet: Jet) -> None:
    assert jet.client is not None
    stream = app.publications["lights"].stream
    lamps = jet.repository(Lamp)
    for _ in range(30):
        await lamps.execute("l", Lamp.switch, 2)
    events = await lamps.history("l")
    conflicts = 0

    async def publish() -> None:
        nonlocal conflicts

        assert jet.client is not None
        lights = app.publications["lights"]
        declared = declarations_of(app)["lights"]
        public = PublicStream(jet.client, stream, "lights")
        followed = PublicationHandler(declared, cast("EventSource", None), lights, public)
        for recorded in events:
            while True:
                try:
                    await followed.work(recorded)[1](1)
                except ConcurrencyConflict:
                    conflicts += 1
                else:
                    break

    await asyncio.gather(publish(), publish(), publish())
    assert (await published(jet, stream)).numbers == [0, 1] * 30
    assert conflicts


async def test_messages_of_another_log_stop_the_publication(app: App, jet: Jet, settings: Settings) -> None:
    """A log that was lost and created again begins at position 1 with other events."""
    assert jet.client is not None
    stream = app.publications["lights"].stream
    for _ in range(3):
        await jet.repository(Lamp).execute("l", Lamp.switch, 1)
    async with working(app, settings):
        await eventually(lambda: is_published(app, settings))
    for lost in (app.name, f"KV_{app.name}_cursors"):
        await jet.client.api(f"STREAM.DELETE.{lost}")

    async def failed() -> str | None:
        (work_status,) = await status(app, settings)
        return work_status.reason if work_status.state == "failed" else None

    async with app.connect(settings) as new_jet:
        assert new_jet.client is not None
        await new_jet.init()
        await new_jet.repository(Lamp).execute("l", Lamp.switch, 2)
        for _ in range(2):
            async with working(app, settings):
                reason = await eventually(failed)
            assert "the last message in its stream" in reason
            assert f"nats stream purge {stream} --subject='{stream}.lights.>'" in reason
            await new_jet.repository(Lamp).execute("l", Lamp.switch, 1)  # the positions are as far as before
        assert (await published(new_jet, stream)).numbers == [0, 0, 0]
        await new_jet.client.api(f"STREAM.PURGE.{stream}", {"filter": f"{stream}.lights.>"})
        async with working(app, settings):
            await eventually(lambda: is_published(app, settings))
        assert (await published(new_jet, stream)).numbers == [0, 1, 0, 0]


async def test_a_publication_that_raises_fails_with_its_reason(app: App, jet: Jet, settings: Settings) -> None:
    lamps = jet.repository(Lamp)
    await lamps.execute("l", Lamp.switch, 1)
    await lamps.execute("l", Lamp.switch, -1)
    await lamps.execute("m", Lamp.switch, 1)

    async def has_failed() -> bool:
        (work_status,) = await status(app, settings)
        return work_status.state == "failed" and "ValueError: less than nothing" in str(work_status.reason)

    async with working(app, settings):
        await eventually(has_failed)
    assert (await published(jet, app.publications["lights"].stream)).numbers == [0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "it does not exist. Create it with the subject"),
        ({"subjects": ["elsewhere-{0}.>"], "allow_atomic": True}, "it does not listen to"),
        ({"subjects": ["{0}.>"]}, "it does not take atomic batches"),
        (
            {"subjects": ["{0}.*.*"], "allow_atomic": True, "metadata": {"eventjet.log": "1b4e28ba"}},
            "it is the log of an app",
        ),
    ],
)
async def test_init_reports_an_unusable_public_stream_and_creates_the_rest(
    settings: Settings, config: dict[str, Any] | None, reason: str
) -> None:
    stream = f"pub-{fresh_name()}"
    app = app_of(stream)
    async with app.connect(settings) as jet:
        assert jet.client is not None
        if config is not None:
            subjects = [subject.format(stream) for subject in config["subjects"]]
            await jet.client.ask(create_stream({**config, "name": stream, "subjects": subjects}))
        topology = await jet.init()
        assert [isinstance(problem, LogUnusable) and reason in str(problem) for problem in topology.unusable] == [True]
        assert topology.created
        assert topology.cursors == (("lights", 0),)


def test_a_publication_into_the_log_of_its_app_is_refused() -> None:
    @publication("lights", stream="lamps", source="/lamps")
    def lights(event: Recorded[Switched]) -> None:
        return None

    with pytest.raises(
        DefinitionError, match="the stream 'lamps' is the app's own log, which public events are not for"
    ):
        App("lamps", aggregates=[Lamp], publications=[lights])


def test_all_faults_of_publications_are_reported_together() -> None:
    @publication("Bad", stream="a.b", source="")
    async def bad(event: Recorded[Changed]) -> int:
        return 1

    with pytest.raises(DefinitionError) as caught:
        App("lamps", aggregates=[Lamp], publications=[bad, "lights"])  # type: ignore[list-item]
    for part in (
        "the publication's name 'Bad' is not",
        "is async or a generator; return the public events",
        "its stream 'a.b' is not a stream's name",
        "its source is empty",
        "takes Changed, which no aggregate of the app folds; list its aggregate",
        "int is not an event",
        "lights is not a publication",
    ):
        assert part in str(caught.value), part
