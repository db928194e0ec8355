"""`eventjet doctor` finds each fault that is planted, names what it costs and what mends it, and finds nothing else."""

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
    Kind,
    Sick,
    app_of,
    kinds,
    newer,
)
from tests.integration.ledger_log import eventually
from tests.integration.reacting import working

pytestmark = pytest.mark.usefixtures("no_java")
Needs = Literal["tables", "events"]

BEHIND: frozenset[Kind] = frozenset({("read models", "worker", WARNING), ("reactions", "worker", WARNING)})
"""What may be told in place of a note where there are events that nobody has dealt with."""


@dataclass(frozen=True)
class Planted:
    """One fault."""

    name: str
    plant: Callable[[Sick], Awaitable[Any] | None]
    expected: set[Kind]
    says: str
    """In what one of them tells."""
    needs: Needs = "tables"


def edit(stream: str, **settings: Any) -> Callable[[Sick], None]:
    return lambda sick: sick.edit(stream.format(app=sick.app.name), **settings)


def remake(stream: str, **settings: Any) -> Callable[[Sick], None]:
    return lambda sick: sick.remake(stream.format(app=sick.app.name), **settings)


def delete(stream: str) -> Callable[[Sick], None]:
    return lambda sick: sick.delete(stream.format(app=sick.app.name))


def sql(*statements: str) -> Callable[[Sick], None]:
    def plant(sick: Sick) -> None:
        sick.execute(*statements)

    return plant


LOG, SNAPSHOTS, CURSORS, TIMERS = "{app}", "KV_{app}_snapshots", "KV_{app}_cursors", "EJ_{app}_timers"
SETTING = {("streams", "setting", FAULT)}


def dropping_the_first(sick: Sick) -> None:
    sick.edit(sick.app.name, max_msgs=1)
    sick.edit(sick.app.name, max_msgs=1, discard="old")


async def made_anew(sick: Sick) -> None:
    sick.delete(sick.app.name)
    await sick.made()
    await sick.deposited(Decimal(1), Decimal(2), Decimal(3))


def cursor_at(position: int, log: str = "") -> Callable[[Sick], None]:
    def plant(sick: Sick) -> None:
        identity = log or sick.config(sick.app.name)["metadata"][IDENTITY]
        sick.put_cursor("receipts", Cursor("receipts", "reactor", identity, position, "no-such-event").encoded())

    return plant


def strange_cursor(sick: Sick) -> None:
    log = sick.config(sick.app.name)["metadata"][IDENTITY]
    sick.put_cursor("mails", Cursor("mails", "reactor", log).encoded())


def stray_durable(sick: Sick) -> None:
    config = {"durable_name": "deposits-r7", "ack_policy": "none", "deliver_policy": "all"}
    body = {"stream_name": sick.app.name, "config": config}
    sick.api(f"CONSUMER.DURABLE.CREATE.{sick.app.name}.deposits-r7", body)


def killed_rebuild(sick: Sick) -> None:
    (sick.folder / f"read.db.ej_{uuid4().hex[:16]}").write_bytes(b"")


async def paused(sick: Sick) -> None:
    await pause(sick.settings.database, [("deposits", 1)])


def newer_not_made(sick: Sick) -> None:
    sick.app = app_of(sick.app.name, projections=[NEWER])


def publishing(sick: Sick) -> None:
    @publication("lights", stream=f"{sick.app.name}_public", source="https://bank.example")
    def lights(event: Recorded[Deposited]) -> None: ...

    sick.app = app_of(sick.app.name, publications=[lights])


