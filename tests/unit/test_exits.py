"""Base exceptions from code of the application become errors, unless the task is being cancelled."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, delete
from sqlalchemy.pool import NullPool

from eventjet import App, Recorded, Settings, aggregate, event, projection, unique
from eventjet.codec.catalog import Catalog
from eventjet.commands.repository import Repositories
from eventjet.dev.nats import NatsServer
from eventjet.errors import DefinitionError, HandlerFailed, RebuildOvertaken, UnexpectedExit
from eventjet.jetstream.client import Client
from eventjet.log.memory import MemoryStore
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.fold import Fold
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.rebuild.runs import open_run, renewed
from eventjet.runtime import called
from eventjet.sql.own_tables import rebuilds
from eventjet.subscriptions.declarations import opened_deps
from eventjet.subscriptions.keyed_executor import KeyedExecutor


class OfTheLibrary(BaseException):
    """A base exception of a library."""


EXITS: dict[str, Callable[[], BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [asyncio.CancelledError(), ValueError("x")]),
    "OfTheLibrary": lambda: OfTheLibrary("closed"),
}


def exit_of(name: str) -> BaseException:
    """Return the exception whose name is the last word."""
    return EXITS[name.rpartition(" ")[2]]()


every_exit = pytest.mark.parametrize("kind", EXITS)


async def raising(kind: str) -> None:
    await asyncio.sleep(0)
    raise exit_of(kind)


async def cancelling_itself(kind: str) -> None:
    del kind
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def of_a_future_that_others_cancelled(kind: str) -> None:
    del kind
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@every_exit
async def test_called_code_raises_only_exceptions(kind: str) -> None:
    with pytest.raises(UnexpectedExit) as raised:
        await called(raising(kind))
    assert raised.value.kind == kind
    assert type(raised.value.__cause__).__name__ == kind


@pytest.mark.parametrize("work", [cancelling_itself, of_a_future_that_others_cancelled])
async def test_a_cancellation_within_called_code_does_not_cancel_its_caller(
    work: Callable[[str], Awaitable[None]],
) -> None:
    with pytest.raises(UnexpectedExit):
        await called(work(""))
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_cancellation_of_the_caller_ends_the_called_code_and_is_raised() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    calling = asyncio.ensure_future(called(work()))
    await begun.wait()
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled()
    assert ended.is_set()


@every_exit
async def test_work_that_exits_is_reported_by_its_executor(kind: str) -> None:
    executor = KeyedExecutor(4, 100)
    if kind in ("KeyboardInterrupt", "SystemExit"):
        executor.add(1, "", [("k", lambda: called(raising(kind)))])  # asyncio itself lets these end the loop
    else:
        executor.add(1, "", [("k", lambda: raising(kind))])
    with pytest.raises(UnexpectedExit, match=kind):
        await executor.failed
    await executor.close()


@event("p.made")
class Made:
    name: str


@aggregate("p")
class P:
    name: str = ""

    def make(self, name: str) -> Made:
        if name in EXITS:
            raise exit_of(name)
        return Made(name=name)

    @unique("name")
    def names(self) -> str | None:
        if self.name.startswith("claims "):
            raise exit_of(self.name)
        return self.name or None

    def evolve(self, event: Made) -> P:
        if event.name.startswith("folds "):
            raise exit_of(event.name)
        return replace(self, name=event.name)


@every_exit
async def test_a_decision_that_exits_is_an_error_and_the_next_decision_runs(kind: str) -> None:
    people = Repositories(App("exits", aggregates=[P]), MemoryStore("exits")).of(P)
    for name, error in ((kind, UnexpectedExit), (f"folds {kind}", DefinitionError), (f"claims {kind}", UnexpectedExit)):
        with pytest.raises(error):
            await people.execute("p-1", P.make, name)
    assert (await people.execute("p-1", P.make, "ada")).state.name == "ada"


TABLE = Table("rows", MetaData(), Column("id", String(9), primary_key=True), Column("n", Integer, nullable=False))


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    n: int = 0


def key(event: Recorded[Made]) -> str:
    if event.data.name.startswith("key "):
        raise exit_of(event.data.name)
    return event.aggregate_id


@projection("rows", table=TABLE, key=key)
def rows(row: Row | None, event: Recorded[Made]) -> Row:
    if event.data.name in EXITS:
        raise exit_of(event.data.name)
    return replace(row or Row(event.aggregate_id), n=event.position)


@every_exit
@pytest.mark.parametrize("prefix", ["", "key "])
async def test_a_fold_that_exits_names_the_event(kind: str, prefix: str) -> None:
    resolved = resolve(rows, Catalog([Made]))
    fold = Fold(resolved, RowCodec(TABLE, Row))
    now: Any = None
    events = [
        Recorded(Made(name=name), "p", n, n, now, str(n)) for n, name in enumerate(["ada", f"{prefix}{kind}", "eve"], 1)
    ]
    with pytest.raises(HandlerFailed, match=kind) as raised:
        fold({}, events)
    assert raised.value.position == 2


def test_ctrl_c_is_raised_as_keyboard_interrupt() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            UnexpectedExit.instead_of(KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", sorted(set(EXITS) - {"GeneratorExit"}))  # contextlib handles it
async def test_deps_that_exit_are_reported(kind: str) -> None:
    @asynccontextmanager
    async def deps() -> AsyncGenerator[None]:
        await raising(kind)
        yield

    with pytest.raises(UnexpectedExit, match=f"'exits' raised {kind}"):
        async with opened_deps(App("exits", aggregates=[P], deps=deps)):
            pass


def test_a_rebuild_that_lost_its_lease_is_stopped_at_once(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/e.db", poolclass=NullPool)
    rebuilds.create(engine)
    resolved: Any = resolve(rows, Catalog([Made]))
    with engine.begin() as connection:
        open_run(connection, "0123456789abcdef", resolved)
    stopped = threading.Event()

    def rebuild() -> None:
        with renewed(engine, "0123456789abcdef", stopped.set, every_s=0.01):
            assert not stopped.wait(0.1)
            with engine.begin() as connection:
                connection.execute(delete(rebuilds))
            assert stopped.wait(60)
            raise RuntimeError("whatever the interruption made of it")

    with pytest.raises(RebuildOvertaken):
        rebuild()


async def test_a_connection_can_be_opened_after_any_error_of_opening_it(eventjet_nats: NatsServer) -> None:
    class Failing(Client):
        raises = [RuntimeError("odd"), asyncio.CancelledError(), OfTheLibrary()]  # noqa: RUF012

        async def connect(self) -> dict[str, Any]:
            if self.raises:
                raise self.raises.pop()
            return await super().connect()

    client = Failing(Endpoint.of(Settings(servers=(eventjet_nats.url,))), 60.0)
    assert await client.api("INFO")
    await client.close()
