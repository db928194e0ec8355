"""What `eventjet nats-config` lets each role do on the server, and nothing else: every role against every subject."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet.cli.main import main
from eventjet.dev.nats import NatsServer, nats_program
from eventjet.errors import Forbidden
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.nats.api import stream_info
from eventjet.nats.connection import NatsConnection
from eventjet.nats.dial import dial
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.roles import accounts, roles_of, server_config
from eventjet.rebuild import build_snapshots, rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.workers.supervisor import run_workers
from tests.integration.wire_secrets import certificates

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DURABLES = ("balances-r1", "balances-r2", "owners-r1", "turnover-r1", "movements-r1")
ROLES = roles_of("bank", ("account", "transfer"), DURABLES)
NAMES = ("admin", "worker", "reader", "rebuild", "snapshots", "writer", "writer_account", "writer_transfer")
_VERBS = ("CREATE", "UPDATE", "INFO", "DELETE", "PURGE", "SNAPSHOT", "RESTORE", "MSG.GET", "MSG.DELETE")
_CLUSTER = ("PEER.REMOVE", "LEADER.STEPDOWN")
_CONSUMER = ("CREATE", "DELETE", "MSG.NEXT", "INFO", "RESET", "PAUSE", "UNPIN", "LEADER.STEPDOWN", "DURABLE.CREATE")
PROBES = [
    *(f"{app}.{kind}.a" for app in ("bank", "other") for kind in ("account", "transfer")),
    *(f"{app}._void.7" for app in ("bank", "other")),
    *(f"$KV.{app}_snapshots.{kind}.a" for app in ("bank", "other") for kind in ("account", "transfer")),
    *(
        f"$JS.API.STREAM.{verb}.{name}"
        for verb in (*_VERBS, *_CLUSTER)
        for name in ("bank", "KV_bank_snapshots", "other")
    ),
    *(f"$JS.API.{name}" for name in ("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "SERVER.REMOVE")),
    *(f"$JS.API.CONSUMER.{verb}.{name}" for verb in _CONSUMER for name in ("bank.mine", "bank.balances-r1", "other.x")),
    *(f"$JS.API.CONSUMER.{verb}.{name}" for verb in ("LIST", "NAMES", "CREATE") for name in ("bank", "other")),
    "$JS.API.CONSUMER.CREATE.bank.mine.bank.account.a",
    "$JS.API.CONSUMER.CREATE.bank.mine.other.account.a",
    "$JS.API.CONSUMER.CREATE.bank.balances-r1.bank.account.a",
    "$JS.API.ACCOUNT.PURGE.BANK",
    "$JS.API.DIRECT.GET.bank",
    "$JS.API.DIRECT.GET.bank.bank.account.a",
    "$JS.API.DIRECT.GET.other",
    "$JS.API.DIRECT.GET.KV_bank_snapshots",
    "$JS.API.DIRECT.GET.KV_bank_snapshots.$KV.bank_snapshots.account.a",
    "$JS.ACK.bank.balances-r1.1.1.1.1.0",
    "$JS.ACK.bank.mine.1.1.1.1.0",
    "$SYS.REQ.SERVER.PING",
    "_EJ.bank.projected.balances",
    "_EJ.other.projected.balances",
    "_INBOX_worker.x.1",
    "_INBOX_admin.x.1",
    "_INBOX.x.1",
    "elsewhere",
]
_LOOK = {"$JS.API.STREAM.INFO.bank", "$JS.API.STREAM.MSG.GET.bank"}
_READ = _LOOK | {"$JS.API.INFO", "$JS.API.DIRECT.GET.bank", "$JS.API.DIRECT.GET.bank.bank.account.a"}
_OF_READS = {f"$JS.API.CONSUMER.{verb}.bank.mine" for verb in ("CREATE", "DELETE", "MSG.NEXT")}
_OF_READS |= {"$JS.API.CONSUMER.CREATE.bank.mine.bank.account.a"}
_OF_WORKER = {f"$JS.API.CONSUMER.{verb}.bank.balances-r1" for verb in ("CREATE", "DELETE", "MSG.NEXT")}
_SNAPSHOTS = {
    "$JS.API.STREAM.MSG.GET.KV_bank_snapshots",
    "$JS.API.DIRECT.GET.KV_bank_snapshots.$KV.bank_snapshots.account.a",
}


def _writes(*kinds: str) -> set[str]:
    return {subject for kind in kinds for subject in (f"bank.{kind}.a", f"$KV.bank_snapshots.{kind}.a")}


ALLOWED: dict[str, set[str]] = {
    "admin": {"$JS.API.CONSUMER.CREATE.bank.balances-r1.bank.account.a", "bank._void.7"}
    | _READ
    | _OF_READS
    | _OF_WORKER
    | {f"$JS.API.STREAM.{verb}.{name}" for verb in ("CREATE", "INFO") for name in ("bank", "KV_bank_snapshots")}
    | {"$JS.API.STREAM.UPDATE.bank", "$JS.API.CONSUMER.LIST.bank"},
    "worker": _LOOK | _OF_WORKER | {"_EJ.bank.projected.balances"},
    "reader": _READ,
    "rebuild": _LOOK | _OF_READS,
    "snapshots": _LOOK
    | _OF_READS
    | _SNAPSHOTS
    | {"$JS.API.STREAM.INFO.KV_bank_snapshots"}
    | {s for s in _writes("account", "transfer") if s.startswith("$KV")},
    "writer": _READ | _SNAPSHOTS | _writes("account", "transfer"),
    "writer_account": _READ | _SNAPSHOTS | _writes("account"),
    "writer_transfer": _READ | _SNAPSHOTS | _writes("transfer"),
}
_EARS = {"_EJ.bank.projected.*", "$JS.EVENT.ADVISORY.STREAM.*.bank"}
HEARD = [
    *(">", "_INBOX.>", "bank.>", "bank.account.*", "$KV.>", "$KV.bank_snapshots.>", "$JS.API.>", "$JS.ACK.>", "$SYS.>"),
    *("$JS.EVENT.>", "_EJ.>", "_EJ.other.projected.*", "_INBOX*", *sorted(_EARS)),
    *(f"_INBOX_{name}.>" for name in NAMES),
]


def _configured(*, stream: str = "bank", durables: tuple[str, ...] = DURABLES, aggregates: tuple[str, ...] = ()) -> str:
    roles = roles_of(stream, aggregates or ("account", "transfer"), durables)
    passwords = "".join(f"{one.variable}: {one.name}\n" for one in roles)
    return f"{passwords}SYS_PASSWORD: sys\n{accounts(stream, roles)}"


def _as(url: str, name: str) -> Endpoint:
    return Endpoint((url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m", config=_configured()) as server:
        with NatsConnection.open(_as(server.url, "admin")) as link:
            link.api("STREAM.CREATE.bank", {"name": "bank", "subjects": ["bank.*.*"], "allow_direct": True})
            bucket = {"name": "KV_bank_snapshots", "subjects": ["$KV.bank_snapshots.>"], "allow_direct": True}
            link.api("STREAM.CREATE.KV_bank_snapshots", bucket)
        yield server


def denied(endpoint: Endpoint, frames: dict[str, bytes]) -> set[str]:
    """Those that the server turns away, each sent alone and followed by a PING."""
    dialled = dial(endpoint, 60.0)
    found: set[str] = set()
    with dialled.sock as sock:
        sock.settimeout(60.0)
        for name, frame in frames.items():
            sock.sendall(frame + b"PING\r\n")
            said = b""
            while b"PONG\r\n" not in said:
                more = sock.recv(65_536)
                assert more, f"the server ended the connection after {name}: {said!r}"
                said += more
            if b"-ERR" in said:
                found.add(name)
    return found


def test_the_roles_are_those_that_are_tried() -> None:
    assert tuple(role.name for role in ROLES) == NAMES
    assert len(PROBES) * len(NAMES) + len(HEARD) * len(NAMES) >= 200
    assert all(allowed <= set(PROBES) for allowed in ALLOWED.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_role_may_send_what_its_work_takes_and_nothing_else(nats: NatsServer, name: str) -> None:
    # What is sent is no JSON, so nothing comes of what is allowed but an error.
    frames = {subject: b"PUB %b _INBOX_%b.probe 1\r\nx\r\n" % (subject.encode(), name.encode()) for subject in PROBES}
    assert set(PROBES) - denied(_as(nats.url, name), frames) == ALLOWED[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_role_hears_its_own_answers_and_no_others(nats: NatsServer, name: str) -> None:
    frames = {subject: b"SUB %b 9%d\r\n" % (subject.encode(), number) for number, subject in enumerate(HEARD)}
    hears = {f"_INBOX_{name}.>"} | (set() if name in ("worker", "rebuild", "snapshots") else _EARS)
    assert set(HEARD) - denied(_as(nats.url, name), frames) == hears


def test_another_account_does_not_see_the_app_at_all(nats: NatsServer) -> None:
    with NatsConnection.open(_as(nats.url, "sys")) as link, pytest.raises(Exception, match=r"JetStream|listens"):
        link.ask(stream_info("bank"))


@pytest.mark.parametrize(
    "target",
    ["$JS.API.STREAM.PURGE.bank", "$JS.API.STREAM.DELETE.KV_bank_snapshots", "$KV.bank_snapshots.account.a"],
)
def test_a_consumer_that_pushes_to_a_forbidden_subject_has_no_effect(nats: NatsServer, target: str) -> None:
    """The server pushes while a client listens, and none does there: its own services count for nothing.

    An event with an empty body, such as those requests have, waits for it.
    """
    with NatsConnection.open(_as(nats.url, "writer")) as link:
        link.publish("bank.account.pushed", b"")
    config = {"name": "pushed", "deliver_subject": target, "ack_policy": "none", "deliver_policy": "all"}
    with NatsConnection.open(_as(nats.url, "rebuild")) as link, NatsConnection.open(_as(nats.url, "admin")) as admin:
        before, snapshots = admin.ask(stream_info("bank")), admin.ask(stream_info("KV_bank_snapshots"))
        assert before.messages
        link.api("CONSUMER.CREATE.bank.pushed", {"stream_name": "bank", "config": config, "action": "create"})
        (made,) = admin.api("CONSUMER.LIST.bank")["consumers"]
        assert not made.get("push_bound")
        assert (made["num_pending"], made["delivered"]["consumer_seq"]) == (before.messages, 0)
        after = link.ask(stream_info("bank"))
        link.api("CONSUMER.DELETE.bank.pushed")
        assert (after.first, after.messages) == (before.first, before.messages)
        assert admin.ask(stream_info("KV_bank_snapshots")).last == snapshots.last


async def test_the_roles_are_enough_for_their_work(tmp_path: Path) -> None:
    """Each does its part of a bank: nobody is denied anything on the way."""
    durables = tuple(one.durable for one in bank.projections.values())
    with NatsServer(sync_interval="1m", config=_configured(durables=durables, aggregates=("account",))) as nats:

        def settings(role: str) -> Settings:
            given = {"servers": nats.url, "user": role, "password": role, "inbox_prefix": f"_INBOX_{role}"}
            return Settings.load({**given, "database": f"sqlite:///{tmp_path}/read.db"}, {})  # type: ignore[typeddict-item]

        async with bank.connect(settings("admin")) as jet:
            assert (await jet.init()).created == ("bank", "KV_bank_snapshots")
        create_tables(Database(settings("admin").database).sync_engine(), bank.projections.values())
        stop = asyncio.Event()
        working = asyncio.create_task(run_workers(bank, settings("worker"), stop=stop))
        async with bank.connect(settings("writer_account")) as jet:
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.open, "ada")
            for _ in range(120):
                done = await accounts.execute("a", Account.deposit, Decimal(1))
            await jet.caught_up("balances", position=done.position, timeout_s=60.0)
        async with bank.connect(settings("reader")) as jet:
            assert (await jet.repository(Account).load("a")).balance == 120
            assert len([one async for one in jet.tail()]) == 121
            await jet.caught_up("balances", position=done.position, timeout_s=60.0)
            with pytest.raises(Forbidden):
                await jet.repository(Account).execute("a", Account.deposit, Decimal(1))
        stop.set()
        await working
        assert (await rebuild(bank, ["balances"], settings("rebuild"), engine="local")).events == 121
        assert (await verify(bank, "balances", settings("rebuild"), engine="local")).differences == 0
        built = await build_snapshots(bank, "account", settings("snapshots"), engine="local")
        assert (built.position, built.tally.events, built.tally.broken) == (121, 121, 0)


def test_the_configuration_is_one_that_the_server_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pems = certificates(tmp_path)
    for role in ROLES:
        monkeypatch.setenv(role.variable, "s3cret")
    given = {"SYS_PASSWORD": "s3cret", "NATS_STORE": str(tmp_path), "NATS_TLS_CERT": str(pems["server.pem"])}
    for name, value in {**given, "NATS_TLS_KEY": str(pems["server.key"])}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "nats.conf").write_text(server_config("bank", ROLES))
    ended = subprocess.run(
        [str(nats_program()), "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "sync_interval: always" in server_config("bank", ROLES)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    app = ["--app", "eventjet.examples.bank.app:bank"]
    assert main(["nats-config", *app]) == 0
    whole = capsys.readouterr().out
    assert "$JS.API.CONSUMER.CREATE.bank.balances-r1" in whole
    assert main(["nats-config", "--accounts", *app]) == 0
    assert capsys.readouterr().out in whole
    assert main(["nats-config", "--postgres", *app]) == 0
    assert "create role eventjet_owner" in capsys.readouterr().out


def test_the_servers_of_compose_take_the_accounts_that_the_command_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["nats-config", "--accounts", "--app", "examples.bank.app:bank", "--app-dir", str(ROOT)]) == 0
    assert capsys.readouterr().out == (ROOT / "deploy" / "accounts.conf").read_text()
    variables = set(re.findall(r"\$([A-Z_]+_PASSWORD)", (ROOT / "deploy" / "accounts.conf").read_text()))
    told = re.search(r"for name in ([A-Z_ ]+);", (ROOT / "compose.yaml").read_text())
    assert told is not None
    assert {f"{name}_PASSWORD" for name in told[1].split()} == variables | {"EVENTJET_DB_PASSWORD"}
    for name in variables:
        monkeypatch.setenv(name, "p0e1")
    monkeypatch.setenv("NATS_NAME", "nats-1")
    config = str(ROOT / "deploy" / "nats.conf")
    ended = subprocess.run([str(nats_program()), "-t", "-c", config], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
