"""Every role of `eventjet nats-config` may use its own subjects on the server, and no others."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import product
from pathlib import Path

import pytest

from eventjet.cli.main import main
from eventjet.dev.nats import NatsServer, nats_program
from eventjet.errors import Forbidden
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.jetstream.api import last_message, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.roles import Role, accounts, roles_of, server_config, serving_roles
from eventjet.rebuild import build_snapshots, rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.subscriptions.supervisor import run_workers
from tests.integration.wire_secrets import certificates

ROOT = Path(__file__).parents[2]
DURABLES = ("balances-r1", "balances-r2", "movements-r1")
FOLLOWERS = ("transfer", "receipts", "customers", "echo-1-of-2", "echo-2-of-2")
"""A process, a reactor, a publication, and a reactor that is divided."""
ROLES = roles_of(
    "bank",
    ("account", "transfer"),
    DURABLES,
    FOLLOWERS,
    published=[("public", "customers")],
    received=[("payments", "bank-payments")],
    unique=["account"],
    mirror=True,
)
ROLES += serving_roles("bank", ROLES)
"""The roles of an app with every kind of component."""

WRITERS = {"actor", "writer", "service"}
EACH_WRITER = {*WRITERS, "writer_account", "writer_transfer"}
LOOKS = {"reader", "admin", *EACH_WRITER}
BULK = {"rebuild", "snapshots"}
ACTS = {"admin", "actor"}
NAMES = {"worker", *LOOKS, *BULK, "caller", "mirror"}
NOBODY: set[str] = set()

_OWN = ("bank", "KV_bank_snapshots", "KV_bank_cursors", "EJ_bank_timers")
_OTHERS = ("other", "KV_other_cursors", "public", "payments")
_CONSUMERS = ("CREATE", "DELETE", "MSG.NEXT")


def _stream(verbs: str, *streams: str) -> list[str]:
    return [f"$JS.API.STREAM.{verb}.{stream}" for verb in verbs.split() for stream in streams]


def _consumer(*consumers: str, verbs: Sequence[str] = _CONSUMERS) -> list[str]:
    return [f"$JS.API.CONSUMER.{verb}.{consumer}" for verb in verbs for consumer in consumers]


SENT: dict[str, tuple[set[str], list[str]]] = {
    # Subjects of the log.
    "events of one type": ({*WRITERS, "writer_account"}, ["bank.account.a"]),
    "events of another type": ({*WRITERS, "writer_transfer"}, ["bank.transfer.a"]),
    "claims of unique values": ({*WRITERS, "writer_account"}, ["bank.eventjet_unique.x"]),
    "skip markers": ({"admin"}, ["bank._void.7"]),
    "what lies beside the log's subjects": (NOBODY, ["bank", "bank.account", "bank.account.a.b"]),
    "the log of another app": (NOBODY, ["other.account.a", "other._void.7", "other.eventjet_unique.x"]),
    # Subjects beside the log.
    "snapshots of one type": ({"snapshots", *WRITERS, "writer_account"}, ["$KV.bank_snapshots.account.a"]),
    "snapshots of another type": ({"snapshots", *WRITERS, "writer_transfer"}, ["$KV.bank_snapshots.transfer.a"]),
    "cursors": (ACTS, [f"$KV.bank_cursors.c.{name}" for name in FOLLOWERS]),
    "quarantined events": (ACTS, [f"$KV.bank_cursors.q.{name}.7" for name in FOLLOWERS]),
    "workers of a divided reactor": ({"actor"}, ["$KV.bank_cursors.w.echo.x"]),
    "cursors of what the app no longer has": ({"admin"}, ["$KV.bank_cursors.c.alien", "$KV.bank_cursors.q.alien.7"]),
    "other keys and buckets": (
        NOBODY,
        [
            "$KV.bank_cursors.w.transfer.x",
            "$KV.bank_cursors.z",
            "$KV.bank_snapshots.x",
            "$KV.other_snapshots.account.a",
            "$KV.other_cursors.c.transfer",
            "$KV.misc.k",
            "$O.files.C.x",
        ],
    ),
    "timers": (ACTS, ["_EJ.bank.at.transfer.t"]),
    "timers that have fired": (NOBODY, ["_EJ.bank.due.transfer.t"]),
    "timers of another app": (NOBODY, ["_EJ.other.at.transfer.t", "_EJ.other.due.transfer.t"]),
    "notices": ({"worker"}, ["_EJ.bank.projected.balances", "_EJ.bank.projected.movements"]),
    "notices of others": (NOBODY, ["_EJ.bank.projected.stranger", "_EJ.other.projected.balances"]),
    "publications": ({"actor"}, ["public.customers.a"]),
    "other messages of public streams": (NOBODY, ["public.strangers.a", "payments.captured.a"]),
    # The API of JetStream.
    "look at the log": (NAMES - {"caller", "mirror"}, _stream("INFO MSG.GET", "bank")),
    "read from any replica": (LOOKS, ["$JS.API.DIRECT.GET.bank", "$JS.API.DIRECT.GET.bank.bank.account.a"]),
    "limits of the account": (LOOKS | {"worker"}, ["$JS.API.INFO"]),
    "make streams": ({"admin"}, _stream("CREATE", *_OWN)),
    "change the settings of what has a mirror": ({"admin"}, _stream("UPDATE", "bank", "KV_bank_cursors")),
    "whether there are large bodies": ({"admin"}, _stream("INFO", "OBJ_bank_objects")),
    "ask for a copy": (
        {"mirror"},
        [f"$JS.east.API.CONSUMER.CREATE.{bucket}" for bucket in ("bank", "KV_bank_cursors")],
    ),
    "acknowledge a copy": ({"mirror"}, ["$JS.FC.bank.mine.x", "$JS.FC.KV_bank_cursors.mine.x"]),
    "ask for another copy, or for something else": (
        NOBODY,
        [
            *(f"$JS.east.API.CONSUMER.CREATE.{stream}" for stream in ("bank.mine", "KV_bank_snapshots", *_OTHERS)),
            "$JS.east.API.STREAM.INFO.bank",
            "$JS.east.API.STREAM.MSG.GET.bank",
            "$JS.FC.other.mine.x",
        ],
    ),
    "look at the snapshots' bucket": ({"admin", "snapshots"}, _stream("INFO", "KV_bank_snapshots")),
    "read snapshots": (
        {"snapshots", *EACH_WRITER},
        [
            "$JS.API.STREAM.MSG.GET.KV_bank_snapshots",
            "$JS.API.DIRECT.GET.KV_bank_snapshots.$KV.bank_snapshots.account.a",
        ],
    ),
    "look at cursors and timers": ({"reader", *ACTS}, _stream("INFO", "KV_bank_cursors", "EJ_bank_timers")),
    "read cursors and timers": ({"reader", *ACTS}, _stream("MSG.GET", "KV_bank_cursors", "EJ_bank_timers")),
    "read cursors and timers from any replica": (
        {"reader", *ACTS},
        ["$JS.API.DIRECT.GET.KV_bank_cursors", "$JS.API.DIRECT.GET.EJ_bank_timers"],
    ),
    "ask who else answers": ({"admin"}, ["$KV.bank_cursors._probe._probe"]),
    "ask who else answers for snapshots": ({"admin", "snapshots", *WRITERS}, ["$KV.bank_snapshots._probe._probe"]),
    "ask who else answers for publications": (ACTS, ["public.customers._probe"]),
    "ask who else answers for aggregates": ({"admin", *WRITERS, "writer_account"}, ["bank.account._probe"]),
    "clear timers": (ACTS, _stream("PURGE", "EJ_bank_timers")),
    "look at the state of public streams": (ACTS | {"reader"}, _stream("INFO", "public", "payments")),
    "look at public streams": (ACTS, _stream("MSG.GET", "public", "payments")),
    "make or change the streams of others": (NOBODY, _stream("CREATE UPDATE", *_OTHERS)),
    "change snapshots and timers": (NOBODY, _stream("UPDATE", "KV_bank_snapshots", "EJ_bank_timers")),
    "look at the streams of others": (NOBODY, _stream("INFO MSG.GET", "other", "KV_other_cursors")),
    "purge": (NOBODY, _stream("PURGE", *_OWN[:3], *_OTHERS)),
    "delete, copy or move": (
        NOBODY,
        _stream("DELETE MSG.DELETE SNAPSHOT RESTORE PEER.REMOVE LEADER.STEPDOWN", *_OWN, *_OTHERS),
    ),
    "other direct reads": (
        NOBODY,
        [f"$JS.API.DIRECT.GET.{stream}" for stream in ("KV_bank_snapshots", *_OTHERS)]
        + [
            "$JS.API.DIRECT.GET.KV_bank_cursors.$KV.bank_cursors.c.transfer",
            "$JS.API.DIRECT.GET.other.other.account.a",
        ],
    ),
    "consumers of one's own": (
        {"admin", *BULK},
        [
            *_consumer("bank.mine", "bank.balances-r3"),
            "$JS.API.CONSUMER.CREATE.bank.mine.bank.*.*",
            "$JS.API.CONSUMER.CREATE.bank.mine.bank.account.a",
        ],
    ),
    "durables of projections": ({"admin", "worker"}, _consumer(*(f"bank.{name}" for name in DURABLES))),
    "durables of what follows the log": (ACTS, _consumer(*(f"bank.{name}" for name in FOLLOWERS))),
    "such durables with another filter": (
        {"admin"},
        [f"$JS.API.CONSUMER.CREATE.bank.{name}.bank.account.a" for name in (*DURABLES, *FOLLOWERS)],
    ),
    "durables of inboxes": ({"actor"}, _consumer("payments.bank-payments")),
    "whether durables of projections are paused": (
        {"worker"},
        _consumer(*(f"bank.{n}" for n in DURABLES), verbs=["INFO"]),
    ),
    "whether those of what follows the log are": (
        {"actor"},
        _consumer(*(f"bank.{n}" for n in FOLLOWERS), verbs=["INFO"]),
    ),
    "whether those of inboxes are": ({"actor"}, _consumer("payments.bank-payments", verbs=["INFO"])),
    "list consumers": ({"admin"}, ["$JS.API.CONSUMER.LIST.bank"]),
    "consumers of other streams": (
        NOBODY,
        _consumer(
            "payments.mine", "public.x", "other.x", "KV_bank_snapshots.x", "KV_bank_cursors.x", "EJ_bank_timers.x"
        ),
    ),
    "other requests about consumers": (
        NOBODY,
        _consumer(
            *("bank.mine", "bank.balances-r1", "bank.transfer", "payments.bank-payments", "other.x"),
            verbs=("RESET", "PAUSE", "UNPIN", "LEADER.STEPDOWN", "DURABLE.CREATE"),
        )
        + _consumer("bank.mine", "other.x", verbs=["INFO"])
        + [f"$JS.API.CONSUMER.{verb}.{stream}" for verb in ("CREATE", "NAMES") for stream in ("bank", *_OTHERS)]
        + [f"$JS.API.CONSUMER.LIST.{stream}" for stream in (*_OWN[1:], *_OTHERS)]
        + ["$JS.API.CONSUMER.CREATE.bank.mine.other.account.a"],
    ),
    "the server": (
        NOBODY,
        [
            "$JS.API.STREAM.NAMES",
            "$JS.API.STREAM.LIST",
            "$JS.API.META.LEADER.STEPDOWN",
            "$JS.API.SERVER.REMOVE",
            "$JS.API.ACCOUNT.PURGE.BANK",
            "$JS.API.ACCOUNT.STREAM.MOVE.BANK.bank",
            "$SYS.REQ.SERVER.PING",
            "$SYS.REQ.USER.INFO",
            "$SYS.ACCOUNT.BANK.CONNECT",
        ],
    ),
    "acknowledgements": (NOBODY, ["$JS.ACK.bank.balances-r1.1.1.1.1.0", "$JS.ACK.bank.mine.1.1.1.1.0"]),
    "advisories": (NOBODY, ["$JS.EVENT.ADVISORY.STREAM.UPDATED.bank", "$JS.EVENT.ADVISORY.API"]),
    # Services and answers.
    "commands": ({"caller"}, ["cmd.bank.account.deposit.a"]),
    "what services there are": (
        {"caller"},
        [f"$SRV.{verb}{suffix}" for verb in ("PING", "INFO", "STATS") for suffix in ("", ".bank", ".bank.x")],
    ),
    "services of others": (NOBODY, ["cmd.other.account.deposit.a", "$SRV.PING.other", "$SRV.INFO.other.x"]),
    "inboxes of callers": ({"service"}, ["_INBOX_caller.x.1"]),
    "replies of other accounts": ({"service"}, ["_R_.x.y"]),
    "other inboxes": (
        NOBODY,
        ["_INBOX.x.1", "_GR_.a.b.x", *(f"_INBOX_{role.name}.x.1" for role in ROLES if role.name != "caller")],
    ),
    "anything else": (NOBODY, ["elsewhere", "$JS.API", "$JSC.x", "$NRG.x"]),
}
"""Every class of subject: who may publish there, and subjects of it."""

HEARD: dict[str, tuple[set[str], list[str]]] = {
    "everything": (NOBODY, [">", "*.>", "*.*.*"]),
    "the log": (NOBODY, ["bank.>", "bank.*.*", "bank.account.*", "bank.account.a", "bank._void.*", "other.>"]),
    "buckets": (NOBODY, ["$KV.>", "$KV.bank_snapshots.>", "$KV.bank_cursors.c.transfer", "$O.>"]),
    "timers": (NOBODY, ["_EJ.>", "_EJ.bank.>", "_EJ.bank.at.*.*", "_EJ.bank.due.*.*"]),
    "notices": (LOOKS, ["_EJ.bank.projected.*", "_EJ.bank.projected.balances"]),
    "notices of others": (NOBODY, ["_EJ.other.projected.*", "_EJ.*.projected.*"]),
    "public streams": (NOBODY, ["public.>", "payments.>"]),
    "what happens to the log": (LOOKS, ["$JS.EVENT.ADVISORY.STREAM.*.bank"]),
    "what happens to others": (NOBODY, ["$JS.EVENT.>", "$JS.EVENT.ADVISORY.API", "$JS.EVENT.ADVISORY.STREAM.*.other"]),
    # A subscriber to requests can answer them.
    "requests to the server": (
        NOBODY,
        [
            "$JS.>",
            "$JS.API.>",
            "$JS.API.STREAM.INFO.bank",
            "$JS.API.DIRECT.GET.bank",
            "$JS.API.CONSUMER.>",
            "$JS.ACK.>",
            "$JS.FC.>",
            "$SYS.>",
            "$SYS.REQ.>",
        ],
    ),
    "commands": ({"service"}, ["cmd.bank.>", "cmd.bank.account.deposit.*"]),
    "what services there are": (
        {"service"},
        [f"$SRV.{verb}{suffix}" for verb in ("PING", "INFO", "STATS") for suffix in ("", ".bank", ".bank.x")],
    ),
    "requests to other services": (NOBODY, ["cmd.>", "cmd.other.>", "$SRV.>", "$SRV.PING.other", "$SRV.INFO.other.x"]),
    "all inboxes": (NOBODY, ["_INBOX.>", "_INBOX*.>", "_R_.>", "_GR_.>"]),
    "copies of the log": ({"mirror"}, ["$JS.M.>", "$JSC.>"]),
    **{
        f"the inbox of {role.name}": ({role.name}, [f"_INBOX_{role.name}.>"]) for role in ROLES if role.name != "mirror"
    },
}
"""Every class of subject: who may subscribe there, and subjects of it."""


def _configured(roles: Sequence[Role]) -> str:
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    return f"{passwords}SYS_PASSWORD: sys\n{accounts('bank', roles)}"


def _as(url: str, name: str) -> Endpoint:
    return Endpoint((url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m", config=_configured(ROLES)) as server:
        with NatsConnection.open(_as(server.url, "admin")) as link:
            link.api("STREAM.CREATE.bank", {"name": "bank", "subjects": ["bank.*.*"], "allow_direct": True})
            bucket = {"name": "KV_bank_snapshots", "subjects": ["$KV.bank_snapshots.>"], "allow_direct": True}
            link.api("STREAM.CREATE.KV_bank_snapshots", bucket)
        yield server


def denied_names(endpoint: Endpoint, frames: dict[str, bytes]) -> set[str]:
    """Return the names of the frames that the server denies; each is sent alone, followed by a PING."""
    address = endpoint.addresses()[0]
    names: set[str] = set()
    with socket.create_connection((address.host, address.port), timeout=60.0) as sock:
        options = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "user": endpoint.user,
            "pass": endpoint.password,
        }
        frames = {"CONNECT": b"CONNECT %b\r\n" % json.dumps(options).encode(), **frames}
        for name, frame in frames.items():
            sock.sendall(frame + b"PING\r\n")
            answer = b""
            while b"PONG\r\n" not in answer:
                chunk = sock.recv(65_536)
                assert chunk, f"the server ended the connection after {name}: {answer!r}"
                answer += chunk
            if b"-ERR" in answer:
                names.add(name)
    return names


def _takes(pattern: str, subject: str) -> bool:
    """Return whether a granted pattern covers or equals a subject."""
    parts = [".+" if part == ">" else r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")]
    return re.fullmatch(r"\.".join(parts), subject) is not None


def test_the_table_covers_every_role_and_every_grant() -> None:
    """A new role or grant needs a line in the table, so that its permissions are checked."""
    assert {role.name for role in ROLES} == NAMES
    for table, granted in ((SENT, "publish"), (HEARD, "subscribe")):
        for roles, subjects in table.values():
            assert roles <= NAMES
            assert subjects
        probed = [subject for _, subjects in table.values() for subject in subjects]
        assert len(probed) == len(set(probed))
        grants = [pattern for role in ROLES for pattern in getattr(role, granted)]
        assert [grant for grant in grants if not any(_takes(grant, subject) for subject in probed)] == []


def _wrong(table: dict[str, tuple[set[str], list[str]]], role: str, denied: set[str]) -> list[tuple[str, str]]:
    """Return class and subject of every wrong permission or denial."""
    return [
        (kind, subject)
        for kind, (roles, subjects) in table.items()
        for subject in subjects
        if (subject in denied) == (role in roles)
    ]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_role_may_publish_only_what_its_work_needs(nats: NatsServer, name: str) -> None:
    # The payload is not JSON, so an allowed request has no effect but an error.
    subjects = [subject for _, group in SENT.values() for subject in group]
    frames = {subject: b"PUB %b _INBOX_%b.probe 1\r\nx\r\n" % (subject.encode(), name.encode()) for subject in subjects}
    assert _wrong(SENT, name, denied_names(_as(nats.url, name), frames)) == []


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_role_may_subscribe_only_to_what_its_work_needs(nats: NatsServer, name: str) -> None:
    subjects = [subject for _, group in HEARD.values() for subject in group]
    frames = {subject: b"SUB %b 9%d\r\n" % (subject.encode(), number) for number, subject in enumerate(subjects)}
    queues = {subject: b"SUB %b q 8%d\r\n" % (subject.encode(), number) for number, subject in enumerate(subjects)}
    assert _wrong(HEARD, name, denied_names(_as(nats.url, name), frames)) == []
    assert _wrong(HEARD, name, denied_names(_as(nats.url, name), queues)) == []


@pytest.mark.parametrize("name", sorted(NAMES - {"admin", "caller", "mirror"}))
def test_no_role_can_direct_server_replies_into_a_stream_or_the_api(nats: NatsServer, name: str) -> None:
    """The requester names the reply subject, and no permission limits the server: a reply must not reach the log."""
    granted = [subject for roles, subjects in SENT.values() if name in roles for subject in subjects]
    requests = [
        subject
        for subject in granted
        if subject.startswith("$JS.API.") and not subject.startswith("$JS.API.STREAM.PURGE")
    ]
    # Answered by an event, a refusal, a status without a body, and the answer to an empty request.
    bodies = (b'{"seq":1}', b'{"seq":99999}', b'{"last_by_subj":"bank.account.empty"}', b"")
    targets = [
        *("bank.account.victim", "bank._void.1", "$KV.bank_snapshots.account.victim", "$JS.API.STREAM.PURGE.bank"),
        *("$JS.API.STREAM.DELETE.bank", "$JS.API.STREAM.DELETE.KV_bank_snapshots", "$JS.API.CONSUMER.DELETE.bank.kept"),
    ]
    with NatsConnection.open(_as(nats.url, "writer")) as link:
        link.request("bank.account.empty", b"")
    with NatsConnection.open(_as(nats.url, "admin")) as admin:
        admin.api("CONSUMER.CREATE.bank.kept", {"stream_name": "bank", "config": {"name": "kept"}})
        before = admin.ask(stream_info("bank")), admin.ask(stream_info("KV_bank_snapshots"))
        with NatsConnection.open(_as(nats.url, name)) as link:
            for subject in requests:
                for body, target in product(bodies, targets):
                    link.publish(subject, body, reply=target)
            link.request("$JS.API.STREAM.INFO.bank", b"", timeout_s=60.0)
        after = admin.ask(stream_info("bank")), admin.ask(stream_info("KV_bank_snapshots"))
        assert [(state.last, state.messages, state.created) for state in after] == [
            (state.last, state.messages, state.created) for state in before
        ]
        admin.api("CONSUMER.DELETE.bank.kept")


@pytest.mark.parametrize("name", sorted(EACH_WRITER))
def test_no_writer_can_direct_acknowledgements_into_a_stream(nats: NatsServer, name: str) -> None:
    kind = "transfer" if name == "writer_transfer" else "account"
    with NatsConnection.open(_as(nats.url, name)) as link:
        before = link.ask(stream_info("bank")).last
        for target in ("bank.account.victim", "bank._void.1", "$KV.bank_snapshots.account.victim"):
            link.publish(f"bank.{kind}.a", b"{}", reply=target)
        assert json.loads(link.request(f"bank.{kind}.a", b"{}")[4])["seq"] == before + 4
        assert link.ask(stream_info("bank")).last == before + 4
        assert link.ask(last_message("bank", "bank.account.victim")) is None
        assert link.ask(last_message("bank", "bank._void.1")) is None


def test_another_account_does_not_see_the_app_at_all(nats: NatsServer) -> None:
    with NatsConnection.open(_as(nats.url, "sys")) as link, pytest.raises(Exception, match=r"JetStream|listens"):
        link.ask(stream_info("bank"))


@pytest.mark.parametrize(
    "target",
    ["$JS.API.STREAM.PURGE.bank", "$JS.API.STREAM.DELETE.KV_bank_snapshots", "$KV.bank_snapshots.account.a"],
)
def test_a_consumer_that_pushes_to_a_forbidden_subject_has_no_effect(nats: NatsServer, target: str) -> None:
    """The server pushes only while a client subscribes to the subject; its own services do not count.

    An event with an empty body, such as those requests have, waits for it.
    """
    with NatsConnection.open(_as(nats.url, "writer")) as link:
        link.publish("bank.account.pushed", b"")
    config = {"name": "pushed", "deliver_subject": target, "ack_policy": "none", "deliver_policy": "all"}
    with (
        NatsConnection.open(_as(nats.url, "rebuild")) as link,
        NatsConnection.open(_as(nats.url, "admin")) as admin,
    ):
        before, snapshots = admin.ask(stream_info("bank")), admin.ask(stream_info("KV_bank_snapshots"))
        assert before.messages
        link.api("CONSUMER.CREATE.bank.pushed", {"stream_name": "bank", "config": config, "action": "create"})
        (consumer,) = admin.api("CONSUMER.LIST.bank")["consumers"]
        assert not consumer.get("push_bound")
        assert (consumer["num_pending"], consumer["delivered"]["consumer_seq"]) == (before.messages, 0)
        after = link.ask(stream_info("bank"))
        link.api("CONSUMER.DELETE.bank.pushed")
        assert (after.first, after.messages) == (before.first, before.messages)
        assert admin.ask(stream_info("KV_bank_snapshots")).last == snapshots.last


@pytest.mark.slow
async def test_every_role_has_the_permissions_for_its_work(tmp_path: Path) -> None:
    """Each role does its part of a bank, and the server denies nothing."""
    durables = tuple(projection.durable for projection in bank.projections.values())
    with NatsServer(sync_interval="1m", config=_configured(roles_of("bank", ("account",), durables))) as nats:

        def settings(role: str) -> Settings:
            user = {"servers": nats.url, "user": role, "password": role, "inbox_prefix": f"_INBOX_{role}"}
            return Settings.load({**user, "database": f"sqlite:///{tmp_path}/read.db"}, {})  # type: ignore[typeddict-item]

        async with bank.connect(settings("admin")) as jet:
            assert (await jet.init()).created == ("bank", "KV_bank_snapshots")
        create_tables(Database(settings("admin").database).sync_engine(), bank.projections.values())
        stop = asyncio.Event()
        working = asyncio.create_task(run_workers(bank, settings("worker"), stop=stop))
        async with bank.connect(settings("writer_account")) as jet:
            accounts = jet.repository(Account)
            await accounts.execute("a", Account.open, "ada")
            for _ in range(120):
                result = await accounts.execute("a", Account.deposit, Decimal(1))
            await jet.caught_up("balances", position=result.position, timeout_s=60.0)
        async with bank.connect(settings("reader")) as jet:
            assert (await jet.repository(Account).load("a")).balance == 120
            assert len([event async for event in jet.tail()]) == 121
            await jet.caught_up("balances", position=result.position, timeout_s=60.0)
            with pytest.raises(Forbidden):
                await jet.repository(Account).execute("a", Account.deposit, Decimal(1))
        stop.set()
        await working
        assert (await rebuild(bank, ["balances"], settings("rebuild"), engine="local")).events == 121
        assert (await verify(bank, "balances", settings("rebuild"), engine="local")).differences == 0
        built = await build_snapshots(bank, "account", settings("snapshots"), engine="local")
        assert (built.position, built.tally.events, built.tally.broken) == (121, 121, 0)


@pytest.mark.slow
def test_the_server_accepts_the_generated_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pems = certificates(tmp_path)
    for role in ROLES:
        monkeypatch.setenv(role.variable, "s3cret")
    variables = {"SYS_PASSWORD": "s3cret", "NATS_STORE": str(tmp_path), "NATS_TLS_CERT": str(pems["server.pem"])}
    for name, value in {**variables, "NATS_TLS_KEY": str(pems["server.key"])}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "nats.conf").write_text(server_config("bank", ROLES))
    process = subprocess.run(
        [str(nats_program()), "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "sync_interval: always" in server_config("bank", ROLES)


def test_nats_config_prints_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    app = ["--app", "eventjet.examples.bank.app:bank"]
    assert main(["nats-config", *app]) == 0
    configuration = capsys.readouterr().out
    assert "$JS.API.CONSUMER.CREATE.bank.balances-r1" in configuration
    assert main(["nats-config", "--accounts", *app]) == 0
    assert capsys.readouterr().out in configuration
    assert "user: mirror" not in configuration
    assert main(["nats-config", "--accounts", "--mirror", *app]) == 0
    assert "user: mirror, password: $MIRROR_PASSWORD" in capsys.readouterr().out
    assert main(["nats-config", "--postgres", *app]) == 0
    assert "create role eventjet_owner" in capsys.readouterr().out


@pytest.mark.slow
def test_compose_uses_the_accounts_that_nats_config_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["nats-config", "--accounts", "--app", "examples.bank.app:bank", "--app-dir", str(ROOT)]) == 0
    assert capsys.readouterr().out == (ROOT / "deploy" / "accounts.conf").read_text()
    variables = set(re.findall(r"\$([A-Z_]+_PASSWORD)", (ROOT / "deploy" / "accounts.conf").read_text()))
    loop = re.search(r"for name in ([A-Z_ ]+);", (ROOT / "compose.yaml").read_text())
    assert loop is not None
    assert {f"{name}_PASSWORD" for name in loop[1].split()} == variables | {"EVENTJET_DB_PASSWORD"}
    for name in variables:
        monkeypatch.setenv(name, "p0e1")
    monkeypatch.setenv("NATS_NAME", "nats-1")
    config = str(ROOT / "deploy" / "nats.conf")
    process = subprocess.run([str(nats_program()), "-t", "-c", config], capture_output=True, check=False)
    assert process.returncode == 0, process.stderr
