"""A caller chooses the reply subject of a request, and must not write with the service's rights by it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet import App, UsageError, served
from eventjet.cli.main import main
from eventjet.commands.repository import open_repositories
from eventjet.dev.nats import NatsServer
from eventjet.examples.transfer.accounts import Account
from eventjet.jetstream.client import Client, connect
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.nats.tap import send
from eventjet.operations.roles import accounts, roles_of, serving_roles
from eventjet.serving.service import Service
from eventjet.settings import Settings
from tests.logs import fresh_name

BODY = b'{"amount": "1"}'


def forbidden_replies(app: str) -> list[bytes]:
    """Return reply subjects of every kind that is not an inbox of a caller."""
    subjects = [
        f"{app}.account.victim",
        f"{app}._void.1",
        f"{app}.eventjet_unique.x",
        f"$KV.{app}_cursors.c.receipts",
        f"$KV.{app}_snapshots.account.victim",
        f"_EJ.{app}.at.transfer.t",
        f"_EJ.{app}.due.transfer.t",
        f"_EJ.{app}.projected.balances",
        f"public.{app}.customers.x",
        f"$JS.API.STREAM.DELETE.{app}",
        "$JS.API.INFO",
        "$JS.FC.x.y",
        "$SRV.PING",
        "$SYS.REQ.SERVER.PING",
        f"cmd.{app}.account.deposit.b",
        "other.account.victim",
        "_INBOXES.x",
        "_INBOX_service.x.1",
        "_INBOX",
        "_INBOX.",
        "_INBOX..x",
        "_INBOX.x.",
        "_INBOX.*",
        "_INBOX.x.>",
        "_INBOX.x*",
        f"_INBOX.{'x' * 1_500}",
        "_INBOX.\u00e9",
    ]
    return [subject.encode() for subject in subjects]


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), request_timeout_s=30.0)


@asynccontextmanager
async def open_service(app: App, settings: Settings) -> AsyncIterator[Client]:
    """Open a service of the app, and yield its client."""
    async with open_repositories(app, settings) as (repositories, client):
        service = Service(repositories, client, app.served)
        await service.open()
        yield client
        await service.close()


@pytest.fixture
async def app(settings: Settings) -> App:
    """Return an app that serves deposits, with streams for whatever is published beside the log."""
    app = App(fresh_name(), aggregates=[Account], served=[served(Account, Account.deposit)])
    async with app.connect(settings) as jet:
        await jet.init()
        assert jet.client is not None
        # `_EJ` and the buckets have their own streams, so that stored messages are counted.
        for name, subjects in (
            ("cursors", [f"$KV.{app.name}_cursors.>"]),
            ("timers", [f"_EJ.{app.name}.>"]),
            ("public", [f"public.{app.name}.>"]),
        ):
            await jet.client.api(
                f"STREAM.CREATE.{app.name}-{name}", {"name": f"{app.name}-{name}", "subjects": subjects}
            )
    return app


async def count_stored(client: Client, app: App) -> int:
    """Return the number of messages in all streams of the test."""
    names = (app.name, f"KV_{app.name}_snapshots", *(f"{app.name}-{name}" for name in ("cursors", "timers", "public")))
    return sum([(await client.api(f"STREAM.INFO.{name}"))["state"]["messages"] for name in names])


@pytest.fixture
async def caller(settings: Settings) -> AsyncGenerator[Client]:
    client = await connect(settings)
    yield client
    await client.close()


async def ask(caller: Client, subject: str, reply: bytes, body: bytes = BODY) -> None:
    """Send a request with any reply subject; return once the server has processed it."""
    assert caller.nats is not None
    send(caller.nats, subject, body, reply=reply)
    await caller.api("INFO")


async def deposit(caller: Client, app: App, aggregate_id: str) -> Frame:
    """Request a deposit as any caller does; the service has taken all earlier requests afterwards."""
    return await caller.request(f"cmd.{app.name}.account.deposit.{aggregate_id}", BODY)


@pytest.mark.parametrize("command", ["cmd.{app}.account.deposit.a", "$SRV.PING", "$SRV.INFO.{app}", "$SRV.STATS.{app}"])
async def test_no_reply_is_sent_to_a_subject_that_is_not_an_inbox(
    app: App, settings: Settings, caller: Client, command: str
) -> None:
    async with open_service(app, settings) as service:
        inbox = f"{service._exchanges.inbox}.".encode()
        frames: list[Frame] = []
        for subject in ("$JS.FC.>", "$SYS.>", "other.>", "_INBOXES.>", "_INBOX_service.>", f"{inbox.decode()}none"):
            await caller.serve(subject, frames.append)
        for reply in (*forbidden_replies(app.name), inbox + b"1", inbox + b"none", b""):
            await ask(caller, command.format(app=app.name), reply)
        assert b'"version":1' in (await deposit(caller, app, "b"))[4]
        assert frames == []
        assert await count_stored(caller, app) == 1
        async with app.connect(settings) as jet:
            assert await jet.repository(Account).history("a") == []


async def test_a_reply_that_is_not_an_inbox_is_logged_once_and_counted(
    app: App, settings: Settings, caller: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_service(app, settings):
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                await ask(caller, f"cmd.{app.name}.account.deposit.a", b"bank.account.victim")
            await deposit(caller, app, "b")
        stats = await caller.request(f"$SRV.STATS.{app.name}")
    (line,) = [record for record in caplog.records if record.__dict__.get("event") == "eventjet.unanswered"]
    assert "account-deposit: a request names the reply 'bank.account.victim'" in line.getMessage()
    assert "EVENTJET_CALLER_INBOXES" in line.getMessage()
    assert b'"num_requests":21,"num_errors":20,"last_error":"400:Reply"' in stats[4]


async def test_a_stored_message_that_the_server_sends_to_a_command_is_not_executed(
    app: App, settings: Settings, caller: Client
) -> None:
    """A reader chooses where the server sends a stored message, and an event's body may be a valid command."""
    command = f"cmd.{app.name}.account.deposit"
    async with open_service(app, settings), app.connect(settings) as jet:
        await deposit(caller, app, "a")
        config = {"name": "mine", "ack_policy": "none"}
        await caller.api(f"CONSUMER.CREATE.{app.name}.mine", {"stream_name": app.name, "config": config})
        await ask(caller, f"$JS.API.DIRECT.GET.{app.name}", f"{command}.direct".encode(), b'{"seq": 1}')
        await ask(caller, f"$JS.API.STREAM.MSG.GET.{app.name}", f"{command}.got".encode(), b'{"seq": 1}')
        await ask(caller, f"$JS.API.CONSUMER.MSG.NEXT.{app.name}.mine", f"{command}.pulled".encode(), b"")
        async with asyncio.timeout(60.0):
            while b'"num_errors":3' not in (await caller.request(f"$SRV.STATS.{app.name}"))[4]:
                await asyncio.sleep(0.01)
        for name in ("direct", "got", "pulled"):
            assert await jet.repository(Account).history(name) == []


