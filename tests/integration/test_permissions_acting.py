"""Roles of `eventjet nats-config` suffice for an app with reactors, processes and services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import App, served
from eventjet.codec.subjects import cursor_bucket, timer_stream
from eventjet.commands.repository import open_repositories
from eventjet.dev.nats import NatsServer
from eventjet.doctor.examine import examine
from eventjet.doctor.report import Installation
from eventjet.errors import LogDrifted, StoreUnavailable
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Stage, Transfer
from eventjet.findings import Level
from eventjet.jetstream.api import stream_info, update_stream
from eventjet.jetstream.client import connect
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import cursors_config, explained, timer_config
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.roles import accounts, roles_of, serving_roles
from eventjet.serving.service import Service
from eventjet.settings import Settings
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import status
from tests.integration.reacting import Bell, Town, app_of, eventually, until, working
from tests.integration.test_permission_matrix import denied_names
from tests.logs import fresh_name

AGGREGATES = ("account", "book", "transfer")
ROLES = roles_of("transfers", AGGREGATES, (), ("transfer", "receipts"))


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in ROLES)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('transfers', ROLES)}"
    with NatsServer(sync_interval="1m", config=config) as server:
        yield server


def settings_of(server: NatsServer, name: str) -> Settings:
    return Settings(servers=(server.url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")


async def test_reactors_and_processes_work_with_their_roles(server: NatsServer) -> None:
    admin, actor, writer = (settings_of(server, name) for name in ("admin", "actor", "writer"))
    async with transfers.connect(admin) as jet:
        await jet.init()
    async with transfers.connect(writer) as jet:
        transfer_repository, account_repository = jet.repository(Transfer), jet.repository(Account)
        await account_repository.execute("ada", Account.deposit, Decimal(9))
        await account_repository.execute("bob", Account.freeze)
        async with working(transfers, actor):
            until = datetime.now(UTC) + timedelta(seconds=1)
            await transfer_repository.execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=until)

            async def has_ended() -> bool:
                return (await transfer_repository.load("t")).stage is Stage.ENDED

            await eventually(has_ended)
        assert (await account_repository.load("ada")).balance == 9
    statuses = await status(transfers, settings_of(server, "reader"))
    assert [(work_status.name, work_status.state) for work_status in statuses] == [
        ("receipts", "active"),
        ("transfer", "active"),
    ]


async def test_roles_see_a_setting_that_stops_cursors_or_timers() -> None:
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in ROLES)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('transfers', ROLES)}"
    config = config.replace("users: [", "users: [ { user: root, password: root }", 1)
    kinds = {
        f"KV_{cursor_bucket('transfers')}": (cursors_config, {"receipts", "transfer"}),
        timer_stream("transfers"): (timer_config, {"transfer"}),
    }
    with NatsServer(sync_interval="1m", config=config) as server:
        async with transfers.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        for stream, (declared, stopped) in kinds.items():
            with NatsConnection.open(Endpoint((server.url,), user="root", password="root")) as root:
                state = root.ask(stream_info(stream))
                root.ask(update_stream({**state.config, "no_ack": True}))
                for role in ("reader", "actor"):
                    statuses = await status(transfers, settings_of(server, role))
                    assert {
                        work_status.name for work_status in statuses if "no_ack" in str(work_status.reason)
                    } == stopped
                    assert {work_status.name for work_status in statuses if work_status.state != "active"} == stopped
                client = await connect(settings_of(server, "actor"))
                error = await explained(client, declared("transfers", 1), StoreUnavailable(stream, "silence"))
                await client.close()
                assert isinstance(error, LogDrifted)
                assert set(error.settings) == {"no_ack"}
                root.ask(update_stream(state.config))


async def test_a_foreign_responder_is_visible_to_writers_and_unknown_to_admin() -> None:
    app = App(fresh_name(), aggregates=[Account])
    roles = roles_of(app.name, ("account",), ())
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    log, _, clients = accounts(app.name, roles).partition(f"{app.name.upper()}_CLIENTS {{\n    users: [")
    stranger = "{ user: stranger, password: stranger }"
    config = f"{passwords}SYS_PASSWORD: sys\n{log}{app.name.upper()}_CLIENTS {{\n    users: [ {stranger}{clients}"

    async def answers(server: NatsServer, role: str) -> list[tuple[Level, str]]:
        installation = Installation(app, settings_of(server, role), (), 60.0, time.time)
        findings = (await asyncio.to_thread(examine, installation)).findings
        return [(finding.level, finding.what) for finding in findings if finding.check == "answers"]

    with NatsServer(sync_interval="1m", config=config) as server:
        async with app.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        assert [level for level, _ in await answers(server, "writer")] == [Level.OK]
        client = await connect(Settings(servers=(server.url,), user="stranger", password="stranger"))
        await client.serve(f"{app.name}.*.*", lambda frame: client.publish(frame[2].decode(), b"thanks"))
        await client.api("INFO")  # answered after the subscription
        ((level, message),) = await answers(server, "admin")
        assert level is not Level.OK
        assert "not known who else answers writers" in message
        ((level, message),) = await answers(server, "writer")
        assert level is Level.WARNING
        assert "a subscriber that is no stream" in message
        await client.close()


async def test_workers_share_partitions_with_their_roles() -> None:
    town = Town()
    app = app_of(town, partitions=2)
    roles = roles_of(app.name, ("bell", "tower"), (), list(declarations_of(app)))
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts(app.name, roles)}"
    with NatsServer(sync_interval="1m", config=config) as server:
        old_app = app_of(town, partitions=4, name=app.name)
        async with old_app.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        async with app.connect(settings_of(server, "admin")) as jet:
            assert [name for name, _ in (await jet.init()).cursors] == ["echo-1-of-2", "echo-2-of-2"]
        async with app.connect(settings_of(server, "writer")) as jet, working(app, settings_of(server, "actor")):
            for bell in "abcdef":
                await jet.repository(Bell).execute(bell, Bell.ring, 1)
            await until(lambda: {bell for bell, *_ in town.heard} == set("abcdef"))


async def test_a_caller_reaches_the_service_and_nothing_else() -> None:
    purses = App(fresh_name(), aggregates=[Account], served=[served(Account, Account.deposit)])
    roles = roles_of(purses.name, ("account",), ())
    roles += serving_roles(purses.name, roles)
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts(purses.name, roles)}"
    with NatsServer(sync_interval="1m", config=config) as server:
        async with purses.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        async with open_repositories(purses, settings_of(server, "service")) as (repositories, client):
            service = Service(repositories, client, purses.served)
            await service.open()
            async with purses.client(settings_of(server, "caller")) as remote:
                once = remote.repository(Account).command("c")
                results = [await once.execute("a", Account.deposit, Decimal(3)) for _ in range(2)]
            await service.close()
        assert results[0] == results[1]
        endpoint = Endpoint((server.url,), user="caller", password="caller", inbox_prefix="_INBOX_caller")
        probes = (f"{purses.name}.account.a", "$JS.API.INFO", f"$JS.API.STREAM.INFO.{purses.name}", "_INBOX_service.x")
        frames = {subject: b"PUB %b 1\r\nx\r\n" % subject.encode() for subject in probes}
        assert denied_names(endpoint, frames) == set(probes)
