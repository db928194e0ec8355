"""The log may be in another JetStream: in a domain behind a leaf node, or in another account under a prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.pool import NullPool

from eventjet import App
from eventjet.cli.main import main
from eventjet.codec.subjects import snapshot_bucket
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.errors import Forbidden, LogUnusable, NoResponders, StreamMissing, Unreachable, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.api import direct_last, last_message, stream_info
from eventjet.jetstream.client import connect, connected
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import reading_log_state
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.roles import Role, accounts, leaf_accounts, roles_of
from eventjet.rebuild import rebuild
from eventjet.settings import Settings, SettingsOverrides
from eventjet.spark.source import LogOptions, connection_options
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.contracts.unique_contract import User
from tests.integration.doctored import FAULT, NOTE, OK, UNKNOWN, UNREACHABLE, Deployment
from tests.integration.reacting import working
from tests.logs import fresh_name

BOUND_S = 60.0


@dataclass(frozen=True)
class Link:
    """A hub with the domain `hub`, and its leaf node."""

    hub: NatsServer
    leaf: NatsServer

    def through(self, database: Path) -> Settings:
        """Return settings of an app that connects to the leaf node and has its log in the hub."""
        return Settings(servers=(self.leaf.url,), jetstream_domain="hub", database=f"sqlite:///{database}/models.db")


def started(folder: Path, name: str, jetstream: str, links: str) -> NatsServer:
    store = f'jetstream {{ store_dir: "{folder / name}/data", sync_interval: always {jetstream} }}'
    return NatsServer(
        folder / name, jetstream=False, config=f"server_name: {name}\n{links}\n{'' if jetstream == 'none' else store}"
    )


@pytest.fixture(scope="module", params=["none", "", ", domain: leaf"], ids=["no-jetstream", "no-domain", "own-domain"])
def link(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    folder = tmp_path_factory.mktemp("link")
    with reserved_port() as port:
        hub = started(folder, "hub", ", domain: hub", f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
        remote = f'leafnodes {{ remotes: [ {{ url: "nats://127.0.0.1:{port}" }} ] }}'
        with hub, started(folder, "leaf", request.param, remote) as leaf:
            link = Link(hub, leaf)
            asyncio.run(reached(link.through(folder)))
            yield link


async def reached(settings: Settings) -> None:
    """Return once the API of the JetStream in `settings` answers."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await (await connect(settings)).close()
                return
            except Unreachable:
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_workers_reactors_processes_and_doctor_work_through_a_leaf_node(link: Link, tmp_path: Path) -> None:
    deployment = await Deployment(link.through(tmp_path), tmp_path).init()
    await deployment.deposit_and_process()
    findings = await deployment.findings()
    assert [finding for finding in findings if finding.level in (FAULT, UNREACHABLE)] == []
    (syncing,) = [finding for finding in findings if finding.check == "sync_interval"]
    assert (syncing.level, "$JS.hub.API" in syncing.what) == (UNKNOWN, True)
    with NatsConnection.open(Endpoint((link.hub.url,))) as there:
        assert there.ask(stream_info(deployment.app.name)).last == 2
    with NatsConnection.open(Endpoint((link.leaf.url,))) as here, pytest.raises((StreamMissing, NoResponders)):
        here.ask(stream_info(deployment.app.name))


@pytest.mark.slow
async def test_monitoring_reports_only_the_servers_of_the_domain(link: Link, tmp_path: Path) -> None:
    deployment = await Deployment(link.through(tmp_path), tmp_path, monitoring=(link.leaf.monitor_url,)).init()
    findings = [finding for finding in await deployment.findings() if finding.part == "monitoring"]
    assert [(finding.check, finding.level) for finding in findings] == [
        ("monitoring", NOTE),
        ("sync_interval", UNKNOWN),
    ]
    deployment.monitoring = (link.hub.monitor_url,)
    findings = [finding for finding in await deployment.findings() if finding.check == "sync_interval"]
    assert [finding.level for finding in findings] == [OK]


