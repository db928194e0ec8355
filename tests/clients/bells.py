"""A log and a publication for other programs to read, and what is in them by eventjet's own account."""

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
"""Their ids; on a subject two of them are written otherwise."""


@event("bell.rung")
class Rung:
    times: int


@aggregate("bell")
class Bell:
    """What is rung."""

    rung: int = 0

    def ring(self, times: int) -> Rung:
        return Rung(times=times)

    def evolve(self, event: Rung) -> Bell:
        return replace(self, rung=self.rung + event.times)


@event("bell.heard")
class Heard:
    number: int


Fact = tuple[int, str, str, str, str, Any]
"""One record of a log: position, subject, the event's name, version, id, and body."""
Told = tuple[str, str, str, str, datetime, str, Any]
"""One CloudEvent: id, source, type, subject, time, sequence and data."""


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
        """Of all events in the log."""
        return f"{self.log}.bell.*"

    @property
    def public(self) -> str:
        """The stream of the publication."""
        return self.app.publications["bells"].stream

    @property
    def public_subject(self) -> str:
        return f"{self.public}.bells.>"

    async def ring(self, count: int) -> None:
        """So many events, on one bell after the other; every fourth of them is told to nobody."""
        for number in range(count):
            await self.jet.repository(Bell).execute(BELLS[number % len(BELLS)], Bell.ring, number % 4)

    async def tell(self) -> None:
        """Have a worker tell what is not told yet."""

        async def is_told() -> bool:
            (found,) = await status(self.app, self.settings)
            return not found.lag_events

        async with working(self.app, self.settings):
            await eventually(is_told)

    async def facts(self) -> list[Fact]:
        """What a reader of the log is to find."""
        return [
            (
                one.position,
                subject_of(self.log, "bell", one.aggregate_id),
                "bell.rung",
                str(one.version),
                one.event_id,
                {"times": one.data.times},
            )
            for one in await self._recorded()
        ]

    async def told(self) -> list[Told]:
        """What a reader of the publication is to find."""
        return [
            (
                f"{one.event_id}.bells.{number}",
                SOURCE,
                "bell.heard",
                one.aggregate_id,
                one.recorded_at,
                f"{one.position:020d}",
                {"number": number},
            )
            for one in await self._recorded()
            for number in range(one.data.times)
        ]

    async def config(self, stream: str) -> Mapping[str, Any]:
        """The settings of a stream, as the server has them."""
        assert self.jet.client is not None
        return (await self.jet.client.ask(stream_info(stream))).config

    async def _recorded(self) -> list[Recorded[Rung]]:
        bells = self.jet.repository(Bell)
        found = [one for bell in BELLS for one in await bells.history(bell)]
        return sorted(found, key=lambda one: one.position)


def app_of() -> App:
    """A fresh one, whose streams nobody else has."""

    @publication("bells", stream=fresh_name("public"), source=SOURCE, start="beginning")
    def bells(event: Recorded[Rung]) -> list[Heard] | None:
        return [Heard(number=number) for number in range(event.data.times)] or None

    return App(fresh_name(), aggregates=[Bell], publications=[bells])


async def prepare(town: Town) -> None:
    """Make its streams."""
    assert town.jet.client is not None
    config = {"name": town.public, "subjects": [town.public_subject], "allow_atomic": True}
    await town.jet.client.ask(create_stream(config))
    await town.jet.init()


def fact_of(position: int, subject: str, headers: Mapping[str, str], body: Any) -> Fact:
    """What another program read in the log."""
    return position, subject, headers["Ej-Type"], headers["Ej-Version"], headers["Nats-Msg-Id"], body


def told_of(body: str | bytes) -> Told:
    """What another program read of the publication; raises where it is no CloudEvent 1.0."""
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
