"""A connection belongs to the loop and the process that opened it: every other loop is refused at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from eventjet import App, Imported, Jet, Repository, served
from eventjet.dev.nats import NatsServer
from eventjet.errors import OutcomeUnknown, UsageError
from eventjet.examples.bank.account import Account, AccountEvent, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.api import stream_info
from eventjet.testing import world
from tests.logs import fresh_name

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

Use = Callable[[], Coroutine[Any, Any, object]]
BOUND_S = 60.0
ANOTHER, CLOSED, FORK = "was used from another one", "that loop is closed", "in a fork of that process"


@pytest.fixture
def app() -> App:
    upcasters, decisions = [withdrawn_has_a_reason], [served(Account, Account.open), served(Account, Account.deposit)]
    return App(fresh_name(), aggregates=[Account], projections=[balances], upcasters=upcasters, served=decisions)


@asynccontextmanager
async def jet_of(app: App, server: NatsServer, *, in_memory: bool = False) -> AsyncGenerator[Jet]:
    async with app.in_memory() if in_memory else app.connect(servers=server.url, request_timeout_s=BOUND_S) as jet:
        if not in_memory:
            await jet.init()
        yield jet


def uses_of(jet: Jet) -> dict[str, Use]:
    """Return every awaitable operation of a connection."""
    accounts = jet.repository(Account)
    unknown = OutcomeUnknown((), (), "", ())
    return {
        "execute": lambda: accounts.execute("a", Account.deposit, Decimal(1)),
        "command": lambda: accounts.command("c").execute("a", Account.deposit, Decimal(1)),
        "load": lambda: accounts.load("a"),
        "load as it was": lambda: accounts.load("a", version=1),
        "history": lambda: accounts.history("a"),
        "transact": lambda: jet.transact(accounts.decide("a", Account.deposit, Decimal(1))),
        "append_many": lambda: jet.append_many([Imported(Account, "b", Opened(owner="x"))], source="s"),
        "caught_up": lambda: jet.caught_up("balances", position=1),
        "resolve": lambda: jet.resolve(unknown),
        "init": jet.init,
        "log": jet.log,
        "skipped": jet.skipped,
        "close": jet.close,
        "tail": lambda: first(jet.tail()),
        "service": lambda: enter(jet.service()),
    }


async def first(events: Any) -> object:
    return await anext(events)


async def enter(block: Any) -> object:
    return await block.__aenter__()


async def leave(block: Any) -> object:
    return await block.__aexit__(None, None, None)


async def outcome_elsewhere(use: Use) -> object:
    """Return what an operation returned or raised in the loop of another thread."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[object] = loop.create_future()

    def run() -> None:
        try:
            outcome: object = asyncio.run(use())
        except BaseException as raised:  # noqa: BLE001  it is what the test asks for
            outcome = raised
        loop.call_soon_threadsafe(result.set_result, outcome)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(BOUND_S):
        return await result


async def assert_refused_elsewhere(use: Use, why: str = ANOTHER) -> None:
    outcome = await outcome_elsewhere(use)
    assert isinstance(outcome, UsageError), outcome
    assert why in str(outcome)


async def assert_usable(jet: Jet, events: int) -> None:
    """Assert that the connection's own loop records the next event, and reads all events."""
    accounts = jet.repository(Account)
    async with asyncio.timeout(BOUND_S):
        result = await accounts.execute("a", Account.deposit, Decimal(1))
        assert (await accounts.load("a"), result.version) == (result.state, events)
        assert [event.version async for event in jet.tail()] == list(range(1, events + 1))


@pytest.mark.parametrize("in_memory", [False, True], ids=["server", "memory"])
async def test_another_loop_is_refused_at_once_and_takes_no_lock(
    app: App, eventjet_nats: NatsServer, in_memory: bool
) -> None:
    async with jet_of(app, eventjet_nats, in_memory=in_memory) as jet:
        await assert_refused_elsewhere(lambda: jet.repository(Account).execute("a", Account.open, "nobody"))
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        async with accounts.executor.cache.lock("a")[0]:
            for name, use in uses_of(jet).items():
                outcome = await outcome_elsewhere(use)
                assert isinstance(outcome, UsageError), (name, outcome)
                assert ANOTHER in str(outcome), name
        await assert_usable(jet, 2)


