"""Check the database: version, settings, clock, eventjet's tables, read models' tables, and unused tables."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from eventjet.doctor.report import Installation, Report, check_clock
from eventjet.errors import Unreachable
from eventjet.findings import Level
from eventjet.projections.app_ref import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.workspace import leftovers
from eventjet.sql import checkpoint, migrations
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.dialect import Fault, SessionLimits, TableRef, verbatim
from eventjet.sql.locations import check, recorded
from eventjet.sql.own_tables import Clock
from eventjet.sql.revisions import unused
from eventjet.sql.table_differences import differences
from eventjet.subscriptions.status import CheckpointSnapshot, read_checkpoints
from eventjet.text import listed


@dataclass(slots=True)
class StoredReadModels:
    """What the database has of the app's read models, for the checks of other parts."""

    checkpoints: CheckpointSnapshot
    empty: set[str] = field(default_factory=set[str])
    """Names of the projections whose tables have no row."""


def check_database(installation: Installation, report: Report) -> StoredReadModels | None:
    """Check the database and its tables; return the checkpoints, None without any or if they cannot be read."""
    if not installation.app.projections:
        report.ok("database", "the app declares no read models, so it needs no database")
        return None
    database = Database(installation.settings.database)
    statement_ms = int(installation.timeout_s * 1_000)
    limits = SessionLimits(statement_ms=statement_ms, idle_in_transaction_ms=15_000)
    with database.reaching_sync(), database.read_only("eventjet doctor", limits) as connection:
        if connection is None:
            report.fault("database", f"{database.shown} does not exist", "no read model is kept", "`eventjet init`")
            return None
        return _check_connected(installation, report, database, connection)


def _check_connected(
    installation: Installation, report: Report, database: Database, connection: Connection
) -> StoredReadModels | None:
    with _guarded(report, connection, "settings"):
        version, findings = dialect_of(connection).examine(connection)
        for finding in findings:
            report.add(finding.level, finding.check, finding.what, finding.cost, finding.fix)
        report.ok("database", f"{database.shown} is {version}")
    with _guarded(report, connection, "clock"):
        before, began = installation.clock(), time.monotonic()
        database_now = float(connection.scalar(select(Clock())) or 0)
        times = (before, database_now, before + time.monotonic() - began)
        check_clock(report, "database", "the database", times)
    before = len(report.findings)
    with _guarded(report, connection, "tables"):
        migrations.check(connection)
    if len(report.findings) > before:
        return None
    stored: StoredReadModels | None = None
    with _guarded(report, connection, "checkpoints"):
        app = installation.app
        declared = [(resolved.name, resolved.revision) for resolved in app.projections.values()]
        stored = StoredReadModels(read_checkpoints(connection, app.name, declared))
    for resolved in installation.app.projections.values():
        with _guarded(report, connection, "tables"):
            _check_tables(report, connection, resolved, stored)
    with _guarded(report, connection, "unused"):
        _check_unused(report, connection, database, installation.app)
    return stored


@contextmanager
def _guarded(report: Report, connection: Connection, name: str) -> Generator[None]:
    """Turn unusable tables and missing permissions within the block, a savepoint of its own, into findings."""
    try:
        with connection.begin_nested():
            yield
    except Unreachable as error:
        report.unusable(name, error, "workers of it do not start")
    except DBAPIError as error:
        if Fault.FORBIDDEN not in dialect_of(connection).faults(error):
            raise
        reason = str(error.orig).splitlines()[0]
        fix = "Grant `select` on it to this role (`eventjet nats-config --postgres` prints the grants)."
        report.unknown(name, f"not allowed to know: {reason}", "it is not looked at", fix)


def _check_tables(
    report: Report, connection: Connection, resolved: AnyResolved, stored: StoredReadModels | None
) -> None:
    tables = check(connection, resolved)
    stored_checkpoint = checkpoint.read(connection, resolved.name, resolved.revision)
    if stored_checkpoint is None:
        report.fault(
            "tables",
            f"{resolved.name} revision {resolved.revision} has no checkpoint, so it was never made",
            "it holds nothing",
            "`eventjet init`, then a worker or `eventjet rebuild`",
        )
        return
    table_differences = differences(connection, tables)
    for difference in table_differences:
        level = Level.FAULT if difference.breaks else Level.WARNING
        fix = f"`eventjet rebuild {resolved.name}` makes the table as it is declared"
        report.add(level, "tables", f"{resolved.name}: {difference.what}", difference.cost, fix)
    dialect = dialect_of(connection)
    existing = dialect.find_tables(
        connection, checkpoint.names_of(recorded(resolved)), stored_checkpoint.location
    ).values()
    if stored is not None and existing and not any(_has_rows(connection, table) for table in existing):
        stored.empty.add(resolved.name)
    if not table_differences and existing:
        report.ok("tables", f"{listed(table.quoted() for table in existing)} of {resolved.name} as declared")


def _has_rows(connection: Connection, table: TableRef) -> bool:
    return connection.scalar(verbatim(f"select 1 from {table.quoted()} limit 1")) is not None  # noqa: S608 - of a known table


def _check_unused(report: Report, connection: Connection, database: Database, app: Application) -> None:
    runs = leftovers(connection, database)
    if runs:
        report.note(
            "runs",
            f"killed rebuilds left {listed(runs)}",
            "room on the disk",
            "`eventjet db unused --drop-runs`, or the next rebuild",
        )
    for undeclared in unused(connection, list(app.projections.values()), app.name):
        what = f"{undeclared.projection}:{undeclared.revision} is not declared and has {undeclared.rows:,} rows"
        fix = f"`eventjet db unused --drop {undeclared.projection}:{undeclared.revision}`"
        report.note("unused", what, "room on the disk", undeclared.in_use or fix)