@pytest.mark.parametrize("prefix", ["_INBOX", "_INBOX_caller", "_INBOX_caller.shop"])
async def test_callers_of_the_agreed_prefixes_are_answered(app: App, settings: Settings, prefix: str) -> None:
    async with open_service(app, settings), app.client(replace(settings, inbox_prefix=prefix)) as remote:
        assert (await remote.repository(Account).execute("a", Account.deposit, Decimal(1))).version == 1


async def test_service_and_callers_may_be_configured_with_another_prefix(
    app: App, settings: Settings, caller: Client
) -> None:
    shop = replace(settings, caller_inboxes=("_INBOX_shop", "_INBOX_bank"))
    async with open_service(app, shop):
        async with app.client(replace(shop, inbox_prefix="_INBOX_bank")) as remote:
            assert (await remote.repository(Account).execute("a", Account.deposit, Decimal(1))).version == 1
        await ask(caller, f"cmd.{app.name}.account.deposit.a", b"_INBOX.x.1")
        async with app.client(replace(shop, inbox_prefix="_INBOX_shop")) as remote:
            assert (await remote.repository(Account).execute("a", Account.deposit, Decimal(1))).version == 2


async def test_a_caller_that_no_service_would_answer_is_refused(app: App, settings: Settings) -> None:
    with pytest.raises(
        UsageError, match=r"below _INBOX_mine, where no service .* EVENTJET_INBOX_PREFIX to _INBOX_call"
    ):
        async with app.client(replace(settings, inbox_prefix="_INBOX_mine")):
            pass


@pytest.mark.parametrize(
    "prefix", ["bank", "$JS.API", "_EJ.bank", "cmd", "_R_", "_INBOX.>", "_INBOX.*", "_INBOX x", ""]
)
def test_only_inboxes_can_be_configured_for_callers(prefix: str) -> None:
    with pytest.raises(UsageError, match="begin with _INBOX"):
        Settings.load({"caller_inboxes": ["_INBOX_shop", prefix]}, {})


def test_the_inboxes_of_callers_can_be_set_by_the_environment() -> None:
    settings_read = Settings.load(environ={"EVENTJET_CALLER_INBOXES": "_INBOX_shop, _INBOX"})
    assert settings_read.caller_inboxes == Endpoint.of(settings_read).caller_inboxes == ("_INBOX_shop", "_INBOX")
    assert Endpoint.of(Settings()).caller_inboxes == ("_INBOX", "_INBOX_caller")


# With the roles of `eventjet nats-config`.


def role_settings(server: NatsServer, name: str, inbox: str = "") -> Settings:
    return Settings(servers=(server.url,), user=name, password=name, inbox_prefix=inbox or f"_INBOX_{name}")


