"""A thread renews cursors while the event loop is blocked, beside the writes of the loop itself."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from eventjet import App
from eventjet.dev.nats import NatsServer
from eventjet.errors import CursorFenced
from eventjet.jetstream.client import Client
from eventjet.nats.endpoint import Endpoint
from eventjet.subscriptions.cursor_store import Cursors, StoredCursor
from eventjet.subscriptions.loop_watch import LoopWatch, RunningTry
from eventjet.subscriptions.status import status
from tests.integration.reacting import PATIENT_S, Bell, Town, app_of, counted, eventually, working
from tests.logs import fresh_name

LEASE_S = 0.6
NOBODY = Endpoint(("nats://127.0.0.1:9",))


@dataclass
class Watched:
    """A cursor of this process, and the watch of its event loop."""

    app: App
    cursors: Cursors
    stored: StoredCursor
    endpoint: Endpoint
    running: RunningTry = field(init=False)

    def __post_init__(self) -> None:
        self.running = RunningTry("echo", 5, 1, self.stored, PATIENT_S)

    def watch(self, endpoint: Endpoint | None = None) -> LoopWatch:
        return LoopWatch(endpoint or self.endpoint, self.app.name, "me", LEASE_S)


@pytest.fixture
async def watched(eventjet_nats: NatsServer) -> AsyncIterator[Watched]:
    app, endpoint = app_of(Town()), Endpoint((eventjet_nats.url,))
    async with app.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
    client = Client(endpoint, PATIENT_S)
    await client.connect()
    cursors = Cursors(client, app.name)
    stored = await cursors.read("echo")
    await cursors.write(stored, stored.cursor.taken("me", 1))
    yield Watched(app, cursors, stored, endpoint)
    await client.close()


def block_until(condition: Callable[[], object]) -> None:
    """Block the event loop until the condition holds."""
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


async def test_a_cursor_is_renewed_and_a_try_counted_while_the_loop_is_blocked(watched: Watched) -> None:
    stored, sequence = watched.stored, watched.stored.sequence
    async with watched.watch().watching() as watch:
        with watch.trying(watched.running):
            block_until(lambda: stored.cursor.tries == ((5, 1),))
            counted_at = stored.sequence
            block_until(lambda: stored.sequence > counted_at > sequence)
        assert watched.running.blocked_s >= LEASE_S / 2
        await watched.cursors.write(stored, stored.cursor)
    assert (await watched.cursors.read("echo")).cursor.tries == ((5, 1),)


async def test_a_delayed_write_of_the_loop_keeps_the_count_of_the_watch(watched: Watched) -> None:
    """The write was about to be sent, or waited for its answer."""
    stored = watched.stored
    async with watched.watch().watching() as watch:
        for turns in range(1, 5):
            cursor = replace(stored.cursor.untried({5}), reason=f"after {turns} turns")
            await watched.cursors.write(stored, cursor)
            with watch.trying(watched.running):
                writing = asyncio.ensure_future(watched.cursors.write(stored, cursor))
                for _ in range(turns):
                    await asyncio.sleep(0)
                before = stored.value
                block_until(lambda: stored.value is not before and stored.cursor.tries)  # noqa: B023
            await writing
            current = await watched.cursors.read("echo")
            assert (current.cursor.tries, current.cursor.reason) == (((5, 1),), f"after {turns} turns")
            assert current.sequence == stored.sequence


async def test_a_cursor_that_another_worker_took_is_not_written(watched: Watched) -> None:
    stored = watched.stored
    other = await watched.cursors.read("echo")
    await watched.cursors.write(other, other.cursor.taken("other", 1))
    async with watched.watch().watching() as watch:
        with watch.trying(watched.running):
            block_until(lambda: watched.running.blocked_s >= LEASE_S)
    with pytest.raises(CursorFenced):
        await watched.cursors.write(stored, stored.cursor)
    assert (await watched.cursors.read("echo")).sequence == other.sequence


async def test_a_watch_without_a_server_warns_once_and_connects_only_for_tries(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = replace(watched.running, timeout_s=-PATIENT_S)
    with caplog.at_level(logging.DEBUG):
        async with watched.watch(NOBODY).watching() as watch:
            with watch.trying(nothing):  # the lease is given up already
                block_until(lambda: nothing.blocked_s >= 2 * LEASE_S)
            assert "leases of a blocked event loop" not in caplog.text
            with watch.trying(watched.running):
                block_until(lambda: watched.running.blocked_s >= LEASE_S)
    assert caplog.text.count("The leases of a blocked event loop") == 1
    assert caplog.text.count("echo blocked the event loop for") == 2


async def test_the_watch_ends_without_waiting_for_threads_of_the_loop(watched: Watched) -> None:
    """Cancelled handlers may occupy all threads."""
    cut_off, loop = threading.Event(), asyncio.get_running_loop()
    threads = [loop.run_in_executor(None, cut_off.wait) for _ in range(100)]
    try:
        async with asyncio.timeout(PATIENT_S), watched.watch().watching():
            pass
        assert not any(thread.name == "eventjet loop watch" for thread in threading.enumerate())
    finally:
        cut_off.set()
        await asyncio.gather(*threads)


async def test_a_subscription_stopped_by_a_blocking_handler_continues_with_fixed_code(
    eventjet_nats: NatsServer,
) -> None:
    town = Town()
    app = app_of(town, name=fresh_name(), on_error="stop")
    async with app.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
        done = await jet.repository(Bell).execute("b", Bell.ring, 1)
        assert jet.client is not None
        cursors = Cursors(jet.client, app.name)
        stored = await cursors.read("echo")
        await cursors.write(stored, stored.cursor.tried(done.position, 8))
        (shown,) = await status(app, jet.settings)
        assert f"blocked the event loop in 8 tries at position {done.position}." in str(shown.reason)
        async with working(app, jet.settings):
            await eventually(lambda: counted(jet))
            await eventually(lambda: _has_no_tries(cursors))
        assert [attempt for *_, attempt in town.heard] == [9]


async def _has_no_tries(cursors: Cursors) -> bool:
    return (await cursors.read("echo")).cursor.tries == ()
