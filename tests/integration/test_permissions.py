"""A writer without the right to write fails at once, and nothing is stored."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import Forbidden
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import ask_once
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.topology import declare
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.testing.store_contract import new, write

USERS = """
authorization { timeout: 30, users [
  { user: admin, password: admin }
  { user: writer, password: writer, permissions {
      publish: { allow: ["shop.mine.>", "$JS.API.INFO", "$JS.API.DIRECT.GET.shop.>", "$JS.API.STREAM.MSG.GET.shop"] }
      subscribe: "_INBOX.>" } }
] }
"""


async def test_a_denied_aggregate_is_forbidden_at_once_alone_and_within_a_save_of_several() -> None:
    with NatsServer(config=USERS) as server:
        admin = Settings(servers=(server.url,), user="admin", password="admin")
        client = await connect(admin)
        await declare(client, "shop", 1)
        settings = Settings(servers=(server.url,), user="writer", password="writer", request_timeout_s=60)
        writing = await connect(settings)
        store = JetStreamStore("shop", writing, save_timeout_s=120)
        try:
            async with asyncio.timeout(30):
                assert await store.append([write("a", 0, 0, aggregate="mine")]) == 1
                with pytest.raises(Forbidden, match=r"shop\.theirs"):
                    await store.append([write("a", 0, 0, aggregate="theirs")])
                with pytest.raises(Forbidden, match=r"shop\.theirs"):
                    await store.append([
                        write("b", 0, 0, new(), new(), aggregate="theirs"),
                        write("b", 0, 0, aggregate="mine"),
                    ])  # fmt: skip
            info = await client.api("STREAM.INFO.shop")
            assert info["state"]["last_seq"] == 1
        finally:
            await store.settle()
            await writing.close()
            await client.close()


async def test_a_forbidden_inbox_is_reported_with_the_setting_for_its_prefix() -> None:
    config = USERS.replace('"_INBOX.>"', '"_INBOX_writer.>"')
    with NatsServer(config=config) as server:
        settings = Settings(servers=(server.url,), user="writer", password="writer", request_timeout_s=60)
        with pytest.raises(Forbidden, match="Set EVENTJET_INBOX_PREFIX to the inbox"):
            await connect(settings)
        with pytest.raises(Forbidden, match="Set EVENTJET_INBOX_PREFIX to the inbox"):
            await asyncio.to_thread(ask_once, Endpoint.of(settings), stream_info("shop"))
        await (await connect(replace(settings, inbox_prefix="_INBOX_writer"))).close()
