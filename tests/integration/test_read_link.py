"""Histories are read over their own connection, also concurrently, without rights, and after a server's failure."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from decimal import Decimal

import pytest

from eventjet import App, Imported
from eventjet.dev.nats import NatsServer
from eventjet.errors import Forbidden, LogUnusable, StoreError, StoreUnavailable
from eventjet.examples.bank.account import Account, Deposited
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.client import Client
from eventjet.log.jetstream import PageReader
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.logs import fresh_name
from tests.stores import retry_for

ACCOUNTS = 100
LONG = 2_500


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


def deposits() -> list[Imported]:
    deposit = Deposited(amount=Decimal(1))
    short = [Imported(Account, f"a-{number}", deposit) for number in range(ACCOUNTS) for _ in range(number % 7)]
    return short + [Imported(Account, "long", deposit) for _ in range(LONG)]


async def lengths(app: App, reads: PageReader) -> list[int]:
    async def length(name: str) -> int:
        records = [record async for page in reads.pages(f"{app.name}.account.{name}", 1) for record in page]
        assert [record[0] for record in records] == sorted({record[0] for record in records})
        assert {record[2] for record in records} <= {f"{app.name}.account.{name}".encode()}
        return len(records)

    return await asyncio.gather(*(length(f"a-{number}") for number in range(ACCOUNTS)), length("long"))


EXPECTED = [number % 7 for number in range(ACCOUNTS)] + [LONG]


async def test_a_silent_server_ends_the_wait_and_the_connection(app: App) -> None:
    with NatsServer() as server:
        async with app.connect(servers=server.url) as jet:
            await jet.init()
            await jet.append_many(deposits(), source="x")
        reads = PageReader(app.name, client := Client(Endpoint.of(Settings(servers=(server.url,))), 30), retry_for(0))
        assert await lengths(app, reads) == EXPECTED
        server.pause()
        client.timeout_s = 1
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
            await lengths(app, reads)
        assert time.monotonic() - started < 25
        client.timeout_s = 30
        server.resume()
        assert await lengths(app, reads) == EXPECTED
        await client.close()


async def test_a_lost_connection_is_opened_again_for_its_requests(app: App) -> None:
    with NatsServer() as server:
        async with app.connect(servers=server.url) as jet:
            await jet.init()
            await jet.append_many(deposits(), source="x")
        reads = PageReader(app.name, client := Client(Endpoint.of(Settings(servers=(server.url,))), 10), retry_for(60))
        assert await lengths(app, reads) == EXPECTED
        server.kill()
        server.start()
        # The loop has not seen the end of the connection yet, so the requests go over it.
        assert await lengths(app, reads) == EXPECTED
        await client.close()


async def test_a_reader_without_rights_is_forbidden(app: App) -> None:
    config = (
        'authorization { timeout: 30, users = [ {user: "all", password: "x"}, {user: "some", password: "x", '
        'permissions: { publish: { deny: ["$JS.API.DIRECT.GET.>"] } } } ] }'
    )
    with NatsServer(config=config) as server:
        async with app.connect(servers=server.url, user="all", password="x") as jet:
            await jet.init()
        async with app.connect(servers=server.url, user="some", password="x") as jet:
            for _ in range(2):
                with pytest.raises(Forbidden):
                    await jet.repository(Account).load("a-1")


async def test_reads_and_decisions_wait_for_a_server_that_comes_back(app: App) -> None:
    with NatsServer() as server:
        async with app.connect(servers=server.url, save_timeout_s=60) as jet:
            await jet.init()
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.deposit, Decimal(1))
            server.kill()
            reads = [
                asyncio.ensure_future(operation)
                for operation in (
                    accounts.load("a"),
                    accounts.load("a", version=1),
                    accounts.history("a"),
                    accounts.execute("a", lambda account: None),
                    jet.log(),
                )
            ]
            done, _ = await asyncio.wait(reads, timeout=0.5)
            assert not done, "nobody can have answered"
            server.start()
            async with asyncio.timeout(60):
                await asyncio.gather(*reads)


async def test_a_missing_log_is_an_error_at_once(app: App, eventjet_nats: NatsServer) -> None:
    async with app.connect(servers=eventjet_nats.url, save_timeout_s=600) as jet:
        accounts = jet.repository(Account)
        async with asyncio.timeout(60):
            for operation in (accounts.load("a"), accounts.execute("a", Account.deposit, Decimal(1)), jet.log()):
                with pytest.raises(StoreError, match="eventjet init") as caught:
                    await operation
                assert isinstance(caught.value, LogUnusable)


STARVED = """
import asyncio, os, resource, sys
from decimal import Decimal
from eventjet import App
from eventjet.errors import StoreError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
app = App(sys.argv[2], aggregates=[Account], upcasters=[withdrawn_has_a_reason])


def starve():
    while True:
        try:
            yield os.open(os.devnull, os.O_RDONLY)
        except OSError:
            return


async def outcome_of(work):
    try:
        await work
        return "done"
    except StoreError as error:
        reasons = "Too many open files", "waited behind other commands"  # of which the first has none
        return "refused" if any(reason in str(error) for reason in reasons) else repr(error)
    except BaseException as error:
        return repr(error)


async def main():
    async with app.connect(servers=sys.argv[1]) as jet:
        await jet.init()
        for _ in range(2):  # a history of one event needs no connection of the reader
            await jet.repository(Account).execute("a", Account.deposit, Decimal(1))
    async with app.connect(servers=sys.argv[1], save_timeout_s=5, request_timeout_s=5) as jet:
        accounts = jet.repository(Account)
        files = list(starve())
        reads = [outcome_of(accounts.load("a")) for _ in range(10)]
        saves = [outcome_of(accounts.execute("a", Account.deposit, Decimal(1))) for _ in range(10)]
        print(*set(await asyncio.gather(*reads, *saves)))
        for file in files:
            os.close(file)
        print(await outcome_of(jet.repository(Account).load("a")))


asyncio.run(main())
"""


def test_a_process_without_file_descriptors_gets_a_store_error(app: App, eventjet_nats: NatsServer) -> None:
    """The process works again once it has file descriptors."""
    process = subprocess.run(
        [sys.executable, "-c", STARVED, eventjet_nats.url, app.name], capture_output=True, text=True, timeout=200
    )
    assert (process.stdout.split(), process.stderr) == (["refused", "done"], "")
