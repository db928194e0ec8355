"""A recreated stream is another log: caches and positions of the first log are not used for it."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from eventjet import App, Blob, Imported, Jet
from eventjet.dev.nats import NatsServer
from eventjet.errors import HistoryBroken, IdentityLost, LogReplaced, LogUnusable, NotCaughtUp, Refused
from eventjet.examples.bank.account import Account, Deposited, InsufficientFunds, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.api import call
from eventjet.jetstream.connection import ask_once
from eventjet.log.store import Append
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.blobs import Document, Filed, documents
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.integration.ledger_log import Ledger
from tests.logs import fresh_name


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], projections=[balances], upcasters=[withdrawn_has_a_reason])


@pytest.fixture
def settings(nats: NatsServer, database: str) -> Settings:
    # No request may time out and be repeated: a late request would be stored in the recreated log.
    return Settings(servers=(nats.url,), database=database, save_timeout_s=60.0, request_timeout_s=60.0)


@pytest.fixture
async def jet(app: App, settings: Settings) -> AsyncIterator[Jet]:
    async with app.connect(settings) as jet:
        await jet.init()
        yield jet


async def delete_stream(nats: NatsServer, stream: str) -> None:
    """Delete the stream, and wait until its files are gone.

    The server (2.15.1) answers once it has renamed their folder. A stream that is recreated, deleted and recreated
    before the first folder is gone begins with its old messages.
    """
    ask_once(Endpoint((nats.url,)), call(f"STREAM.DELETE.{stream}"))
    deadline = time.monotonic() + 60
    while any(nats.directory.glob(f"data/jetstream/*/streams/*{stream}")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def recreate_log(nats: NatsServer, app: App, settings: Settings, owner: str, deposited: int) -> int:
    """Delete and recreate the stream, as another process would; return the position of its second event."""
    await delete_stream(nats, app.name)
    async with app.connect(settings) as other:
        await other.init()
        accounts = other.repository(Account)
        await accounts.execute("a", Account.open, owner)
        return (await accounts.execute("a", Account.deposit, Decimal(deposited))).position


async def test_a_cached_state_is_dropped_when_the_log_is_recreated(
    nats: NatsServer, app: App, jet: Jet, settings: Settings
) -> None:
    accounts = jet.repository(Account)
    for outcome in ("saves", "refuses", "records nothing"):
        await accounts.execute("a", Account.open, "ada")
        deposited = await accounts.execute("a", Account.deposit, Decimal(100))
        assert await recreate_log(nats, app, settings, "eve", 1) == deposited.position
        if outcome == "saves":
            done = await accounts.execute("a", Account.deposit, Decimal(5))
            assert (done.state.owner, done.state.balance) == ("eve", Decimal(6))
            assert done.log != deposited.log
        elif outcome == "refuses":
            with pytest.raises(InsufficientFunds):
                await accounts.execute("a", Account.withdraw, Decimal(50))
        else:
            nothing = await accounts.execute("a", Account.open, "ada")
            assert (nothing.events, nothing.state.owner) == ((), "eve")
        await delete_stream(nats, app.name)
        await jet.init()


async def test_a_command_of_a_deleted_log_is_executed_in_the_new_log(
    nats: NatsServer, app: App, jet: Jet, settings: Settings
) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("a", Account.open, "ada")
    once = accounts.command("c-1")
    first = await once.execute("a", Account.deposit, Decimal(100))
    await recreate_log(nats, app, settings, "eve", 1)
    again = await once.execute("a", Account.deposit, Decimal(100))
    assert (again.state.owner, again.state.balance) == ("eve", Decimal(101))
    assert again.token != first.token


async def test_a_save_that_reaches_a_recreated_log_is_reported(nats: NatsServer, app: App, settings: Settings) -> None:
    async with NatsProxy(nats.url) as proxy, app.connect(replace(settings, servers=(proxy.url,))) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        await accounts.execute("a", Account.deposit, Decimal(100))

        async def recreate() -> None:
            await recreate_log(nats, app, settings, "eve", 1)

        def choose(publish: Publish) -> Fate:
            if not publish.subject.startswith(f"{app.name}.account."):
                return PASS
            proxy.choose = lambda _: PASS
            return Fate(first=recreate)

        proxy.choose = choose
        with pytest.raises(LogReplaced, match=r"this log has stored it, up to position 3.*decide again"):
            await accounts.execute("a", Account.withdraw, Decimal(50))
        assert (await accounts.load("a")).balance == -49  # as the error says, and it is for the application to mend
        done = await accounts.execute("a", Account.deposit, Decimal(60))
        assert (done.state.owner, done.state.balance) == ("eve", 11)


async def test_a_transaction_decides_on_states_of_one_log(
    nats: NatsServer, app: App, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with app.connect(settings) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        await accounts.execute("a", Account.open, "ada")
        await accounts.execute("a", Account.deposit, Decimal(100))
        load = accounts.executor.load

        async def load_while_the_log_is_recreated(aggregate_id: str, *options: Any) -> Any:
            state = await load(aggregate_id, *options)
            if state.state.owner == "ada":
                await recreate_log(nats, app, settings, "eve", 1)
            return state

        monkeypatch.setattr(accounts.executor, "load", load_while_the_log_is_recreated)
        withdrawal = accounts.decide("a", Account.withdraw, Decimal(50))
        with pytest.raises(InsufficientFunds):
            await jet.transact(withdrawal, accounts.decide("b", Account.deposit, Decimal(50)))


class SlowFile(io.BytesIO):
    """A file whose second reading waits."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.readings = 0

    def seek(self, *args: Any) -> int:
        self.readings += 1
        return super().seek(*args)

    def read(self, size: int | None = -1) -> bytes:
        if self.readings > 1:
            self.began.set()
            assert self.goes_on.wait(60)
        return super().read(size)