async def test_the_client_and_store_of_a_connection_belong_to_its_loop(app: App, eventjet_nats: NatsServer) -> None:
    async with jet_of(app, eventjet_nats) as jet:
        client, store, name = jet.client, jet.store, app.name
        assert client is not None
        uses: list[Use] = [
            lambda: client.api("INFO"),
            lambda: client.ask(stream_info(name)),
            lambda: client.serve("news", print),
            client.close,
            lambda: store.history("account", "a"),
            lambda: first(store.records()),
            lambda: store.at(1),
            store.state,
        ]
        for use in uses:
            await assert_refused_elsewhere(use)
        await assert_usable(jet, 1)
        assert len(await store.history("account", "a")) == 1


async def test_a_caller_of_served_commands_belongs_to_one_loop(app: App, eventjet_nats: NatsServer) -> None:
    async with jet_of(app, eventjet_nats) as jet, jet.service(), app.client(servers=eventjet_nats.url) as remote:
        accounts = remote.repository(Account)
        await assert_refused_elsewhere(lambda: accounts.execute("a", Account.open, "nobody"))
        await assert_refused_elsewhere(lambda: accounts.command("c").execute("a", Account.open, "nobody"))
        async with asyncio.timeout(BOUND_S):
            assert (await accounts.execute("a", Account.open, "ada")).version == 1


async def test_a_block_that_another_loop_tries_to_leave_stays_open(app: App, eventjet_nats: NatsServer) -> None:
    connecting, calling = app.connect(servers=eventjet_nats.url), app.client(servers=eventjet_nats.url)
    jet = await connecting.__aenter__()
    await jet.init()
    serving = jet.service()
    await serving.__aenter__()
    remote = await calling.__aenter__()
    for block in (serving, connecting, calling):
        await assert_refused_elsewhere(lambda block=block: leave(block))
    await remote.repository(Account).execute("a", Account.open, "ada")
    await assert_usable(jet, 2)
    for block in (calling, serving, connecting):
        await leave(block)


async def test_a_tail_belongs_to_the_loop_that_began_it(app: App, eventjet_nats: NatsServer) -> None:
    async with jet_of(app, eventjet_nats) as jet:
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        tail: Any = jet.tail(follow=True)
        assert (await anext(tail)).version == 1
        await assert_refused_elsewhere(lambda: first(tail))
        waiting = asyncio.ensure_future(anext(tail))
        await assert_refused_elsewhere(lambda: first(tail))
        await assert_refused_elsewhere(tail.aclose)
        await accounts.execute("a", Account.deposit, Decimal(1))
        async with asyncio.timeout(BOUND_S):
            assert (await waiting).version == 2
        await tail.aclose()
        assert [event async for event in tail] == []


async def test_a_thread_hands_its_calls_to_the_loop_of_the_connection(app: App, eventjet_nats: NatsServer) -> None:
    async with jet_of(app, eventjet_nats) as jet:
        accounts, loop = jet.repository(Account), asyncio.get_running_loop()

        def view() -> int:
            execution = accounts.execute("a", Account.open, "ada")
            return asyncio.run_coroutine_threadsafe(execution, loop).result(BOUND_S).version

        assert await asyncio.to_thread(view) == 1


def test_each_asyncio_run_is_a_loop_of_its_own(app: App, eventjet_nats: NatsServer) -> None:
    opening = app.connect(servers=eventjet_nats.url)

    async def open_jet() -> Jet:
        jet = await opening.__aenter__()
        await jet.init()
        return jet

    jet = asyncio.run(open_jet())
    for use in (*uses_of(jet).values(), lambda: leave(opening)):
        with pytest.raises(UsageError, match=CLOSED):
            asyncio.run(asyncio.wait_for(use(), BOUND_S))


