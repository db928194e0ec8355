"""A save whose first try had no answer, over a server that takes less, or lets nothing be heard, meanwhile.

What such a server refuses says nothing of the first try, so the save goes on until its log is looked at.
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
    """A save of 30 KB whose first try has this fate, and the subjects of what is asked after it."""
    asked: list[str] = []

    def choose(publish: Publish) -> Fate:
        is_first = not asked and publish.subject.startswith(f"{store.app}.")
        if is_first or asked:
            asked.append(publish.subject)
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
                yield server, client, save, asked
                async with asyncio.timeout(60):
                    assert await save == 1
                    assert await direct.last("thing", "a") == 1
                    assert (await direct.state()).last == 1
            finally:
                save.cancel()
                await client.close()


async def until(condition: Callable[[], bool], save: asyncio.Task[int]) -> None:
    """Wait for what happens while the save goes on; raises what ended it before."""
    async with asyncio.timeout(60):
        while not condition():
            if save.done():
                save.result()
            await asyncio.sleep(0.01)


async def test_a_save_in_doubt_goes_on_where_the_account_may_send_less_meanwhile() -> None:
    def fate(server: NatsServer) -> Fate:
        async def first() -> None:
            restart(server, LESS_OF_THE_ACCOUNT)

        return Fate("cut", first=first)

    async with saving(fate) as (server, client, save, asked):
        # The second look is after the second try, which is refused for its size before it is sent.
        await until(lambda: sum("MSG.GET" in subject for subject in asked) > 1, save)
        assert client.info["max_payload"] == 20_000
        restart(server, USUAL)


async def test_a_save_in_doubt_goes_on_where_the_server_takes_too_little_meanwhile() -> None:
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
async def test_a_save_in_doubt_goes_on_where_no_answer_may_be_heard_meanwhile() -> None:
    def fate(server: NatsServer) -> Fate:
        async def then() -> None:
            reload(server, NOTHING_HEARD)

        return Fate(answer="lose", then=then)

    async with saving(fate) as (server, client, save, _):
        await until(lambda: client.unfit is not None, save)
        restart(server, USUAL)