@pytest.mark.slow
async def test_a_bank_is_recorded_read_and_rebuilt_through_a_leaf_node(link: Link, tmp_path: Path) -> None:
    settings = link.through(tmp_path)
    async with bank.connect(settings) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        account = fresh_name()
        done = await accounts.execute(account, Account.open, "ada")
        for _ in range(120):  # enough for a snapshot
            done = await accounts.execute(account, Account.deposit, Decimal(1))
        both = await jet.transact(
            accounts.decide(account, Account.deposit, Decimal(1)),
            accounts.decide(f"{account}2", Account.open, "bob"),
        )
        assert both[1].position == done.position + 2
        assert (await jet.log()).last == both[1].position
        assert [event.position async for event in jet.tail()][-1] == both[1].position
    async with bank.connect(settings) as jet:
        assert (await jet.repository(Account).load(account)).balance == 121
        assert jet.client is not None
        bucket = snapshot_bucket("bank")
        snapshot = await jet.client.ask(direct_last(f"KV_{bucket}", f"$KV.{bucket}.account.{account}"))
        assert snapshot is not None
    create_tables(Database(settings.database).sync_engine(), bank.projections.values())
    report = await rebuild(bank, ["balances"], settings, engine="local")
    assert report.position == both[1].position
    with create_engine(settings.database, poolclass=NullPool).connect() as connection:
        assert account in connection.execute(select(balances.table.c.account_id)).scalars().all()


async def test_only_the_hubs_log_acknowledges_where_the_leaf_node_has_a_log_of_the_same_name(
    link: Link, tmp_path: Path
) -> None:
    app = App(fresh_name(), aggregates=[User])
    try:
        async with app.connect(servers=link.leaf.url) as jet:
            await jet.init()
    except Unreachable:
        pytest.skip("this leaf node has no JetStream")
    async with app.connect(link.through(tmp_path), save_timeout_s=BOUND_S) as jet:
        await jet.init()
        users = jet.repository(User)
        for number in range(5):
            await users.execute(f"u-{number}", User.call, f"{number}@bank")
        last = (await jet.log()).last
        assert jet.client is not None
        assert jet.client.domain == "hub"
    with NatsConnection.open(Endpoint((link.hub.url,))) as there:
        assert there.ask(stream_info(app.name)).last == last


async def test_a_domain_that_does_not_answer_is_refused_with_the_setting(link: Link, tmp_path: Path) -> None:
    wrong = replace(link.through(tmp_path), jetstream_domain="hubb")
    with pytest.raises(Unreachable, match=r"JetStream below \$JS\.hubb\.API .* Set EVENTJET_JETSTREAM_DOMAIN to the"):
        await connect(wrong)


async def test_a_server_without_jetstream_suggests_the_hubs_domain(tmp_path: Path) -> None:
    message = r"hub of a leaf node, set EVENTJET_JETSTREAM_DOMAIN to its name\. Else"
    with NatsServer(tmp_path / "plain", jetstream=False) as server, pytest.raises(Unreachable, match=message):
        await connect(Settings(servers=(server.url,)))


async def test_a_missing_log_suggests_to_set_the_domain(link: Link, tmp_path: Path) -> None:
    async with bank.connect(replace(link.through(tmp_path), jetstream_domain="hub")) as jet:
        app = App(fresh_name(), aggregates=[User])
        assert jet.client is not None
        with pytest.raises(LogUnusable, match="EVENTJET_JETSTREAM_DOMAIN"):
            await jet.client.run(reading_log_state(app.name))


# Roles.


def configured(roles: Sequence[Role], text: str) -> str:
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    return f"{passwords}SYS_PASSWORD: sys\n{text}"


def role_settings(server: NatsServer, name: str, database: Path, **more: str) -> Settings:
    location: SettingsOverrides = {"jetstream_domain": "hub"} if not more else {"jetstream_prefix": more["prefix"]}
    return Settings(
        (server.url,),
        f"sqlite:///{database}/models.db",
        name,
        name,
        inbox_prefix=f"_INBOX_{name}",
        request_timeout_s=30.0,
    ).with_overrides(location)


def bank_roles() -> tuple[Role, ...]:
    return roles_of("bank", ["account"], ["balances-r1", "postings-r1"])


