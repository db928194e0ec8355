"""`eventjet doctor` finds each planted fault, names its cost and its fix, and reports nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from uuid import uuid4

import pytest

from eventjet import Incoming, Reaction, Recorded, inbox, publication
from eventjet.examples.transfer.accounts import Deposited
from eventjet.examples.transfer.app import receipts
from eventjet.findings import Finding
from eventjet.log.topology import IDENTITY
from eventjet.nats.endpoint import Endpoint
from eventjet.sql.revisions import pause
from eventjet.subscriptions.cursor import Cursor
from tests import logs
from tests.integration.doctored import (
    ALONE,
    FAULT,
    NEWER,
    NOTE,
    OK,
    UNKNOWN,
    UNLUCKY,
    WARNING,
    Deployment,
    Kind,
    app_of,
    kinds,
    newer,
)
from tests.integration.ledger_log import eventually
from tests.integration.reacting import working

pytestmark = pytest.mark.usefixtures("no_java")
Needs = Literal["tables", "events"]

BEHIND: frozenset[Kind] = frozenset({("read models", "worker", WARNING), ("reactions", "worker", WARNING)})
"""Warnings that may stand in place of notes where events are not processed yet."""


@dataclass(frozen=True)
class Planted:
    """A fault, how to plant it, and which findings it gives."""

    name: str
    plant: Callable[[Deployment], Awaitable[Any] | None]
    expected: set[Kind]
    says: str
    """A part of the text of one of these findings."""
    needs: Needs = "tables"


def edit(stream: str, **settings: Any) -> Callable[[Deployment], None]:
    return lambda deployment: deployment.edit(stream.format(app=deployment.app.name), **settings)


def remake(stream: str, **settings: Any) -> Callable[[Deployment], None]:
    return lambda deployment: deployment.remake(stream.format(app=deployment.app.name), **settings)


def delete(stream: str) -> Callable[[Deployment], None]:
    return lambda deployment: deployment.delete(stream.format(app=deployment.app.name))


def sql(*statements: str) -> Callable[[Deployment], None]:
    def plant(deployment: Deployment) -> None:
        deployment.execute(*statements)

    return plant


LOG, SNAPSHOTS, CURSORS, TIMERS = "{app}", "KV_{app}_snapshots", "KV_{app}_cursors", "EJ_{app}_timers"
SETTING = {("streams", "setting", FAULT)}


def drop_first_events(deployment: Deployment) -> None:
    deployment.edit(deployment.app.name, max_msgs=1)
    deployment.edit(deployment.app.name, max_msgs=1, discard="old")


async def recreate_log(deployment: Deployment) -> None:
    deployment.delete(deployment.app.name)
    await deployment.init()
    await deployment.deposit(Decimal(1), Decimal(2), Decimal(3))


def cursor_at(position: int, log: str = "") -> Callable[[Deployment], None]:
    def plant(deployment: Deployment) -> None:
        identity = log or deployment.config(deployment.app.name)["metadata"][IDENTITY]
        deployment.put_cursor("receipts", Cursor("receipts", "reactor", identity, position, "no-such-event").encoded())

    return plant


def strange_cursor(deployment: Deployment) -> None:
    log = deployment.config(deployment.app.name)["metadata"][IDENTITY]
    deployment.put_cursor("mails", Cursor("mails", "reactor", log).encoded())


def stray_durable(deployment: Deployment) -> None:
    config = {"durable_name": "deposits-r7", "ack_policy": "none", "deliver_policy": "all"}
    body = {"stream_name": deployment.app.name, "config": config}
    deployment.api(f"CONSUMER.DURABLE.CREATE.{deployment.app.name}.deposits-r7", body)


def leave_killed_rebuild(deployment: Deployment) -> None:
    (deployment.folder / f"read.db.ej_{uuid4().hex[:16]}").write_bytes(b"")


async def pause_projection(deployment: Deployment) -> None:
    await pause(deployment.settings.database, [("deposits", 1)])


def deploy_newer_without_init(deployment: Deployment) -> None:
    deployment.app = app_of(deployment.app.name, projections=[NEWER])


def add_publication(deployment: Deployment) -> None:
    @publication("lights", stream=f"{deployment.app.name}_public", source="https://bank.example")
    def lights(event: Recorded[Deposited]) -> None: ...

    deployment.app = app_of(deployment.app.name, publications=[lights])


def add_inbox(deployment: Deployment) -> None:
    @inbox("payments", stream=f"{deployment.app.name}_payments", subject="payments.>")
    async def payments(message: Incoming[Deposited], to: Reaction[Any]) -> None: ...

    deployment.app = app_of(deployment.app.name, reactors=[receipts, payments])


FAULTS = [
    Planted("retention", remake(LOG, retention="interest"), SETTING, "retention is 'interest'"),
    Planted("max age", edit(LOG, max_age=3_600_000_000_000), SETTING, "max_age is 3600000000000"),
    Planted("discard", edit(LOG, discard="old"), SETTING, "discard is 'old'"),
    Planted("purge", remake(LOG, deny_purge=False), SETTING, "deny_purge is False"),
    Planted("delete", remake(LOG, deny_delete=False), SETTING, "deny_delete is"),
    Planted("no atomic batches", edit(LOG, allow_atomic=False), SETTING, "allow_atomic is"),
    Planted(
        "another window",
        edit(LOG, duplicate_window=5_000_000_000),
        {("streams", "setting", WARNING)},
        "duplicate_window is 5000000000",
    ),
    Planted("no log", delete(LOG), {("streams", "stream", FAULT)}, "does not exist"),
    Planted("no snapshots", delete(SNAPSHOTS), {("streams", "stream", FAULT)}, "_snapshots does not exist"),
    Planted("no cursors", delete(CURSORS), {("streams", "stream", FAULT)}, "_cursors does not exist"),
    Planted("cursors that go", edit(CURSORS, max_age=3_600_000_000_000), SETTING, "_cursors: max_age is"),
    Planted("no timers", delete(TIMERS), {("streams", "stream", FAULT)}, "_timers does not exist"),
    Planted("timers that go", edit(TIMERS, max_msgs=10), SETTING, "_timers: max_msgs is 10"),
    Planted("no identity", edit(LOG, metadata={}), {("streams", "identity", FAULT)}, "carries no log identity"),
    Planted("no public stream", add_publication, {("streams", "publication", FAULT)}, "_public"),
    Planted("no inbox stream", add_inbox, {("streams", "inbox", FAULT)}, "_payments, which payments follows"),
    Planted("stray durable", stray_durable, {("streams", "durables", NOTE)}, "the durable deposits-r7"),
    Planted("killed rebuild", leave_killed_rebuild, {("database", "runs", NOTE)}, "killed rebuilds left ej_"),
    Planted(
        "older tables of eventjet",
        sql("update eventjet_alembic_version set version_num = '0000'"),
        {("database", "tables", FAULT), ("read models", "checkpoint", UNKNOWN)},
        "are at revision 0000",
    ),
    Planted(
        "no database",
        lambda deployment: (deployment.folder / "read.db").unlink(),
        {("database", "database", FAULT), ("read models", "checkpoint", UNKNOWN)},
        "read.db does not exist",
    ),
    Planted(
        "no cursor",
        lambda deployment: deployment.put_cursor("receipts", b""),
        {("reactions", "cursor", FAULT)},
        "no cursor",
    ),
    Planted("strange cursor", strange_cursor, {("reactions", "cursor", NOTE)}, "mails has a cursor at position 0"),
    Planted("cursor ahead", cursor_at(999), {("reactions", "log", FAULT)}, "the log ends at position 0"),
    Planted("cursor of another", cursor_at(1, "other"), {("reactions", "log", FAULT)}, "made from the log other"),
    Planted(
        "nobody works",
        lambda deployment: deployment.deposit(Decimal(1)),
        {("read models", "worker", WARNING)},
        "deposits has no worker, 1 event behind",
    ),
    Planted("paused", pause_projection, {("read models", "paused", NOTE)}, "deposits is paused"),
    Planted("never made", deploy_newer_without_init, {("database", "tables", FAULT)}, "revision 1 holds 'deposits'"),
    Planted("log made anew", recreate_log, {("read models", "log", FAULT)}, "it was made from the log", "events"),
    Planted("first events gone", drop_first_events, set(), "position 1 from its beginning are gone", "events"),
    Planted("table dropped", sql("drop table deposits"), set(), "'deposits' is not in the database", "events"),
    Planted(
        "column dropped",
        sql("alter table deposits drop column number"),
        {("database", "tables", FAULT)},
        "the column deposits.number is missing",
        "events",
    ),
    Planted(
        "rows emptied",
        sql("delete from deposits"),
        {("read models", "rows", WARNING)},
        "deposits has no rows, and its checkpoint has passed",
        "events",
    ),
    Planted(
        "other code",
        sql("update eventjet_projection set code = '0123456789abcdef'"),
        {("read models", "code", WARNING)},
        "rows of deposits revision 1 were made by other code than this app has",
        "events",
    ),
    Planted(
        "worker lost",
        sql("update eventjet_projection set owner = 'gone:1', lease_s = 5, lease_until = 1000"),
        {("read models", "lease", WARNING)},
        "has no worker: gone:1 has not been seen for",
        "events",
    ),
    Planted("revision not built", newer, {("read models", "revision", WARNING)}, "is not what readers see", "events"),
]
ALSO: dict[str, set[Kind]] = {
    # Findings that follow from the fault.
    "no log": {("reactions", "cursor", UNKNOWN), ("read models", "log", UNKNOWN)},
    "no identity": {("reactions", "cursor", UNKNOWN), ("read models", "log", UNKNOWN)},
    "no cursors": {("reactions", "cursor", FAULT)},
    "no public stream": {("reactions", "cursor", FAULT)},
    "no inbox stream": {("reactions", "cursor", FAULT)},
    "never made": {("database", "unused", NOTE)},
    "log made anew": {("reactions", "log", FAULT)},
    "first events gone": {
        ("streams", "whole", FAULT),
        ("streams", "setting", FAULT),
        ("read models", "log", FAULT),
        ("reactions", "log", FAULT),
    },
    "table dropped": {("read models", "log", FAULT)},
    "revision not built": {("database", "unused", NOTE), ("streams", "durables", NOTE)},
}


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
async def test_doctor_finds_a_planted_fault_and_nothing_else(deployment: Deployment, planted: Planted) -> None:
    await deployment.init()
    if planted.needs == "events":
        await deployment.deposit_and_process()
    done = planted.plant(deployment)
    if done is not None:
        await done
    findings = await deployment.findings()
    new = kinds(findings) - ALONE - BEHIND
    assert new == (planted.expected | ALSO.get(planted.name, set())) - BEHIND
    assert planted.expected & BEHIND <= kinds(findings)
    (reported, *_) = [finding for finding in findings if planted.says in finding.what]
    assert (reported.part, reported.check, reported.level) in planted.expected | ALSO.get(planted.name, set())
    assert reported.cost
    assert reported.fix or "`eventjet" in reported.what


async def test_doctor_changes_nothing(deployment: Deployment) -> None:
    await deployment.findings()
    assert list(deployment.folder.iterdir()) == []
    assert deployment.api("STREAM.NAMES", {"subject": f"{deployment.app.name}.*.*"})["total"] == 0
    await deployment.init()
    log, before = (
        deployment.config(deployment.app.name),
        {path: path.read_bytes() for path in deployment.folder.iterdir()},
    )
    await deployment.findings()
    assert deployment.config(deployment.app.name) == log
    assert {path: path.read_bytes() for path in deployment.folder.iterdir()} == before


async def test_a_projection_that_waits_for_a_newer_deploy_is_reported_with_its_reason(deployment: Deployment) -> None:
    """No worker has the lease while its worker waits, which is no reason to start another worker."""
    await deployment.init()
    at = Endpoint.of(deployment.settings)
    logs.append(at, deployment.app.name, [("account.a-1", logs.block("account.deposited", schema=9), b"{}")])

    findings: list[Finding] = []

    async def waits() -> bool:
        findings[:] = [finding for finding in await deployment.findings() if finding.part == "read models"]
        return any(finding.check == "waits" for finding in findings)

    async with working(deployment.app, deployment.settings):
        await eventually(waits, "the doctor to tell the reason")
    (waiting,) = [finding for finding in findings if finding.check == "waits"]
    assert waiting.level == WARNING
    assert waiting.what.startswith("deposits is waiting at position 0, 1 event behind: ")
    assert "schema 9, which this application does not declare" in waiting.what
    assert not any("no worker" in finding.what for finding in findings)


async def test_an_undeclared_event_is_reported_as_init_reports_it(deployment: Deployment) -> None:
    await deployment.init()
    (reported,) = [finding for finding in await deployment.findings() if finding.check == "events"]
    assert reported.level == OK
    at = Endpoint.of(deployment.settings)
    logs.append(at, deployment.app.name, [("account.a-1", logs.block("account.paid_in"), b"{}")])
    (reported,) = [finding for finding in await deployment.findings() if finding.check == "events"]
    assert reported.level == FAULT
    assert reported.what == "the event at position 1 is 'account.paid_in' schema 1, which the app does not declare"
    assert "`eventjet init`" in reported.fix


async def test_quarantined_events_are_reported(deployment: Deployment) -> None:
    await deployment.init()
    await deployment.deposit_and_process(Decimal(1), UNLUCKY)
    (quarantine,) = [finding for finding in await deployment.findings() if finding.check == "quarantine"]
    assert (quarantine.level, quarantine.what) == (WARNING, "deposits has 1 quarantined")
    assert "`eventjet quarantine list deposits`" in quarantine.fix
