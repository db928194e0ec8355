"""What the server itself does with a batch within which the account's limit is reached, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventjet import Settings
from eventjet.dev.nats import NatsServer
from eventjet.errors import SaveTorn, StoreError, StreamFull
from eventjet.rebuild import Kind, audit
from tests.unit.written_logs import APP, Account

pytestmark = pytest.mark.slow

SAVES_MAX = 2_000
SAVE_S = 8.0
"""A torn save is looked at for so long; no other save may take as long on a busy machine."""


@pytest.fixture
def limited() -> Iterator[str]:
    """The URL of a server whose account may store 50 kB."""
    limits = "{ max_file: 50000, max_mem: 1MB }"
    account = f"accounts {{ A {{ jetstream: {limits}, users: [{{ user: app, password: app }}] }} }}"
    with NatsServer(sync_interval="1m", config=account) as server:
        yield server.url.replace("//", "//app:app@")


@pytest.mark.parametrize("events", [1, 2, 3, 7])
async def test_a_save_at_the_limit_is_refused_whole_or_called_torn(limited: str, events: int) -> None:
    settings = Settings(servers=(limited,), save_timeout_s=SAVE_S)
    said: StoreError | None = None
    number = 0
    async with APP.connect(servers=limited, save_timeout_s=SAVE_S) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for number in range(SAVES_MAX):
            try:
                await accounts.command(f"c-{number}").execute("a", Account.deposit, *range(events))
            except StoreError as error:
                said = error
                break
        left = (await jet.store.state()).last - number * events
        assert 0 <= left < events
        assert type(said) is (SaveTorn if left else StreamFull)
        again = jet.repository(Account).command(f"c-{number}")
        if isinstance(said, SaveTorn):
            with pytest.raises(SaveTorn):
                await jet.resolve(said)
            with pytest.raises(SaveTorn):
                await again.execute("a", Account.deposit, *range(events))
        assert len(await accounts.history("a")) == number * events + left
    found = {one.kind: one.count for one in (await audit(APP, settings, engine="local")).findings}
    assert found == ({Kind.TORN: 1} if left else {})
