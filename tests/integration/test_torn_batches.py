"""A batch within which the account's limit is reached is refused completely or reported as torn."""

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
"""The time limit of a torn save; other saves must be faster even on a busy machine."""


@pytest.fixture
def limited() -> Iterator[str]:
    """Yield the URL of a server whose account may store 50 kB."""
    limits = "{ max_file: 50000, max_mem: 1MB }"
    account = f"accounts {{ A {{ jetstream: {limits}, users: [{{ user: app, password: app }}] }} }}"
    with NatsServer(sync_interval="1m", config=account) as server:
        yield server.url.replace("//", "//app:app@")


@pytest.mark.parametrize("events", [1, 2, 3, 7])
async def test_a_save_at_the_limit_is_refused_completely_or_reported_as_torn(limited: str, events: int) -> None:
    settings = Settings(servers=(limited,), save_timeout_s=SAVE_S)
    refusal: StoreError | None = None
    number = 0
    async with APP.connect(servers=limited, save_timeout_s=SAVE_S) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for number in range(SAVES_MAX):
            try:
                await accounts.command(f"c-{number}").execute("a", Account.deposit, *range(events))
            except StoreError as error:
                refusal = error
                break
        torn_events = (await jet.store.state()).last - number * events
        assert 0 <= torn_events < events
        assert type(refusal) is (SaveTorn if torn_events else StreamFull)
        repeated = jet.repository(Account).command(f"c-{number}")
        if isinstance(refusal, SaveTorn):
            with pytest.raises(SaveTorn):
                await jet.resolve(refusal)
            with pytest.raises(SaveTorn):
                await repeated.execute("a", Account.deposit, *range(events))
        assert len(await accounts.history("a")) == number * events + torn_events
    findings = {finding.kind: finding.count for finding in (await audit(APP, settings, engine="local")).findings}
    assert findings == ({Kind.TORN: 1} if torn_events else {})