def test_a_paused_loop_can_use_its_connection_again(app: App, eventjet_nats: NatsServer) -> None:
    with asyncio.Runner() as own:
        opening = app.connect(servers=eventjet_nats.url)
        jet = own.run(opening.__aenter__())
        own.run(jet.init())
        for use in (*uses_of(jet).values(), lambda: leave(opening)):
            with pytest.raises(UsageError, match=ANOTHER):
                asyncio.run(asyncio.wait_for(use(), BOUND_S))
        own.run(assert_usable(jet, 1))
        own.run(leave(opening))


async def test_a_world_in_memory_belongs_to_one_loop(app: App) -> None:
    async with world(app, now=datetime(2030, 1, 1, tzinfo=UTC)) as memory_world:
        await assert_refused_elsewhere(memory_world.settle)
        await memory_world.settle()
        await assert_usable(memory_world.jet, 1)


# Forks.


async def test_a_forked_child_must_open_its_own_connection(app: App, eventjet_nats: NatsServer) -> None:
    async with jet_of(app, eventjet_nats) as jet, app.client(servers=eventjet_nats.url) as remote:
        uses = uses_of(jet)
        uses["remote"] = lambda: remote.repository(Account).execute("a", Account.open, "nobody")

        async def own() -> int:
            async with app.connect(servers=eventjet_nats.url) as own_jet:
                return (await own_jet.repository(Account).execute("a", Account.open, "ada")).version

        def child(pipe: Connection) -> None:
            signal.alarm(int(BOUND_S))
            for name, use in uses.items():
                pipe.send((name, outcome_of(use)))
            pipe.send(("own", outcome_of(own)))

        forking = multiprocessing.get_context("fork")
        receiver, sender = forking.Pipe()
        process = forking.Process(target=child, args=(sender,))
        process.start()
        sender.close()
        for name in uses:
            assert await asyncio.to_thread(receiver.recv) == (name, f"UsageError: {FORK}"), name
        assert await asyncio.to_thread(receiver.recv) == ("own", "1")
        await asyncio.to_thread(process.join, BOUND_S)
        assert process.exitcode == 0
        await assert_usable(jet, 2)


def outcome_of(use: Use) -> str:
    """Return the outcome as text for a pipe."""
    try:
        return str(asyncio.run(use()))
    except UsageError as error:
        return f"UsageError: {FORK if FORK in str(error) else error}"


async def test_a_fork_out_of_a_running_loop_is_refused(app: App, eventjet_nats: NatsServer) -> None:
    async with jet_of(app, eventjet_nats) as jet:
        accounts = jet.repository(Account)
        assert await refusal_in_fork(lambda: accounts.execute("a", Account.open, "nobody")) == FORK
        await assert_usable(jet, 1)


async def refusal_in_fork(use: Callable[[], Awaitable[object]]) -> str:
    """Return the refusal of the operation in a forked child that continues this coroutine."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(int(BOUND_S))
        try:
            await use()
        except UsageError as error:
            os.write(writing, FORK.encode() if FORK in str(error) else str(error).encode())
        finally:
            os._exit(0)
    return await asyncio.to_thread(child_output, child, reading, writing)


def test_a_preforked_worker_with_the_loop_of_its_parent_is_refused(app: App, eventjet_nats: NatsServer) -> None:
    with asyncio.Runner() as runner:
        opening = app.connect(servers=eventjet_nats.url)
        jet = runner.run(opening.__aenter__())
        runner.run(jet.init())
        accounts: Repository[Account, AccountEvent] = jet.repository(Account)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(int(BOUND_S))
            try:
                runner.run(accounts.execute("a", Account.open, "nobody"))
            except UsageError as error:
                os.write(writing, FORK.encode() if FORK in str(error) else str(error).encode())
            finally:
                os._exit(0)
        assert child_output(child, reading, writing) == FORK
        runner.run(assert_usable(jet, 1))
        runner.run(leave(opening))


def child_output(child: int, reading: int, writing: int) -> str:
    """Return what a child wrote before it ended."""
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    return output
