"""A secret in a personal field, and fields of half a megabyte, in all that eventjet prints, logs, answers and keeps."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventjet.app import App, load_app
from eventjet.dev.nats import NatsServer
from tests.acceptance.conftest import Program, clean_environ
from tests.logs import fresh_name

SECRET = "zx81-ada-secret"
LONG = 400_000
BOUND_S = 120.0
SOURCE = """
from __future__ import annotations

from dataclasses import dataclass, field, replace
from eventjet import App, Personal, Reaction, Recorded, Retry, Step, SqlProjection, aggregate, do, event
from eventjet import process, projection, reactor, served
from sqlalchemy import Column, MetaData, String, Table

metadata = MetaData()


@dataclass(frozen=True)
class Home:
    street: Personal[str]
    country: str = "GB"


@event("person.joined")
class Joined:
    email: Personal[str]
    home: Home
    plan: str = "free"
    note: str = ""


@aggregate("person")
class Person:
    email: Personal[str] = ""

    def join(self, email: Personal[str], note: str = "") -> Joined:
        if email.startswith("!"):
            raise ValueError(f"not an address: {email}")
        return Joined(email=email, home=Home(street=email), note=note)

    def evolve(self, event: Joined) -> Person:
        return replace(self, email=event.email)


@dataclass(frozen=True, slots=True)
class Contact:
    person_id: str
    email: Personal[str]


def table(name, size=400, unique=False):
    email = Column("email", String(size), unique=unique)
    return Table(name, metadata, Column("person_id", String(200), primary_key=True), email)


@projection("contacts", table=table("contacts"))
def contacts(row: Contact | None, event: Recorded[Joined]) -> Contact | None:
    return Contact(event.aggregate_id, event.data.email)


@projection("parking", table=table("parking"), on_error="quarantine")
def parking(row: Contact | None, event: Recorded[Joined]) -> Contact | None:
    raise LookupError(f"nobody is called {event.data.email} {event!r}")


@projection("narrow", table=table("narrow", 3))
def narrow(row: Contact | None, event: Recorded[Joined]) -> Contact | None:
    return Contact(event.aggregate_id, event.data.email)


@projection("twins", table=table("twins", unique=True))
def twins(row: Contact | None, event: Recorded[Joined]) -> Contact | None:
    return Contact(event.aggregate_id, event.data.email)


@projection("stopping", table=table("stopping"))
def stopping(row: Contact | None, event: Recorded[Joined]) -> Contact | None:
    raise RuntimeError(event.data.email)


byhand = SqlProjection("byhand", tables=[table("byhand")])


@byhand.handler
async def post(event: Recorded[Joined], connection) -> None:
    raise RuntimeError(event.data.email)


@reactor("mails", retry=Retry(tries=2, first_s=0.01))
async def mails(event: Recorded[Joined], to: Reaction[object]) -> None:
    await to.repository(Person).execute("other", Person.join, "!" + event.data.email)


@event("visit.begun")
class Begun:
    guest: Personal[str]


@event("visit.ended")
class Ended:
    pass


@process("visit")
class Visit:
    guest: Personal[str] = ""

    def begin(self, guest: Personal[str]) -> Begun:
        return Begun(guest=guest)

    def end(self) -> Ended:
        return Ended()

    def step(self) -> Step[Visit, Ended] | None:
        return do(Person, "guest", Person.join, "!" + self.guest).then(Visit.end) if self.guest else None

    def evolve(self, event: Begun | Ended) -> Visit:
        return replace(self, guest=event.guest if isinstance(event, Begun) else "")


app = App(
    NAME, aggregates=[Person], projections=[contacts, parking, narrow, twins, stopping, byhand],
    reactors=[mails],
    processes=[Visit], served=[served(Person, Person.join)],
)
"""


@pytest.fixture
def people(tmp_path: Path, eventjet_nats: NatsServer) -> Program:
    name = fresh_name("people")
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("NAME", repr(name)), encoding="utf-8")
    environ = {
        **clean_environ(),
        "EVENTJET_APP": f"{name}:app",
        "EVENTJET_SERVERS": eventjet_nats.url,
        "EVENTJET_DATABASE": f"sqlite:///{tmp_path / 'read.db'}",
    }
    return Program(tmp_path, environ)


class Running:
    """A long command, and all that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def output(self) -> str:
        return "".join(list(self.lines))

    def close(self) -> None:
        self._reading.join(30)
        self.process.communicate()

    def until(self, *patterns: str) -> list[str]:
        """Return what each pattern matched, once all of them have."""
        deadline = time.monotonic() + BOUND_S
        while not all(matches := [re.search(pattern, self.output) for pattern in patterns]):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        return [match[0] for match in matches if match is not None]


@pytest.fixture
def running(people: Program) -> Iterator[Running]:
    assert people("init").status == 0
    _join(people)
    process = people.start("worker", "--http", "127.0.0.1:0")
    started = Running(process)
    yield started
    process.kill()
    started.close()


def _join(people: Program) -> None:
    app: App = load_app(people.environ["EVENTJET_APP"], people.folder)
    person, visit = next(iter(app.aggregates)), next(iter(app.processes))

    async def run() -> None:
        async with app.connect(servers=people.environ["EVENTJET_SERVERS"]) as jet:
            await jet.repository(person).execute("p-1", person.join, SECRET, note="n" * LONG)
            await jet.repository(person).execute("p-2", person.join, SECRET)
            await jet.repository(visit).execute("v-1", visit.begin, SECRET)

    asyncio.run(run())


def _answered(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


@pytest.mark.slow
def test_no_output_has_the_secret_of_a_personal_field(people: Program, running: Running) -> None:
    projections = ("parking", "narrow", "twins", "stopping", "byhand")
    address, *_ = running.until(
        r"http://[\d.:]+", *(rf"{name}[^\n]*(stopped|quarantined)" for name in projections), "mails[^\n]*quarantined",
        "visit[^\n]*quarantined",
    )  # fmt: skip
    outputs = {"log": running.output, **{path: _answered(f"{address}{path}") for path in ("/healthz", "/metrics")}}
    for command in (
        "status", "history person p-1", "tail", "quarantine list", "quarantine show parking 1",
        "quarantine show mails 1", "process show visit v-1", "process sync visit", "audit", "deadlines list",
        "quarantine retry parking --all", "verify contacts", "rebuild stopping --engine local",
        "rebuild byhand --engine local", "rebuild narrow --engine local",
        "rebuild twins --engine local",
    ):  # fmt: skip
        for arguments in ([*command.split(), "--json"], command.split()):
            ended = people(*arguments)
            outputs[" ".join(arguments)] = ended.out + ended.err
    assert {where: text for where, text in outputs.items() if SECRET in text} == {}
    assert "free" in outputs["history person p-1"]
    assert "<personal>" in outputs["history person p-1"]
    assert "LookupError" in outputs["quarantine show parking 1"]
    assert "the row is not shown" in outputs["rebuild twins --engine local"]
    whole = json.loads(outputs["history person p-1 --json"])
    assert len(whole[0]["data"]["note"]) == LONG
    assert whole[0]["data"]["home"] == {"street": "<personal>", "country": "GB"}
    long = {where: len(text) for where, text in outputs.items() if len(text) > 20_000 and not where.endswith("--json")}
    assert long == {}
    for command in ("history person p-1", "tail", "quarantine show parking 1"):
        assert SECRET in people(*command.split(), "--show-personal").out
