"""A log and a publication for other programs to read, and their expected content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from eventjet import App, Jet, Recorded, aggregate, event, publication
from eventjet.codec.subjects import subject_of
from eventjet.jetstream.api import create_stream, stream_info
from eventjet.settings import Settings
from eventjet.subscriptions.status import status
from tests.integration.reacting import eventually, working
from tests.logs import fresh_name

SOURCE = "https://town.example/bells"
BELLS = ("hall", "tower/1", "church é")
"""Ids of bells; on a subject two of them are encoded."""


@event("bell.rung")
class Rung:
    times: int


@aggregate("bell")
class Bell:
    """A bell that can be rung."""

    rung: int = 0

    def ring(self, times: int) -> Rung:
        return Rung(times=times)

    def evolve(self, event: Rung) -> Bell:
        return replace(self, rung=self.rung + event.times)


@event("bell.heard")
class Heard:
    number: int


Fact = tuple[int, str, str, str, str, Any]
"""A record of a log: position, subject, the event's name, version, id, and body."""
Told = tuple[str, str, str, str, datetime, str, Any]
"""A CloudEvent: id, source, type, subject, time, sequence and data."""


@dataclass
class Town:
    """An app on a server, with the stream of its publication."""

    app: App
    jet: Jet
    settings: Settings

    @property
    def server(self) -> str:
        return self.settings.servers[0]

    @property
    def log(self) -> str:
        return self.app.name

    @property
    def subject(self) -> str:
        """Return the subject of all events in the log."""
        return f"{self.log}.bell.*"

    @property
    def public(self) -> str:
        """Return the stream of the publication."""
        return self.app.publications["bells"].stream

    @property
    def public_subject(self) -> str:
        return f"{self.public}.bells.>"

    async def ring(self, count: int) -> None:
        """Record so many events, on one bell after the other; every fourth of them is not published."""
        for number in range(count):
            await self.jet.repository(Bell).execute(BELLS[number % len(BELLS)], Bell.ring, number % 4)

    async def tell(self) -> None:
        """Have a worker publish what is not published yet."""

        async def is_published() -> bool:
            (publication_status,) = await status(self.app, self.settings)
            return not publication_status.lag_events

        async with working(self.app, self.settings):
            await eventually(is_published)

    async def facts(self) -> list[Fact]:
        """Return what a reader of the log has to read."""
        return [
            (
                event.position,
                subject_of(self.log, "bell", event.aggregate_id),
                "bell.rung",
                str(event.version),
                event.event_id,
                {"times": event.data.times},
            )
            for event in await self._recorded()
        ]

    async def told(self) -> list[Told]:
        """Return what a reader of the publication has to read."""
        return [
            (
                f"{event.event_id}.bells.{number}",
                SOURCE,
                "bell.heard",
                event.aggregate_id,
                event.recorded_at,
                f"{event.position:020d}",
                {"number": number},
            )
            for event in await self._recorded()
            for number in range(event.data.times)
        ]

    async def config(self, stream: str) -> Mapping[str, Any]:
        """Return the settings of a stream, as the server has them."""
        assert self.jet.client is not None
        return (await self.jet.client.ask(stream_info(stream))).config

    async def _recorded(self) -> list[Recorded[Rung]]:
        bells = self.jet.repository(Bell)
        rung_events = [event for bell in BELLS for event in await bells.history(bell)]
        return sorted(rung_events, key=lambda event: event.position)


def app_of() -> App:
    """Return a new app, whose streams no other test has."""

    @publication("bells", stream=fresh_name("public"), source=SOURCE, start="beginning")
    def bells(event: Recorded[Rung]) -> list[Heard] | None:
        return [Heard(number=number) for number in range(event.data.times)] or None

    return App(fresh_name(), aggregates=[Bell], publications=[bells])


async def prepare(town: Town) -> None:
    """Make the streams of the town."""
    assert town.jet.client is not None
    config = {"name": town.public, "subjects": [town.public_subject], "allow_atomic": True}
    await town.jet.client.ask(create_stream(config))
    await town.jet.init()


def fact_of(position: int, subject: str, headers: Mapping[str, str], body: Any) -> Fact:
    """Return what another program read in the log."""
    return position, subject, headers["Ej-Type"], headers["Ej-Version"], headers["Nats-Msg-Id"], body


def told_of(body: str | bytes) -> Told:
    """Return what another program read of the publication; raise unless it is a CloudEvent 1.0."""
    event = JSONFormat().read(CloudEvent, body)
    name, source, kind, subject, at = (
        event.get_id(),
        event.get_source(),
        event.get_type(),
        event.get_subject(),
        event.get_time(),
    )
    assert event.get_specversion() == "1.0"
    assert event.get_datacontenttype() == "application/json"
    assert subject is not None
    assert at is not None
    return name, source, kind, subject, at, event.get_extension("sequence"), event.get_data()