@pytest.fixture
def roles_on_leaf(tmp_path: Path) -> Iterator[Link]:
    """Start a hub and its leaf node with the accounts of `eventjet nats-config`, linked account by account."""
    roles = bank_roles()
    here = leaf_accounts("bank", roles, Endpoint(("x",), jetstream_prefix="$JS.hub.API").routed, "hub")
    with reserved_port() as port:
        users = ", ".join(f"{{ user: {name}, password: link, account: {name} }}" for name in ("BANK", "BANK_CLIENTS"))
        listen = f'leafnodes {{ listen: "127.0.0.1:{port}", authorization {{ users: [ {users} ] }} }}'
        remotes = ", ".join(
            f'{{ url: "nats-leaf://{name}:link@127.0.0.1:{port}", account: {name} }}'
            for name in ("BANK", "BANK_CLIENTS")
        )
        hub = started(tmp_path, "hub", ", domain: hub", f"{listen}\n{configured(roles, accounts('bank', roles))}")
        leaf = started(tmp_path, "leaf", "none", f"leafnodes {{ remotes: [ {remotes} ] }}\n{configured(roles, here)}")
        with hub, leaf:
            asyncio.run(reached(role_settings(leaf, "admin", tmp_path)))
            asyncio.run(reached(role_settings(leaf, "writer", tmp_path)))
            yield Link(hub, leaf)


@pytest.fixture
def roles_by_prefix(tmp_path: Path) -> Iterator[NatsServer]:
    """Start a server with the accounts of `eventjet nats-config`, where JetStream's API has a prefix."""
    roles = bank_roles()
    text = accounts("bank", roles, Endpoint(("x",), jetstream_prefix="hub.API").routed)
    store = f'jetstream {{ store_dir: "{tmp_path}/data", sync_interval: always }}'
    with NatsServer(tmp_path / "one", jetstream=False, config=f"{store}\n{configured(roles, text)}") as server:
        yield server


async def works_as_roles(admin: Settings, settings: Callable[[str], Settings]) -> None:
    """Do the work of each role with the settings of this role."""
    async with bank.connect(admin) as jet:
        await jet.init()
    create_tables(Database(admin.database).sync_engine(), bank.projections.values())
    async with bank.connect(settings("writer")) as jet, working(bank, settings("worker")):
        accounts = jet.repository(Account)
        done = await accounts.execute("a-1", Account.open, "ada")
        for _ in range(100):
            done = await accounts.execute("a-1", Account.deposit, Decimal(1))
        await jet.caught_up("balances", position=done.position, timeout_s=BOUND_S)
    async with bank.connect(settings("reader")) as jet:
        assert len([event async for event in jet.tail()]) == 101
    report = await rebuild(bank, ["balances"], settings("rebuild"), engine="local")
    assert report.position == done.position
    with NatsConnection.open(Endpoint.of(settings("writer"))) as link:
        bucket = snapshot_bucket("bank")
        assert link.ask(last_message(f"KV_{bucket}", f"$KV.{bucket}.account.a-1")) is not None


@pytest.mark.slow
async def test_roles_work_through_a_leaf_node(roles_on_leaf: Link, tmp_path: Path) -> None:
    leaf = roles_on_leaf.leaf
    await works_as_roles(role_settings(leaf, "admin", tmp_path), lambda name: role_settings(leaf, name, tmp_path))


async def test_a_denied_request_names_the_subject_that_was_sent(
    roles_on_leaf: Link, roles_by_prefix: NatsServer, tmp_path: Path
) -> None:
    elsewhere = {
        r"(?i)denied \$JS\.hub\.API\.STREAM\.DELETE\.bank": role_settings(roles_on_leaf.leaf, "writer", tmp_path),
        r"(?i)denied hub\.API\.STREAM\.DELETE\.bank": role_settings(
            roles_by_prefix, "writer", tmp_path, prefix="hub.API"
        ),
        # The hub maps the subject before it checks the permission.
        r"(?i)denied \$JS\.API\.STREAM\.DELETE\.bank": role_settings(roles_on_leaf.hub, "writer", tmp_path),
    }
    for pattern, settings in elsewhere.items():
        async with connected(settings) as client:
            with pytest.raises(Forbidden, match=pattern):
                await client.api("STREAM.DELETE.bank")


