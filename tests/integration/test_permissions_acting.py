"""What `eventjet nats-config` lets each role do where an app has reactors and processes, and the work they do so."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import App, served
from eventjet.dev.nats import NatsServer
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Stage, Transfer
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.roles import accounts, roles_of, serving_roles
from eventjet.reactions.following import declarations_of
from eventjet.repository.repositories import open_repositories
from eventjet.serving.service import Service
from eventjet.settings import Settings
from eventjet.workers.status import status
from tests.integration.reacting import Bell, Town, app_of, eventually, until, working
from tests.integration.test_permission_matrix import denied
from tests.logs import fresh_name

AGGREGATES = ("account", "book", "transfer")
ROLES = roles_of("transfers", AGGREGATES, (), ("transfer", "receipts"))
NAMES = tuple(role.name for role in ROLES)
_KV, _TIMERS = "KV_transfers_cursors", "EJ_transfers_timers"
_VERBS = ("CREATE", "UPDATE", "INFO", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE")
PROBES = [
    *(f"$KV.{app}_cursors.c.{name}" for app in ("transfers", "other") for name in ("transfer", "alien")),
    "$KV.transfers_cursors.w.transfer.x",
    *(f"$KV.{app}_cursors.q.transfer.7" for app in ("transfers", "other")),
    *(f"_EJ.{app}.{kind}.transfer.t" for app in ("transfers", "other") for kind in ("at", "due")),
    *(f"$JS.API.STREAM.{verb}.{name}" for verb in _VERBS for name in (_KV, _TIMERS, "KV_other_cursors", "transfers")),
    *(f"$JS.API.DIRECT.GET.{name}" for name in (_KV, _TIMERS)),
    *(f"$JS.API.CONSUMER.{verb}.transfers.transfer" for verb in ("CREATE", "DELETE", "MSG.NEXT", "INFO")),
    *(f"$JS.API.CONSUMER.{verb}.transfers.alien" for verb in ("CREATE", "DELETE", "MSG.NEXT", "INFO")),
    *(f"$JS.API.CONSUMER.{verb}.{_TIMERS}.x" for verb in ("CREATE", "DELETE", "MSG.NEXT")),
    *(f"transfers.{kind}.a" for kind in ("account", "transfer", "_void")),
    "other.account.a",
]
_CURSORS = {"$KV.transfers_cursors.c.transfer", "$KV.transfers_cursors.q.transfer.7"}
_LOOK = {f"$JS.API.{verb}.{name}" for verb in ("STREAM.MSG.GET", "DIRECT.GET") for name in (_KV, _TIMERS)}
_SET = {"_EJ.transfers.at.transfer.t", f"$JS.API.STREAM.PURGE.{_TIMERS}"}
_LOG = {"$JS.API.STREAM.INFO.transfers", "$JS.API.STREAM.MSG.GET.transfers"}
_OWN = {f"$JS.API.CONSUMER.{verb}.transfers.transfer" for verb in ("CREATE", "DELETE", "MSG.NEXT")}
_ALIEN = {f"$JS.API.CONSUMER.{verb}.transfers.alien" for verb in ("CREATE", "DELETE", "MSG.NEXT")}
_WRITES = {"transfers.account.a", "transfers.transfer.a"}
ALLOWED: dict[str, set[str]] = {
    "admin": _LOG
    | _LOOK
    | _SET
    | _CURSORS
    | {"$KV.transfers_cursors.c.alien"}
    | _OWN
    | _ALIEN
    | {"transfers._void.a"}
    | {f"$JS.API.STREAM.{verb}.{name}" for verb in ("CREATE", "INFO") for name in (_KV, _TIMERS, "transfers")}
    | {"$JS.API.STREAM.UPDATE.transfers"},
    "worker": _LOG,
    "reader": _LOG | _LOOK,
    "rebuild": _LOG | _ALIEN,
    "snapshots": _LOG | _ALIEN,
    "actor": _LOG | _LOOK | _SET | _CURSORS | _OWN | _WRITES,
    "writer": _LOG | _WRITES,
    "writer_account": _LOG | {"transfers.account.a"},
    "writer_book": _LOG,
    "writer_transfer": _LOG | {"transfers.transfer.a"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    passwords = "".join(f"{one.variable}: {one.name}\n" for one in ROLES)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('transfers', ROLES)}"
    with NatsServer(sync_interval="1m", config=config) as server:
        yield server


def settings_of(server: NatsServer, name: str) -> Settings:
    return Settings(servers=(server.url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")


@pytest.mark.parametrize("name", NAMES)
def test_a_role_may_send_what_its_work_takes_and_nothing_else(server: NatsServer, name: str) -> None:
    assert set(NAMES) == set(ALLOWED)
    endpoint = Endpoint((server.url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")
    frames = {subject: b"PUB %b _INBOX_%b.probe 1\r\nx\r\n" % (subject.encode(), name.encode()) for subject in PROBES}
    assert set(PROBES) - denied(endpoint, frames) == ALLOWED[name]


async def test_with_its_roles_an_app_does_its_work(server: NatsServer) -> None:
    admin, actor, writer = (settings_of(server, name) for name in ("admin", "actor", "writer"))
    async with transfers.connect(admin) as jet:
        await jet.init()
    async with transfers.connect(writer) as jet:
        asked, held = jet.repository(Transfer), jet.repository(Account)
        await held.execute("ada", Account.deposit, Decimal(9))
        await held.execute("bob", Account.freeze)
        async with working(transfers, actor):
            until = datetime.now(UTC) + timedelta(seconds=1)
            await asked.execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=until)

            async def has_ended() -> bool:
                return (await asked.load("t")).stage is Stage.ENDED

            await eventually(has_ended)
        assert (await held.load("ada")).balance == 9
    found = await status(transfers, settings_of(server, "reader"))
    assert [(one.name, one.state) for one in found] == [("receipts", "active"), ("transfer", "active")]


async def test_with_its_roles_the_partitions_of_a_reactor_are_shared() -> None:
    town = Town()
    app = app_of(town, partitions=2)
    roles = roles_of(app.name, ("bell", "tower"), (), list(declarations_of(app)))
    passwords = "".join(f"{one.variable}: {one.name}\n" for one in roles)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts(app.name, roles)}"
    with NatsServer(sync_interval="1m", config=config) as server:
        before = app_of(town, partitions=4, name=app.name)
        async with before.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        async with app.connect(settings_of(server, "admin")) as jet:
            assert [name for name, _ in (await jet.init()).cursors] == ["echo-1-of-2", "echo-2-of-2"]
        async with app.connect(settings_of(server, "writer")) as jet, working(app, settings_of(server, "actor")):
            for bell in "abcdef":
                await jet.repository(Bell).execute(bell, Bell.ring, 1)
            await until(lambda: {bell for bell, *_ in town.heard} == set("abcdef"))


async def test_a_caller_asks_a_service_and_reaches_nothing_else() -> None:
    purses = App(fresh_name(), aggregates=[Account], served=[served(Account, Account.deposit)])
    roles = roles_of(purses.name, ("account",), ())
    roles += serving_roles(purses.name, roles)
    passwords = "".join(f"{one.variable}: {one.name}\n" for one in roles)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts(purses.name, roles)}"
    with NatsServer(sync_interval="1m", config=config) as server:
        async with purses.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        async with open_repositories(purses, settings_of(server, "service")) as (repositories, client):
            service = Service(repositories, client, purses.served)
            await service.open()
            async with purses.client(settings_of(server, "caller")) as remote:
                once = remote.repository(Account).command("c")
                done = [await once.execute("a", Account.deposit, Decimal(3)) for _ in range(2)]
            await service.close()
        assert done[0] == done[1]
        endpoint = Endpoint((server.url,), user="caller", password="caller", inbox_prefix="_INBOX_caller")
        probes = (f"{purses.name}.account.a", "$JS.API.INFO", f"$JS.API.STREAM.INFO.{purses.name}", "_INBOX_service.x")
        frames = {subject: b"PUB %b 1\r\nx\r\n" % subject.encode() for subject in probes}
        assert denied(endpoint, frames) == set(probes)