async def test_a_decision_is_made_again_if_the_log_is_recreated_during_an_upload(
    nats: NatsServer, settings: Settings
) -> None:
    app = documents(fresh_name())
    states: list[Document] = []

    def file(document: Document, scan: Blob) -> Filed:
        states.append(document)
        return Filed(scan=scan)

    async with app.connect(settings) as jet:
        await jet.init()
        first, content = Blob.of(b"first"), SlowFile(b"second")
        await jet.repository(Document).execute("d-1", file, first)
        filing = asyncio.create_task(jet.repository(Document).execute("d-1", file, Blob.from_file(content)))
        assert await asyncio.to_thread(content.began.wait, 60)
        await delete_stream(nats, app.name)
        async with app.connect(settings) as other:
            await other.init()
            noted = await other.repository(Document).execute("d-1", Document.note, "another")
        assert (await jet.log()).identity == noted.log
        content.goes_on.set()
        done = await filing
        assert (done.log, done.version) == (noted.log, noted.version + 1)
        assert states == [Document(), Document(scan=first), Document()]


async def test_a_table_of_another_log_never_reaches_a_position(nats: NatsServer, app: App, settings: Settings) -> None:
    create_tables(Database(settings.database).sync_engine(), app.projections.values())
    there = Ledger(settings, app.name, app.catalog, dict(app.projections))  # type: ignore[arg-type]
    async with app.connect(settings) as jet:
        await jet.init()
        gone = await jet.repository(Account).execute("a", Account.open, "ada")
        async with there.working():
            await jet.caught_up(balances, position=gone.position, timeout_s=60)
    await recreate_log(nats, app, settings, "eve", 1)
    async with app.connect(settings) as jet:
        with pytest.raises(NotCaughtUp, match="of another log"):
            await jet.caught_up(balances, position=1, timeout_s=60)
        done = await jet.repository(Account).execute("b", Account.open, "bob")
        with pytest.raises(NotCaughtUp, match="of another log"):
            await jet.caught_up(balances, token=done.token, timeout_s=60)
        await jet.caught_up(balances, token=gone.token, timeout_s=60)  # the table still has that write


def deposits() -> Iterator[Imported]:
    yield Imported(Account, "a", Opened(owner="ada"))
    yield from (Imported(Account, "a", Deposited(amount=Decimal(1))) for _ in range(2_000))


async def test_an_import_does_not_continue_in_another_log(
    nats: NatsServer, app: App, jet: Jet, settings: Settings
) -> None:
    stored = asyncio.Event()

    async def events() -> AsyncIterator[Imported]:
        for number, imported in enumerate(deposits()):
            if number == 1_500:
                await stored.wait()
                await recreate_log(nats, app, settings, "eve", 1)
            yield imported

    with pytest.raises(Refused, match=r"it began in the log .*Run it again"):
        await jet.append_many(events(), source="till", progress=lambda _: stored.set())
    assert (await jet.log()).last == 2


async def test_an_import_batch_is_not_stored_in_a_log_that_was_recreated_meanwhile(
    nats: NatsServer, app: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = jet.store.append

    async def late(writes: Sequence[Append]) -> int:
        """Replace the log after the import has read it and before the batch is sent."""
        monkeypatch.undo()
        await recreate_log(nats, app, settings, "eve", 1)
        return await append(writes)

    monkeypatch.setattr(jet.store, "append", late)
    with pytest.raises(Refused, match=r"it began in the log .*Run it again"):
        await jet.append_many(deposits(), source="till")
    assert (await jet.log()).last == 2


async def test_a_stream_that_reappears_with_its_events_is_not_a_new_log(app: App) -> None:
    """The server uses old files in the stream's folder; here the stream's configuration was lost."""
    with NatsServer() as server:
        settings = Settings(servers=(server.url,))
        async with app.connect(settings) as jet:
            await jet.init()
            await jet.repository(Account).execute("a", Account.open, "ada")
        server.stop()
        (folder,) = server.directory.glob(f"data/jetstream/*/streams/{app.name}")
        for name in ("meta.inf", "meta.sum"):
            (folder / name).unlink()
        server.start()
        async with app.connect(settings) as jet:
            with pytest.raises(LogUnusable, match="the server made it with events up to position 1 in it"):
                await jet.init()
            with pytest.raises(IdentityLost):
                await jet.init()


async def test_a_lost_beginning_of_the_log_is_noticed_without_advisories(app: App) -> None:
    """The newest event of the account still exists, and this user may not hear the server's advisories."""
    config = (
        'authorization { timeout: 30, users = [ {user: "all", password: "x"}, '
        '{user: "some", password: "x", permissions: { subscribe: { allow: ["_INBOX.>"] } } } ] }'
    )
    with NatsServer(config=config) as server:
        options = {"servers": server.url, "password": "x", "request_timeout_s": 60.0, "save_timeout_s": 60.0}
        async with app.connect(user="all", **options) as admin, app.connect(user="some", **options) as jet:
            await admin.init()
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.open, "ada")
            await accounts.execute("a", Account.deposit, Decimal(40))
            assert admin.client is not None
            stream = await admin.client.api(f"STREAM.INFO.{app.name}")
            await admin.client.api(f"STREAM.UPDATE.{app.name}", {**stream["config"], "discard": "old", "max_msgs": 1})

            async def look_until_refused() -> None:
                async with asyncio.timeout(120):
                    while True:
                        await accounts.execute("a", lambda _: None)

            with pytest.raises(HistoryBroken, match="version 2 follows version 0"):
                await look_until_refused()
