"""A fault of one component stops no other component; it is reported, and its repair is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, make_url, text

from eventjet import (
    App,
    Deadline,
    Incoming,
    Reaction,
    Recorded,
    Retry,
    after,
    event,
    inbox,
    process,
    projection,
    publication,
    reactor,
)
from eventjet.codec.subjects import cursor_bucket, timer_stream
from eventjet.dev.nats import NatsServer
from eventjet.jetstream.api import call, create_stream, stream_info, update_stream
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.subscriptions.status import StatusReader, status
from eventjet.subscriptions.work_status import WorkStatus
from tests.integration.reacting import Bell, Counted, Rung, Tower, eventually, working
from tests.logs import fresh_name
from tests.tables import execute, reading


@event("rung.abroad")
class RungAbroad:
    n: int


@event("nap.begun")
class Begun:
    pass


@event("nap.ended")
class Ended:
    pass


@process("nap")
class Nap:
    begun: bool = False
    ended: bool = False

    def begin(self) -> Begun:
        return Begun()

    def wake(self) -> Ended:
        return Ended()

    def step(self) -> None:
        return None

    def deadline(self) -> list[Deadline[Nap, Ended]]:
        return [after(timedelta(seconds=0), Nap.wake)] if self.begun and not self.ended else []

    def evolve(self, event: Begun | Ended) -> Nap:
        return replace(self, begun=True, ended=isinstance(event, Ended))


@dataclass(frozen=True, slots=True)
class Ring:
    bell: str
    rings: int = 0


@projection(
    "rings",
    table=Table(
        "rings", MetaData(), Column("bell", String(99), primary_key=True), Column("rings", BigInteger, nullable=False)
    ),
)
def rings(row: Ring | None, event: Recorded[Rung]) -> Ring:
    return replace(row or Ring(event.aggregate_id), rings=(row.rings if row else 0) + 1)


@projection(
    "sums",
    table=Table(
        "sums", MetaData(), Column("bell", String(99), primary_key=True), Column("rings", BigInteger, nullable=False)
    ),
)
def sums(row: Ring | None, event: Recorded[Rung]) -> Ring:
    return replace(row or Ring(event.aggregate_id), rings=(row.rings if row else 0) + event.data.n)


class Town:
    """An app with one component of every kind, its connection, and ways to break its surroundings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.public, self.foreign = f"pub-{fresh_name()}", f"post-{fresh_name()}"
        self.opens = True
        self.app = self._app()
        self.jet: Any = None

    def _app(self) -> App:
        @reactor("echo", retry=Retry(tries=2, first_s=0.01, most_s=0.1))
        async def echo(event: Recorded[Rung], to: Reaction[None]) -> None:
            await to.repository(Tower).execute("all", Tower.count, event.aggregate_id, event.data.n)

        @publication("abroad", stream=self.public, source="https://bells.example", start="beginning")
        def abroad(event: Recorded[Rung]) -> RungAbroad:
            return RungAbroad(n=event.data.n)

        @inbox("post", stream=self.foreign, subject=f"{self.foreign}.>", start="beginning")
        async def post(message: Incoming[RungAbroad], to: Reaction[None]) -> None:
            await to.repository(Tower).execute("post", Tower.count, "post", message.data.n)

        @asynccontextmanager
        async def open_deps() -> AsyncGenerator[None]:
            if not self.opens:
                raise ConnectionRefusedError("nobody at the gate")
            yield

        return App(
            fresh_name(),
            aggregates=[Bell, Tower],
            projections=[rings, sums],
            reactors=[echo, post],
            publications=[abroad],
            processes=[Nap],
            deps=open_deps,
        )

    async def ask(self, verb: str, body: object = None) -> None:
        await self.jet.client.ask(call(verb, body))

    async def make(self, name: str, **more: Any) -> None:
        await self.jet.client.ask(create_stream({"name": name, "subjects": [f"{name}.>"], **more}))

    async def edit(self, name: str, **more: Any) -> None:
        state = await self.jet.client.ask(stream_info(name))
        await self.jet.client.ask(update_stream({**state.config, **more}))

    async def ready(self) -> None:
        """Create streams, cursors and tables as a deploy does."""
        await self.make(self.public, allow_atomic=True)
        await self.make(self.foreign)
        await self.init()

    async def init(self) -> None:
        await self.jet.init()
        # In a thread: a worker of this loop may hold the file's write lock, and must run to release it.
        engine = Database(self.settings.database).sync_engine()
        await asyncio.to_thread(create_tables, engine, self.app.projections.values())

    async def of(self, name: str) -> WorkStatus:
        return next(work_status for work_status in await status(self.app, self.settings) if work_status.name == name)

    async def is_done(self, name: str) -> bool:
        work_status = await self.of(name)
        return work_status.state == "active" and not work_status.lag_events and work_status.reason is None

    def rows(self, table: str = "rings") -> int:
        # A connection that may write would wait for a worker of this loop, which could not run.
        with reading(self.settings.database) as connection:
            return sum(connection.scalars(text(f"select rings from {table}")))


