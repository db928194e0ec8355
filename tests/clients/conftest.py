"""The town whose log and publication each test here reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.clients.bells import Town, app_of, prepare


@pytest.fixture
async def town(eventjet_nats: NatsServer) -> AsyncGenerator[Town]:
    settings, app = Settings(servers=(eventjet_nats.url,)), app_of()
    async with app.connect(settings) as jet:
        new_town = Town(app, jet, settings)
        await prepare(new_town)
        yield new_town
