"""The database: version, settings, clock, eventjet's tables, the read models' tables, and what is left of others."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from eventjet.doctor.clocks import tell_clock
from eventjet.doctor.diagnosis import Diagnoses, Installation, named
from eventjet.errors import Unreachable
from eventjet.findings import Level
from eventjet.projections.app_ref import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.workspace import leftovers
from eventjet.sql import checkpoint, migrations
from eventjet.sql.database import Database
from eventjet.sql.dialect import SessionLimits, Soundness, dialect_of
from eventjet.sql.locations import check, recorded
from eventjet.sql.own_tables import Clock
from eventjet.sql.revisions import unused
from eventjet.sql.table_differences import differences
from eventjet.subscriptions.status import SeenCheckpoints, see_checkpoints


@dataclass(slots=True)
class SeenDatabase:
    """What the database says of the app's read models."""

    checkpoints: SeenCheckpoints
    empty: set[str] = field(default_factory=set[str])
    """Projections that have no row."""


def look_at_database(installation: Installation, told: Diagnoses) -> SeenDatabase | None:
    """None where there is nothing to be seen, or nothing is needed."""
    if not installation.app.projections:
        told.ok("database", "the app declares no read models, so it needs no database")
        return None
    where = Database(installation.settings.database)
    statement_ms = int(installation.timeout_s * 1_000)
    limits = SessionLimits(statement_ms=statement_ms, idle_in_transaction_ms=15_000)
    with where.reaching_sync(), where.read_only("eventjet doctor", limits) as connection:
        if connection is None:
            told.add(
                "database", Level.FAULT, f"{where.shown} does not exist", "no read model is kept", "`eventjet init`"
            )
            return None
        return _looked(installation, told, where, connection)


def _looked(
    installation: Installation, told: Diagnoses, where: Database, connection: Connection
) -> SeenDatabase | None:
    with _guarded(told, connection, "settings"):
        tell_soundness(told, where.shown, dialect_of(connection).soundness(connection))
    with _guarded(told, connection, "clock"):
        before, began = installation.clock(), time.monotonic()
        there = float(connection.scalar(select(Clock())) or 0)
        times = (before, there, before + time.monotonic() - began)
        tell_clock(told, "database", "the database", times)
    before = len(told.found)
    with _guarded(told, connection, "tables"):
        migrations.check(connection)
    if len(told.found) > before:
        return None
    seen: SeenDatabase | None = None
    with _guarded(told, connection, "checkpoints"):
        app = installation.app
        declared = [(one.name, one.revision) for one in app.projections.values()]
        seen = SeenDatabase(see_checkpoints(connection, app.name, declared))
    for one in installation.app.projections.values():
        with _guarded(told, connection, "tables"):
            _tell_tables(told, connection, one, seen)
    with _guarded(told, connection, "unused"):
        _tell_left(told, connection, where, installation.app)
    return seen


def tell_soundness(told: Diagnoses, shown: str, found: Soundness) -> None:
    """Its version and settings."""
    for one in found.weaknesses:
        bad = Level.FAULT if one.is_fault else Level.NOTE if one.is_rare else Level.WARNING
        told.add("settings", bad, one.what, one.cost, one.remedy)
    told.ok("database", f"{shown} is {found.version}")


@contextmanager
def _guarded(told: Diagnoses, connection: Connection, name: str) -> Generator[None]:
    """Within the block what cannot be used, and what these credentials may not see, is told, and no more.

    A statement that is refused ends a transaction of PostgreSQL's, so each look is one of its own.
    """
    try:
        with connection.begin_nested():
            yield
    except Unreachable as error:
        told.add_unusable(name, error, "workers of it do not start")
    except DBAPIError as error:
        if not dialect_of(connection).is_forbidden(error):
            raise
        said = str(error.orig).splitlines()[0]
        fix = "Grant `select` on it to this role (`eventjet nats-config --postgres` prints the grants)."
        told.add(name, Level.UNKNOWN, f"not allowed to know: {said}", "it is not looked at", fix)


def _tell_tables(told: Diagnoses, connection: Connection, resolved: AnyResolved, seen: SeenDatabase | None) -> None:
    tables = check(connection, resolved)
    held = checkpoint.read(connection, resolved.name, resolved.revision)
    if held is None:
        told.add(
            "tables",
            Level.FAULT,
            f"{resolved.name} revision {resolved.revision} has no checkpoint, so it was never made",
            "it holds nothing",
            "`eventjet init`, then a worker or `eventjet rebuild`",
        )
        return
    found = differences(connection, tables)
    for one in found:
        bad = Level.FAULT if one.breaks else Level.WARNING
        fix = f"`eventjet rebuild {resolved.name}` makes the table as it is declared"
        told.add("tables", bad, f"{resolved.name}: {one.what}", one.cost, fix)
    dialect = dialect_of(connection)
    there = dialect.find_tables(connection, checkpoint.names_of(recorded(resolved)), held.location).values()
    if seen is not None and there and not any(dialect.has_rows(connection, table) for table in there):
        seen.empty.add(resolved.name)
    if not found and there:
        told.ok("tables", f"{named(table.quoted() for table in there)} of {resolved.name} as declared")


def _tell_left(told: Diagnoses, connection: Connection, where: Database, app: Application) -> None:
    runs = leftovers(connection, where)
    if runs:
        told.add(
            "runs",
            Level.NOTE,
            f"killed rebuilds left {named(runs)}",
            "room on the disk",
            "`eventjet db unused --drop-runs`, or the next rebuild",
        )
    for one in unused(connection, list(app.projections.values()), app.name):
        what = f"{one.projection}:{one.revision} is not declared and has {one.rows:,} rows"
        fix = f"`eventjet db unused --drop {one.projection}:{one.revision}`"
        told.add("unused", Level.NOTE, what, "room on the disk", one.in_use or fix)