@pytest.fixture
async def town(eventjet_nats: NatsServer, tmp_path: Path) -> AsyncGenerator[Town]:
    town = Town(Settings(servers=(eventjet_nats.url,), database=f"sqlite:///{tmp_path}/read.db"))
    async with town.app.connect(town.settings) as town.jet:
        yield town


Change = Callable[[Town], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A fault of one component, the reason that is reported, and its repair."""

    name: str
    does: Change
    problem: str
    mend: Change


def sql(town: Town, *statements: str) -> Awaitable[object]:
    return asyncio.to_thread(execute, town.settings.database, *statements)


async def close_deps(town: Town) -> None:
    town.opens = False


async def reopen_deps(town: Town) -> None:
    town.opens = True


async def overwrite(town: Town) -> None:
    await town.jet.client.request(f"$KV.{cursor_bucket(town.app.name)}.c.echo", b"no cursor")


async def remove_cursor(town: Town) -> None:
    await town.ask(
        f"STREAM.PURGE.KV_{cursor_bucket(town.app.name)}", {"filter": f"$KV.{cursor_bucket(town.app.name)}.c.echo"}
    )


async def init_anew(town: Town) -> None:
    await remove_cursor(town)
    await town.init()


WRONG = {
    "a publication's stream that is missing": Wrong(
        "abroad",
        lambda town: town.ask(f"STREAM.DELETE.{town.public}"),
        "it does not exist. Create it",
        lambda town: town.make(town.public, allow_atomic=True),
    ),
    "a publication's stream that lost its setting": Wrong(
        "abroad",
        lambda town: town.edit(town.public, allow_atomic=False),
        "does not take atomic batches",
        lambda town: town.edit(town.public, allow_atomic=True),
    ),
    "an inbox's stream that is missing": Wrong(
        "post", lambda town: town.ask(f"STREAM.DELETE.{town.foreign}"), "does not exist", lambda town: asyncio.sleep(0)
    ),
    "a cursor that is missing": Wrong("echo", remove_cursor, "run `eventjet init`", Town.init),
    "a cursor that cannot be read": Wrong("echo", overwrite, "cannot be read", init_anew),
    "a stream of timers that is missing": Wrong(
        "nap",
        lambda town: town.ask(f"STREAM.DELETE.{timer_stream(town.app.name)}"),
        "it does not exist. Run `eventjet init`",
        Town.init,
    ),
    "deps that cannot be opened": Wrong("echo", close_deps, "ConnectionRefusedError", reopen_deps),
    "a table that is missing": Wrong("sums", lambda town: sql(town, "drop table sums"), "sums", Town.init),
    "a table that is declared otherwise": Wrong(
        "sums",
        lambda town: sql(town, "drop table sums", "create table sums (bell varchar(99) primary key, rings text)"),
        "rings is",
        lambda town: sql(
            town, "drop table sums", "create table sums (bell varchar(99) primary key, rings bigint not null)"
        ),
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_a_fault_of_one_component_at_the_start_stops_no_other_and_its_repair_is_noticed(
    town: Town, wrong: Wrong, caplog: pytest.LogCaptureFixture
) -> None:
    await town.ready()
    await wrong.does(town)
    caplog.set_level(logging.WARNING, "eventjet")
    others = {"rings", "sums", "echo", "abroad", "post", "nap"} - {wrong.name}
    others -= {"post"} if not town.opens else set()
    async with working(town.app, town.settings):
        await town.jet.repository(Bell).execute("b", Bell.ring, 1)
        await town.jet.repository(Nap).execute("n", Nap.begin)
        for name in sorted(others):
            await eventually(lambda name=name: town.is_done(name))
        assert town.rows() == 1

        async def says_why() -> bool:
            return wrong.problem in str((await town.of(wrong.name)).reason)

        await eventually(says_why)
        records = [
            record
            for record in caplog.records
            if record.levelno >= logging.WARNING and wrong.name in record.getMessage()
        ]
        assert 1 <= len(records) <= 3
        if wrong.name != "post":  # a stream that was created again is another one
            await wrong.mend(town)
            await eventually(lambda: town.is_done(wrong.name))


async def is_done_without_sql(town: Town, name: str) -> bool:
    async with StatusReader(town.app, town.settings, [name]) as reader:
        work_status = (await reader.read()).projections[0]
    return work_status.state == "active" and not work_status.lag_events and work_status.reason is None


@pytest.mark.parametrize("lacks", ["connections", "eventjet's tables"])
async def test_an_unreachable_database_at_the_start_stops_no_component_that_needs_none(
    town: Town, database: str, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, away = make_url(database), Path(f"{make_url(database).database}.away")
    maintained = url.set(database="postgres").render_as_string(hide_password=False)

    def take_away(is_away: bool) -> None:
        if url.get_backend_name() == "sqlite":
            file = away.with_suffix("")
            if is_away:
                file.rename(away)
                file.mkdir()  # which no database opens
            else:
                file.rmdir()
                away.rename(file)
        else:
            execute(maintained, f'alter database "{url.database}" allow_connections {not is_away}')

    def make_tables() -> None:
        create_tables(Database(database).sync_engine(), town.app.projections.values())

    town.settings = replace(town.settings, database=database)
    if lacks == "connections":
        await town.ready()
        await asyncio.to_thread(take_away, True)
    else:
        await town.make(town.public, allow_atomic=True)
        await town.make(town.foreign)
        await town.jet.init()
    caplog.set_level(logging.WARNING, "eventjet")
    async with working(town.app, town.settings):
        await town.jet.repository(Bell).execute("b", Bell.ring, 1)
        await town.jet.repository(Nap).execute("n", Nap.begin)
        for name in ("echo", "abroad", "post", "nap"):
            await eventually(lambda name=name: is_done_without_sql(town, name))
        lines = [
            record.getMessage() for record in caplog.records if getattr(record, "event", "") == "eventjet.trying_again"
        ]
        assert len(lines) == 2
        assert all("The database " in line for line in lines), lines
        await asyncio.to_thread(take_away, False) if lacks == "connections" else await asyncio.to_thread(make_tables)
        for name in ("rings", "sums"):
            await eventually(lambda name=name: town.is_done(name))
    assert town.rows() == 1


FULL = {
    "bytes": ({"max_bytes": 1}, "max_bytes 1; discard new"),
    "messages": ({"max_msgs": 1}, "max_msgs 1; discard new"),
    "messages of a subject": (
        {"max_msgs_per_subject": 1, "discard_new_per_subject": True},
        "max_msgs_per_subject 1; discard new",
    ),
}


@pytest.mark.parametrize(("limit", "limits"), FULL.values(), ids=FULL.keys())
async def test_a_publication_waits_for_room_in_its_full_stream_and_names_it(
    town: Town, limit: dict[str, Any], limits: str, caplog: pytest.LogCaptureFixture
) -> None:
    await town.ready()
    caplog.set_level(logging.WARNING, "eventjet")
    free = {"max_bytes": -1, "max_msgs": -1, "max_msgs_per_subject": -1, "discard_new_per_subject": False}

    async def says_why() -> bool:
        reason = str((await town.of("abroad")).reason)
        return reason.startswith("waiting since") and f"The stream '{town.public}' is full ({limits})" in reason

    async with working(town.app, town.settings):
        await town.jet.repository(Bell).execute("b", Bell.ring, 1)
        await eventually(lambda: town.is_done("abroad"))
        await town.edit(town.public, discard="new", **limit)
        await town.jet.repository(Bell).execute("b", Bell.ring, 2)
        await eventually(says_why)
        assert "server is up" not in caplog.text
        assert sum(getattr(record, "event", "") == "eventjet.waits" for record in caplog.records) == 1
        await eventually(lambda: town.is_done("echo"))
        await town.edit(town.public, **free)
        await eventually(lambda: town.is_done("abroad"))
    assert (await town.jet.client.ask(stream_info(town.public))).messages == 2


async def test_a_reactor_waits_for_a_full_log_and_quarantines_nothing(town: Town) -> None:
    await town.ready()
    bells = town.jet.repository(Bell)
    for n in (1, 2):
        await bells.execute("b", Bell.ring, n)
    await town.edit(town.app.name, max_msgs=2)

    async def says_why() -> bool:
        work_status = await town.of("echo")
        return f"The stream '{town.app.name}' is full (max_msgs 2; discard new)" in str(work_status.reason)

    async with working(town.app, town.settings):
        await eventually(says_why)
        assert (await town.of("echo")).quarantined == 0
        await town.edit(town.app.name, max_msgs=-1)
        await eventually(lambda: town.is_done("echo"))
        assert (await town.of("echo")).quarantined == 0
    assert [recorded.data for recorded in await town.jet.repository(Tower).history("all")] == [
        Counted(bell="b", n=1),
        Counted(bell="b", n=2),
    ]


async def test_a_consumer_that_cannot_be_created_is_the_reason_of_its_inbox(town: Town) -> None:
    await town.ready()
    await town.edit(town.public, allow_atomic=True)
    state = await town.jet.client.ask(stream_info(town.foreign))
    assert state.config["max_consumers"] == -1
    await town.ask(f"STREAM.DELETE.{town.foreign}")
    await town.make(town.foreign, max_consumers=1)
    await town.ask(
        f"CONSUMER.CREATE.{town.foreign}.theirs",
        {"stream_name": town.foreign, "config": {"durable_name": "theirs", "ack_policy": "none"}},
    )
    bucket = cursor_bucket(town.app.name)
    await town.ask(f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.c.post"})
    await town.init()

    async def says_why() -> bool:
        reason = str((await town.of("post")).reason)
        return reason.startswith("waiting since") and "maximum consumers limit reached" in reason

    async with working(town.app, town.settings):
        await eventually(says_why)
        await town.ask(f"CONSUMER.DELETE.{town.foreign}.theirs")
        await eventually(lambda: town.is_done("post"))


async def test_a_reactor_that_cannot_quarantine_an_event_names_the_setting_of_its_bucket(
    eventjet_nats: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lease sessions that last longer than a look at the log and move nothing are no progress."""

    @reactor("echo", on_error="quarantine", retry=Retry(tries=3, first_s=1.5, most_s=1.5))
    async def echo(event: Recorded[Rung], to: Reaction[None]) -> None:
        raise ValueError("no such bell")

    app = App(fresh_name(), aggregates=[Bell], reactors=[echo])
    settings = Settings(servers=(eventjet_nats.url,), database=f"sqlite:///{tmp_path}/read.db")
    caplog.set_level(logging.WARNING, "eventjet")

    async def says_why() -> bool:
        reason = (await status(app, settings))[0].reason or ""
        return reason.startswith("waiting since") and "allow_atomic" in reason

    async with app.connect(settings) as jet:
        await jet.init()
        bucket = f"KV_{cursor_bucket(app.name)}"
        state = await jet.client.ask(stream_info(bucket))
        await jet.client.ask(update_stream({**state.config, "allow_atomic": False}))
        await jet.repository(Bell).execute("b", Bell.ring, 1)
        async with working(app, settings):
            await eventually(says_why)
            assert "is quarantined" not in caplog.text
            await jet.client.ask(update_stream({**state.config, "allow_atomic": True}))

            async def has_quarantined() -> bool:
                work_status = (await status(app, settings))[0]
                return work_status.quarantined == 1 and work_status.reason is None

            await eventually(has_quarantined)
    assert caplog.text.count("is quarantined") == 1


@pytest.mark.slow
async def test_a_consumer_paused_at_the_server_is_the_reason_of_its_reader(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    """A paused consumer still sends heartbeats, as if there were no events."""
    await town.ready()
    until, log = "2999-01-01T00:00:00Z", town.app.name
    durables = {"rings": "rings-r1", "echo": "echo", "nap": "nap", "abroad": "abroad", "post": f"{log}-post"}
    caplog.set_level(logging.WARNING, "eventjet")

    async def says_why(name: str) -> bool:
        reason = str((await town.of(name)).reason)
        return reason.startswith("waiting since") and f"is paused at the server until {until}" in reason

    async with working(town.app, town.settings):
        for name in durables:
            await eventually(lambda name=name: town.is_done(name))
        for name, durable in durables.items():
            stream = town.foreign if name == "post" else log
            await town.ask(f"CONSUMER.PAUSE.{stream}.{durable}", {"pause_until": until})
        await town.jet.repository(Bell).execute("b", Bell.ring, 1)
        await town.jet.repository(Nap).execute("n", Nap.begin)
        for name in durables:
            await eventually(lambda name=name: says_why(name))
        await eventually(lambda: town.is_done("sums"))
        assert town.rows() == 0
        records = [record for record in caplog.records if getattr(record, "event", "") == "eventjet.waits"]
        assert len(records) == len(durables)
        for name, durable in durables.items():
            await town.ask(f"CONSUMER.PAUSE.{town.foreign if name == 'post' else log}.{durable}", {})
        for name in durables:
            await eventually(lambda name=name: town.is_done(name))
    assert town.rows() == 1


@pytest.mark.parametrize("change", [{"allow_direct": False}, {"no_ack": True}, {"max_bytes": 1}], ids=str)
async def test_a_bucket_setting_that_blocks_cursors_is_the_reason_and_hides_no_other_status(
    town: Town, change: dict[str, Any]
) -> None:
    await town.ready()
    await town.edit(f"KV_{cursor_bucket(town.app.name)}", **change)
    statuses = {work_status.name: work_status for work_status in await status(town.app, town.settings)}
    assert {"rings", "sums", "echo", "abroad", "post", "nap"} <= statuses.keys()
    for name in ("echo", "abroad", "post", "nap"):
        assert statuses[name].state == "failed"
        assert next(iter(change)) in str(statuses[name].reason)
    assert statuses["rings"].state == "new"


async def test_a_harmless_bucket_limit_is_not_a_reason(town: Town) -> None:
    await town.ready()
    await town.edit(f"KV_{cursor_bucket(town.app.name)}", max_msgs=1)
    statuses = {work_status.name: work_status for work_status in await status(town.app, town.settings)}
    assert (statuses["echo"].state, statuses["echo"].reason) == ("active", None)


@pytest.mark.parametrize(("setting", "value"), [("no_ack", True), ("max_bytes", 100)])
async def test_timers_that_cannot_be_set_are_the_reason_of_processes_only(
    town: Town, setting: str, value: object
) -> None:
    await town.ready()
    await town.edit(timer_stream(town.app.name), **{setting: value})
    statuses = {work_status.name: work_status for work_status in await status(town.app, town.settings)}
    assert (statuses["nap"].state, setting in str(statuses["nap"].reason)) == ("failed", True)
    assert (statuses["echo"].state, statuses["echo"].reason) == ("active", None)
