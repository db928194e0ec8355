"""Callers without eventjet get answers: clients with an inbox of their own, and those in the inbox of a role."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from faststream.nats import NatsBroker

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests import javascript
from tests.integration.test_replies import app, open_service, role_settings, served_with_roles  # `app` is a fixture

__all__ = ["app"]

BOUND_S = 120.0
SCRIPT = Path(__file__).with_name("call.mjs")
BODY = {"amount": "1"}

pytestmark = pytest.mark.slow

Ask = Callable[[str, str, str, Path], Awaitable[Any]]
"""A call with the server, the subject, the user or nothing, and a folder."""


def connection_of(server: str, user: str) -> tuple[str, dict[str, Any]]:
    """Return the URL and options of the Python clients."""
    return server.replace("//", f"//{user}:{user}@" if user else "//"), {
        "inbox_prefix": f"_INBOX_{user}"
    } if user else {}


async def by_nats_py(server: str, subject: str, user: str, folder: Path) -> Any:
    url, options = connection_of(server, user)
    client = await nats.connect(url, **options)
    answer = await client.request(subject, json.dumps(BODY).encode(), timeout=BOUND_S)
    await client.close()
    return json.loads(answer.data)


async def by_faststream(server: str, subject: str, user: str, folder: Path) -> Any:
    url, options = connection_of(server, user)
    async with NatsBroker(url, logger=None, **options) as broker:
        answer = await broker.request(BODY, subject, timeout=BOUND_S)
        return json.loads(answer.body)


async def by_javascript(server: str, subject: str, user: str, folder: Path) -> Any:
    shutil.copy(SCRIPT, folder)
    more = {"EVENTJET_USER": user, "EVENTJET_INBOX_PREFIX": f"_INBOX_{user}"} if user else {}
    done = await asyncio.to_thread(
        javascript.run,
        [SCRIPT.name, subject, json.dumps(BODY)],
        folder=folder,
        environ={**os.environ, "EVENTJET_SERVERS": server, **more},
        timeout_s=BOUND_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), request_timeout_s=30.0)


@pytest.mark.parametrize("ask", [by_nats_py, by_faststream, by_javascript])
async def test_a_client_without_options_is_answered(app: Any, settings: Settings, ask: Ask, tmp_path: Path) -> None:
    async with open_service(app, settings):
        answer = await ask(settings.servers[0], f"cmd.{app.name}.account.deposit.a", "", tmp_path)
        assert answer["version"] == 1


@pytest.mark.parametrize("ask", [by_nats_py, by_faststream, by_javascript])
async def test_a_client_with_the_callers_role_is_answered_in_its_inbox(ask: Ask, tmp_path: Path) -> None:
    async with served_with_roles() as (server, app), open_service(app, role_settings(server, "service")):
        answer = await ask(server.url, f"cmd.{app.name}.account.deposit.a", "caller", tmp_path)
        assert answer["version"] == 1
