"""`running` runs an app with workers on its own servers, and leaves nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.pool import NullPool

from eventjet import App, Incoming, Reaction, Recorded, aggregate, event, inbox, publication, reactor
from eventjet.errors import Unreachable
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.examples.bank.read_models import balances
from eventjet.examples.transfer.accounts import Account as Frozen
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Transfer
from eventjet.jetstream.client import connect
from eventjet.testing import running

PATIENT_S = 120.0


async def test_an_app_runs_with_its_read_models_on_servers_that_end_with_it() -> None:
    async with running(bank) as jet:
        result = await jet.repository(Account).execute("a-1", Account.open, "ada")
        await jet.caught_up("balances", position=result.position, timeout_s=PATIENT_S)
        with create_engine(jet.settings.database, poolclass=NullPool).connect() as connection:
            assert connection.execute(select(balances.table.c.owner)).scalars().all() == ["ada"]
    with pytest.raises(Unreachable):
        await connect(jet.settings)


class Mails:
    """A substitute for the mail server of the app."""

    def __init__(self) -> None:
        self.mails = self
        self.texts: list[str] = []
        self.is_sent = asyncio.Event()

    async def send(self, text: str, *, key: str) -> None:
        self.texts.append(text)
        self.is_sent.set()


async def test_processes_and_reactors_run_with_substituted_deps() -> None:
    fakes = Mails()
    async with running(transfers, deps=fakes) as jet:
        accounts, transfer_repository = jet.repository(Frozen), jet.repository(Transfer)
        await accounts.execute("ada", Frozen.deposit, Decimal(10))
        until = datetime.now(UTC) + timedelta(hours=1)
        await transfer_repository.execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=until)
        async with asyncio.timeout(PATIENT_S):
            await fakes.is_sent.wait()
        assert (await accounts.load("bob")).balance == 4
    assert len(fakes.texts) == 1
    assert transfers.deps is not None, "the app itself is as it was"


@event("bell.rung")
class Rung:
    pass


@aggregate("bell")
class Bell:
    def ring(self) -> Rung:
        return Rung()

    def evolve(self, event: Rung) -> Bell:
        return self


@reactor("ringer")
async def ringer(event: Recorded[Rung], reaction: Reaction[None]) -> None:
    """Does nothing."""


@asynccontextmanager
async def no_mail_server() -> AsyncGenerator[None]:
    raise OSError("no mail server")
    yield


async def test_deps_that_do_not_open_stop_handlers_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App("bells", aggregates=[Bell], reactors=[ringer], deps=no_mail_server)
    async with running(app) as jet:
        assert (await jet.repository(Bell).execute("b", Bell.ring)).position == 1
    assert "no mail server" in caplog.text


async def test_an_app_without_subscriptions_runs_without_workers() -> None:
    async with running(App("bells", aggregates=[Bell])) as jet:
        assert (await jet.repository(Bell).execute("b", Bell.ring)).position == 1


@event("bell.heard")
class Heard:
    by: str


@publication("bells", stream="town", source="https://town.example/bells")
def bells(event: Recorded[Rung]) -> Heard:
    return Heard(by=event.aggregate_id)


async def test_the_streams_of_publications_and_inboxes_are_created() -> None:
    is_heard = asyncio.Event()

    @inbox("listener", stream="town", subject="town.bells.>")
    async def listener(message: Incoming[Heard], to: Reaction) -> None:
        assert message.data == Heard(by="b")
        is_heard.set()

    async with running(App("bells", aggregates=[Bell], reactors=[listener], publications=[bells])) as jet:
        await jet.repository(Bell).execute("b", Bell.ring)
        async with asyncio.timeout(PATIENT_S):
            await is_heard.wait()