@asynccontextmanager
async def served_with_roles(*inboxes: str) -> AsyncGenerator[tuple[NatsServer, App]]:
    """Start a server with an app's roles and log; another account, `shop`, imports the app's commands."""
    app = App(fresh_name(), aggregates=[Account], served=[served(Account, Account.deposit)])
    roles = roles_of(app.name, ("account",), ())
    roles += serving_roles(app.name, roles, *([inboxes] if inboxes else []))
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    clients, commands = f"{app.name.upper()}_CLIENTS", json.dumps(f"cmd.{app.name}.>")
    shop = f"imports: [ {{ service: {{ account: {clients}, subject: {commands} }} }} ]"
    config = accounts(app.name, roles)
    config = config.replace("    imports:", f"    exports: [ {{ service: {commands} }} ]\n    imports:", 1)
    config = config.replace("  SYS {", f"  SHOP {{ users: [ {{ user: shop, password: shop }} ], {shop} }}\n  SYS {{", 1)
    with NatsServer(sync_interval="1m", config=f"{passwords}SYS_PASSWORD: sys\n{config}") as server:
        async with app.connect(role_settings(server, "admin")) as jet:
            await jet.init()
        yield server, app


async def test_the_server_denies_replies_outside_of_inboxes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the service's own check the server denies the replies, and the service logs them."""
    monkeypatch.setattr(Client, "may_answer", lambda self, reply, subject=b"": bool(reply))
    async with served_with_roles() as (server, app):
        caller = Client(Endpoint.of(role_settings(server, "caller")), 60.0)
        await caller.connect()
        with caplog.at_level(logging.WARNING):
            async with open_service(app, role_settings(server, "service")):
                for reply in ("victim.account.x", f"$KV.{app.name}_cursors.c.x", "$JS.API.INFO", f"{app.name}._void.1"):
                    assert caller.nats is not None
                    send(caller.nats, "$SRV.PING", b"", reply=reply.encode())
                assert b'"version":1' in (await deposit(caller, app, "b"))[4]
        await caller.close()
        async with app.connect(role_settings(server, "reader")) as jet:
            assert (await jet.store.state()).last == 1
        assert "an answer was lost: The server denied" in caplog.text


@pytest.mark.parametrize("prefix", ["_INBOX", "_INBOX_shop"])
async def test_with_roles_callers_are_answered_below_the_configured_prefix(prefix: str) -> None:
    async with served_with_roles(prefix) as (server, app):
        service = replace(role_settings(server, "service"), caller_inboxes=(prefix,))
        caller = replace(service, user="caller", password="caller", inbox_prefix=prefix)
        async with open_service(app, service), app.client(caller) as remote:
            assert (await remote.repository(Account).execute("a", Account.deposit, Decimal(1))).version == 1


async def test_callers_of_another_account_are_answered() -> None:
    """The server makes the reply subjects of imported requests, and accepts such subjects from no client."""
    async with served_with_roles() as (server, app), open_service(app, role_settings(server, "service")):
        async with app.client(role_settings(server, "shop", "_INBOX")) as remote:
            assert (await remote.repository(Account).execute("a", Account.deposit, Decimal(1))).version == 1
        caller = Client(Endpoint.of(role_settings(server, "caller")), 60.0)
        await caller.connect()
        denied: list[str] = []
        caller.on_denied.append(lambda fault: denied.append(fault.subject))
        assert caller.nats is not None
        send(caller.nats, "$SRV.PING", b"", reply=b"_R_.abc.def")
        await deposit(caller, app, "b")
        await caller.close()
        assert denied == ["_R_.abc.def"]


@pytest.mark.parametrize("prefix", ["_INBOX_worker", "_INBOX_service", "_INBOX_service.x"])
def test_no_role_has_its_inbox_where_a_service_may_write(prefix: str) -> None:
    with pytest.raises(UsageError, match=f"names {prefix}, and "):
        serving_roles("bank", roles_of("bank", ("account",), ()), ("_INBOX_shop", prefix))


def test_nats_config_prints_the_configured_inboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tills.py").write_text(
        "from eventjet import App, served\nfrom eventjet.examples.transfer.accounts import Account\n"
        "tills = App('tills', aggregates=[Account], served=[served(Account, Account.deposit)])\n"
    )
    command = ["nats-config", "--app", "tills:tills", "--app-dir", str(tmp_path)]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert "allow_responses" not in plain
    assert plain.count('"_INBOX_caller.>"') == 2
    assert '"_INBOX.>"' not in plain
    monkeypatch.setenv("EVENTJET_CALLER_INBOXES", "_INBOX_shop,_INBOX")
    assert main(command) == 0
    other = capsys.readouterr().out
    assert (other.count('"_INBOX_shop.>"'), other.count('"_INBOX.>"'), other.count('"_INBOX_caller.>"')) == (2, 2, 0)
