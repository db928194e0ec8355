"""Lost events of a log are reported, and no read model is made from the remaining events."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from eventjet import App
from eventjet.dev.nats import NatsServer
from eventjet.errors import LogIncomplete
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.api import call, create_stream, stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.log.integrity import FIRST
from eventjet.log.topology import IDENTITY, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.ledger_log import Ledger, eventually
from tests.logs import fresh_name

EVENTS = 6


class Damaged:
    """The bank over a log that can be purged, unlike a log that eventjet makes."""

    def __init__(self, settings: Settings) -> None:
        name = fresh_name()
        self.app = App(name, aggregates=[Account], projections=[balances], upcasters=[withdrawn_has_a_reason])
        self.settings = settings
        self.ledger = Ledger(settings, name, self.app.catalog, dict(self.app.projections))  # type: ignore[arg-type]
        metadata = {IDENTITY: fresh_name(), FIRST: "1"}
        self.ask(create_stream({**stream_config(name, 1), "deny_purge": False, "metadata": metadata}))
        create_tables(Database(settings.database).sync_engine(), self.app.projections.values())

    def ask(self, request: Any) -> Any:
        return ask_once(Endpoint.of(self.settings), request)

    def update(self, **changes: Any) -> None:
        config = self.ask(stream_info(self.app.name)).config
        self.ask(call(f"STREAM.UPDATE.{self.app.name}", {**config, **changes}))

    def purge(self, **options: Any) -> None:
        self.ask(call(f"STREAM.PURGE.{self.app.name}", options))

    async def fill(self, account: str = "a") -> int:
        async with self.app.connect(self.settings) as jet:
            accounts = jet.repository(Account)
            await accounts.execute(account, Account.open, "ada")
            for _ in range(EVENTS - 1):
                done = await accounts.execute(account, Account.deposit, Decimal(1))
        return done.position


@pytest.fixture
def bank(nats: NatsServer, database: str) -> Damaged:
    return Damaged(Settings(servers=(nats.url,), database=database))


async def test_a_log_without_its_first_events_is_not_projected(bank: Damaged) -> None:
    last = await bank.fill()
    await rebuild(bank.app, ["balances"], bank.settings, engine="local")
    bank.update(discard="old", max_msgs=2)
    message = rf"positions 1 to {last - 2} from its beginning are gone \(max_msgs is 2\)"
    with pytest.raises(LogIncomplete, match=message):
        await rebuild(bank.app, ["balances"], bank.settings, engine="local")
    with pytest.raises(LogIncomplete, match=message):
        await verify(bank.app, "balances", bank.settings, engine="local")
    status = await bank.ledger.status()
    assert (status.state, "eventjet init --repair" in str(status.reason)) == ("failed", True)
    assert len(bank.ledger.execute("select * from balances")) == 1
    async with bank.ledger.working():
        assert "from its beginning" in str((await bank.ledger.failed()).reason)


async def test_a_new_worker_does_not_begin_in_the_middle_of_a_log(bank: Damaged) -> None:
    last = await bank.fill()
    bank.purge(seq=last)
    async with bank.ledger.working():
        failed = await bank.ledger.failed()
    assert (failed.position, f"positions 1 to {last - 1}" in str(failed.reason)) == (0, True)


async def test_an_idle_worker_notices_a_purge_of_earlier_events(bank: Damaged) -> None:
    await bank.fill("b")
    last = await bank.fill("a")
    async with bank.ledger.working():
        resolved: Any = bank.app.projections["balances"]
        await bank.ledger.caught_up(last, resolved)
        bank.purge(filter=f"{bank.app.name}.account.a", keep=1)

        async def is_noted() -> bool:
            rows = bank.ledger.execute("select state, reason from eventjet_projection")
            return rows[0][0] == "failed" and f"{EVENTS - 1} between 1 and {last} are gone" in rows[0][1]

        await eventually(is_noted, "the worker to stop")


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_purged_aggregate_does_not_start_again(bank: Damaged, restarted: bool) -> None:
    await bank.fill("b")
    async with bank.app.connect(bank.settings) as jet:
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        await accounts.execute("b", Account.deposit, Decimal(1))
        bank.purge(filter=f"{bank.app.name}.account.a")
        if not restarted:
            with pytest.raises(LogIncomplete, match="its event 1 was at position"):
                await accounts.execute("a", Account.open, "eve")
    async with bank.app.connect(bank.settings) as jet:
        with pytest.raises(LogIncomplete, match=r"and .*a has no events"):
            await jet.repository(Account).execute("a", Account.open, "eve")
        await jet.repository(Account).execute("b", Account.deposit, Decimal(1))