def receiving(sick: Sick) -> None:
    @inbox("payments", stream=f"{sick.app.name}_payments", subject="payments.>")
    async def payments(message: Incoming[Deposited], to: Reaction[Any]) -> None: ...

    sick.app = app_of(sick.app.name, reactors=[receipts, payments])


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
    Planted("no public stream", publishing, {("streams", "publication", FAULT)}, "_public"),
    Planted("no inbox stream", receiving, {("streams", "inbox", FAULT)}, "_payments, which payments follows"),
    Planted("stray durable", stray_durable, {("streams", "durables", NOTE)}, "the durable deposits-r7"),
    Planted("killed rebuild", killed_rebuild, {("database", "runs", NOTE)}, "killed rebuilds left ej_"),
    Planted(
        "older tables of eventjet",
        sql("update eventjet_alembic_version set version_num = '0000'"),
        {("database", "tables", FAULT), ("read models", "checkpoint", UNKNOWN)},
        "are at revision 0000",
    ),
    Planted(
        "no database",
        lambda sick: (sick.folder / "read.db").unlink(),
        {("database", "database", FAULT), ("read models", "checkpoint", UNKNOWN)},
        "read.db does not exist",
    ),
    Planted("no cursor", lambda sick: sick.put_cursor("receipts", b""), {("reactions", "cursor", FAULT)}, "no cursor"),
    Planted("strange cursor", strange_cursor, {("reactions", "cursor", NOTE)}, "mails has a cursor at position 0"),
    Planted("cursor ahead", cursor_at(999), {("reactions", "log", FAULT)}, "the log ends at position 0"),
    Planted("cursor of another", cursor_at(1, "other"), {("reactions", "log", FAULT)}, "made from the log other"),
    Planted(
        "nobody works",
        lambda sick: sick.deposited(Decimal(1)),
        {("read models", "worker", WARNING)},
        "deposits has no worker, 1 event behind",
    ),
    Planted("paused", paused, {("read models", "paused", NOTE)}, "deposits is paused"),
    Planted("never made", newer_not_made, {("database", "tables", FAULT)}, "revision 1 holds 'deposits'"),
    Planted("log made anew", made_anew, {("read models", "log", FAULT)}, "it was made from the log", "events"),
    Planted("first events gone", dropping_the_first, set(), "position 1 from its beginning are gone", "events"),
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
    # What rests on it is told where it shows.
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
async def test_it_finds_what_is_planted_and_nothing_else(sick: Sick, planted: Planted) -> None:
    await sick.made()
    if planted.needs == "events":
        await sick.begun()
    done = planted.plant(sick)
    if done is not None:
        await done
    found = await sick.found()
    new = kinds(found) - ALONE - BEHIND
    assert new == (planted.expected | ALSO.get(planted.name, set())) - BEHIND
    assert planted.expected & BEHIND <= kinds(found)
    (told, *_) = [one for one in found if planted.says in one.what]
    assert (told.part, told.check, told.level) in planted.expected | ALSO.get(planted.name, set())
    assert told.cost
    assert told.fix or "`eventjet" in told.what


async def test_it_changes_nothing(sick: Sick) -> None:
    await sick.found()
    assert list(sick.folder.iterdir()) == []
    assert sick.api("STREAM.NAMES", {"subject": f"{sick.app.name}.*.*"})["total"] == 0
    await sick.made()
    log, before = sick.config(sick.app.name), {path: path.read_bytes() for path in sick.folder.iterdir()}
    await sick.found()
    assert sick.config(sick.app.name) == log
    assert {path: path.read_bytes() for path in sick.folder.iterdir()} == before


async def test_a_projection_that_waits_for_a_newer_deploy_is_told_with_its_reason(sick: Sick) -> None:
    """Nobody holds it while its worker waits, which is no reason to start another one."""
    await sick.made()
    at = Endpoint.of(sick.settings)
    logs.append(at, sick.app.name, [("account.a-1", logs.block("account.deposited", schema=9), b"{}")])

    found: list[Finding] = []

    async def waits() -> bool:
        found[:] = [one for one in await sick.found() if one.part == "read models"]
        return any(one.check == "waits" for one in found)

    async with working(sick.app, sick.settings):
        await eventually(waits, "the doctor to tell the reason")
    (told,) = [one for one in found if one.check == "waits"]
    assert told.level == WARNING
    assert told.what.startswith("deposits is waiting at position 0, 1 event behind: ")
    assert "schema 9, which this application does not declare" in told.what
    assert not any("no worker" in one.what for one in found)


async def test_an_event_that_the_app_does_not_declare_is_told_as_init_tells_it(sick: Sick) -> None:
    await sick.made()
    (told,) = [one for one in await sick.found() if one.check == "events"]
    assert told.level == OK
    at = Endpoint.of(sick.settings)
    logs.append(at, sick.app.name, [("account.a-1", logs.block("account.paid_in"), b"{}")])
    (told,) = [one for one in await sick.found() if one.check == "events"]
    assert told.level == FAULT
    assert told.what == "the event at position 1 is 'account.paid_in' schema 1, which the app does not declare"
    assert "`eventjet init`" in told.fix


async def test_parked_events_are_told(sick: Sick) -> None:
    await sick.made()
    await sick.begun(Decimal(1), UNLUCKY)
    (told,) = [one for one in await sick.found() if one.check == "quarantine"]
    assert (told.level, told.what) == (WARNING, "deposits has 1 quarantined")
    assert "`eventjet quarantine list deposits`" in told.fix