def test_nats_config_prints_accounts_for_the_configured_domain_or_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = ["--app", "eventjet.examples.bank.app:bank"]
    monkeypatch.setenv("EVENTJET_JETSTREAM_DOMAIN", "hub")
    assert main(["nats-config", *app]) == 0
    leaf = capsys.readouterr().out
    assert '"$JS.API.' not in leaf
    assert '"$JS.hub.API.$KV.bank_snapshots.*.>"' in leaf
    monkeypatch.delenv("EVENTJET_JETSTREAM_DOMAIN")
    monkeypatch.setenv("EVENTJET_JETSTREAM_PREFIX", "bank.API")
    assert main(["nats-config", "--accounts", *app]) == 0
    assert 'subject: "$JS.API.INFO" }, to: "bank.API.INFO"' in capsys.readouterr().out


def test_api_requests_and_bucket_writes_get_the_prefix() -> None:
    plain, hub = Endpoint(("one",)), Endpoint.of(Settings(jetstream_domain="hub"))
    for subject in ("$JS.API.INFO", "$KV.bank_cursors.c.x", "bank.account.a", "_EJ.bank.x", "$JS.ACK.x", "$JS.APIS.x"):
        assert plain.routed(subject) == subject
    assert hub.routed("$JS.API.DIRECT.GET.KV_x.$KV.x.a") == "$JS.hub.API.DIRECT.GET.KV_x.$KV.x.a"
    assert hub.routed("$KV.x.a") == "$JS.hub.API.$KV.x.a"
    assert [hub.routed(subject) for subject in ("bank.account.a", "$JS.ACK.x", "$KVS.x")] == [
        "bank.account.a",
        "$JS.ACK.x",
        "$KVS.x",
    ]


def test_spark_tasks_read_from_the_same_jetstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for overrides in ({"jetstream_domain": "hub"}, {"jetstream_prefix": "hub.API"}, {}):
        settings = Settings.load(cast("SettingsOverrides", overrides), environ={})
        options = connection_options(settings, tmp_path) | {"stream": "bank"}
        with monkeypatch.context() as there:
            there.setenv("EVENTJET_JETSTREAM_DOMAIN", "other")  # of the machine that the task runs on
            assert LogOptions.parse(options).endpoint().jetstream_prefix == Endpoint.of(settings).jetstream_prefix
    assert LogOptions.parse({"stream": "bank", "jetstreamDomain": "hub"}).endpoint().jetstream_prefix == "$JS.hub.API"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"jetstream_domain": "hub", "jetstream_prefix": "hub.API"}, "both set"),
        ({"jetstream_domain": "$JS.hub.API"}, "`domain` of the server's jetstream block"),
        ({"jetstream_domain": ""}, "cannot be a domain"),
        ({"jetstream_domain": "hub one"}, "without dots"),
        ({"jetstream_prefix": ".hub.API"}, "single quotes"),
        ({"jetstream_prefix": "hub.API."}, "a dot at its end"),
        ({"jetstream_prefix": "hub.>"}, "without wildcards"),
    ],
)
def test_an_invalid_domain_or_prefix_is_refused(overrides: SettingsOverrides, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings.load(overrides, environ={})


def test_a_keyword_for_domain_or_prefix_replaces_both_variables() -> None:
    environ = {"EVENTJET_JETSTREAM_DOMAIN": "hub"}
    assert Settings.load(environ=environ).jetstream_domain == "hub"
    settings = Settings.load({"jetstream_prefix": "hub.API"}, environ=environ)
    assert (settings.jetstream_domain, settings.jetstream_prefix) == (None, "hub.API")
    assert settings.with_overrides({"jetstream_domain": "x"}).jetstream_prefix is None
    with pytest.raises(UsageError, match="both set"):
        Settings.load(environ={**environ, "EVENTJET_JETSTREAM_PREFIX": "hub.API"})


@pytest.mark.slow
async def test_an_app_may_set_the_domain_of_its_own_server(link: Link, tmp_path: Path) -> None:
    deployment = await Deployment(replace(link.through(tmp_path), servers=(link.hub.url,)), tmp_path).init()
    await deployment.deposit_and_process()
    assert [finding for finding in await deployment.findings() if finding.level in (FAULT, UNREACHABLE)] == []


@pytest.mark.slow
async def test_roles_work_under_a_prefix(roles_by_prefix: NatsServer, tmp_path: Path) -> None:
    admin = replace(role_settings(roles_by_prefix, "admin", tmp_path), jetstream_domain=None)
    await works_as_roles(admin, lambda name: role_settings(roles_by_prefix, name, tmp_path, prefix="hub.API"))
