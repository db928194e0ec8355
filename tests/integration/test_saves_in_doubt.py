"""A save without an answer to its first try continues over a server with stricter limits or permissions.

A refusal by such a server says nothing about the first try, so the save continues until it can read the log.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from eventjet.codec.catalog import EncodedEvent
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import new_event_id
from eventjet.errors import StoreUnavailable
from eventjet.jetstream.client import Client, connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.store import Append, NewEvent
from eventjet.settings import Settings
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.stores import fresh_jetstream

USUAL = "accounts { A { jetstream: enabled, users: [{ user: app, password: app }] } }"
LESS_OF_THE_ACCOUNT = USUAL.replace("users", "limits { max_payload: 20000 }, users")
LESS_OF_ALL = f"{USUAL}\nmax_payload: 20000"
NOTHING_HEARD = USUAL.replace("app }]", 'app, permissions: { subscribe: { deny: "_INBOX.>" } } }]')


def restart(server: NatsServer, config: str) -> None:
    server.kill()
    server._config = config
    server.start()


def reload(server: NatsServer, config: str) -> None:
    path = server.directory / "nats.conf"
    path.write_text(path.read_text().replace(server._config, config))
    os.kill(server.pid, signal.SIGHUP)


@asynccontextmanager
async def saving(
    fate: Callable[[NatsServer], Fate],
) -> AsyncGenerator[tuple[NatsServer, Client, asyncio.Task[int], list[str]]]:
    """Start a save of 30 KB whose first try has this fate; yield it with the subjects of the later requests."""
    subjects: list[str] = []

    def choose(publish: Publish) -> Fate:
        is_first = not subjects and publish.subject.startswith(f"{store.app}.")
        if is_first or subjects:
            subjects.append(publish.subject)
        return fate(server) if is_first else PASS

    with NatsServer(config=USUAL) as server:
        async with (
            fresh_jetstream((server.url.replace("//", "//app:app@"),)) as direct,
            NatsProxy(server.url) as proxy,
        ):
            settings = Settings(servers=(proxy.url.replace("//", "//app:app@"),), request_timeout_s=60)
            client = await connect(settings)
            store = JetStreamStore(direct.app, client, save_timeout_s=600)
            proxy.choose = choose
            new = NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, b'"%b"' % (b"x" * 30_000)))
            save = asyncio.create_task(store.append([Append("thing", "a", 0, 0, (new,))]))
            try:
                yield server, client, save, subjects
                async with asyncio.timeout(60):
                    assert await save == 1
                    assert await direct.last("thing", "a") == 1
                    assert (await direct.state()).last == 1
            finally:
                save.cancel()
                await client.close()


async def until(condition: Callable[[], bool], save: asyncio.Task[int]) -> None:
    """Wait for a condition while the save continues; raise the error of a save that ended before."""
    async with asyncio.timeout(60):
        while not condition():
            if save.done():
                save.result()
            await asyncio.sleep(0.01)


async def test_a_save_in_doubt_continues_under_a_smaller_limit_of_the_account() -> None:
    def fate(server: NatsServer) -> Fate:
        async def first() -> None:
            restart(server, LESS_OF_THE_ACCOUNT)

        return Fate("cut", first=first)

    async with saving(fate) as (server, client, save, subjects):
        # The second read of the log follows the second try, which is refused for its size before it is sent.
        await until(lambda: sum("MSG.GET" in subject for subject in subjects) > 1, save)
        assert client.info["max_payload"] == 20_000
        restart(server, USUAL)


async def test_a_save_in_doubt_continues_under_a_smaller_limit_of_the_server() -> None:
    def fate(server: NatsServer) -> Fate:
        async def then() -> None:
            restart(server, LESS_OF_ALL)

        return Fate(answer="cut", then=then)

    async with saving(fate) as (server, client, save, _):
        await until(lambda: client.unfit is not None, save)
        with pytest.raises(StoreUnavailable, match="it takes messages of 20,000 bytes"):
            await client.api("INFO")
        restart(server, USUAL)


@pytest.mark.usefixtures("hang_ups")
async def test_a_save_in_doubt_continues_without_the_right_to_receive_answers() -> None:
    def fate(server: NatsServer) -> Fate:
        async def then() -> None:
            reload(server, NOTHING_HEARD)

        return Fate(answer="lose", then=then)

    async with saving(fate) as (server, client, save, _):
        await until(lambda: client.unfit is not None, save)
        restart(server, USUAL)
