"""Migrations of eventjet's own tables, through Alembic.

They have a version table of their own, so an application's Alembic environment in the same database neither sees nor
changes them. A revision is a file in `versions`, whose `upgrade(op)` is given Alembic's operations: nothing here
touches Alembic's global proxies, which an application may be using at the same time. `own_tables` declares what the
last revision makes, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, select

from eventjet.errors import Unreachable
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.database import dialect_of, unusable

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

HEAD = "0003"
"""The newest revision; a constant, so that checking whether a database is current does not import Alembic."""
VERSION_TABLE = "eventjet_alembic_version"

_version = Table(VERSION_TABLE, MetaData(), Column("version_num", String(32), primary_key=True))


@dataclass(frozen=True, slots=True)
class Upgraded:
    """The result of an upgrade."""

    before: str | None
    """The revision before the upgrade; None when there was none."""
    after: str
    tables: tuple[str, ...] = ()
    """The tables that were created."""
    columns: tuple[str, ...] = ()
    """The columns that were added to existing tables, as `table.column`."""


def version(connection: Connection) -> str | None:
    """Return the revision of eventjet's tables in a database; None when none is noted."""
    exists = dialect_of(connection).find_table(connection, (None, VERSION_TABLE), DECLARED) is not None
    return connection.scalar(select(_version.c.version_num)) if exists else None


def upgrade(connection: Connection) -> Upgraded:
    """Bring eventjet's tables to the newest revision, within the caller's transaction; raises `Unreachable`."""
    if version(connection) == HEAD:
        dialect_of(connection).lock_migrations(connection)
        return Upgraded(HEAD, HEAD)
    # Imported before the lock is taken: on a busy machine that takes longer than others may wait for the lock.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script.revision import RevisionError

    scripts = _scripts()
    dialect_of(connection).lock_migrations(connection)
    before = version(connection)
    if before == HEAD:
        return Upgraded(before, HEAD)
    shape_before = _shape(connection)
    if before is None and shape_before.keys() - {VERSION_TABLE}:
        raise _unversioned(connection, shape_before)
    try:
        steps = list(scripts.iterate_revisions(HEAD, before or "base"))
    except RevisionError:
        raise newer(connection, before) from None
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    for step in reversed(steps):
        step.module.upgrade(Operations(context))
        context.stamp(scripts, step.revision)
    shape_after = _shape(connection)
    return Upgraded(
        before,
        HEAD,
        tuple(sorted(shape_after.keys() - shape_before.keys())),
        tuple(
            f"{table}.{column}"
            for table in sorted(shape_before)
            for column in sorted(shape_after[table] - shape_before[table])
        ),
    )


@cache
def _scripts() -> ScriptDirectory:
    """Return the revisions, which are read once."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(Path(__file__).parent))


def newer(connection: Connection, revision: str | None) -> Unreachable:
    """Return the error for a database whose revision this version of eventjet does not know."""
    reason = f"eventjet's tables in it are at revision {revision!r}, which this version of eventjet does not know"
    return unusable(connection, reason, "A newer eventjet made them: upgrade eventjet here too.")


def check(connection: Connection) -> None:
    """Raise `Unreachable` unless eventjet's tables are at the newest revision."""
    current = version(connection)
    if current == HEAD:
        return
    if current is None:
        tables = _shape(connection)
        if tables.keys() - {VERSION_TABLE}:
            raise _unversioned(connection, tables)
        raise unusable(connection, "eventjet's tables are not in it", "Run `eventjet init` once.")
    if current > HEAD:
        raise newer(connection, current)
    reason = f"eventjet's tables in it are at revision {current}, and this version needs {HEAD}"
    raise unusable(connection, reason, "Run `eventjet db upgrade`.")


def _unversioned(connection: Connection, tables: Iterable[str]) -> Unreachable:
    """Return the error for tables of eventjet whose revision is not noted."""
    reason = f"{VERSION_TABLE!r} is gone or empty, and {', '.join(sorted({*tables} - {VERSION_TABLE}))} are there"
    remedy = "Restore it from a backup, or drop these tables and the read models, and run `eventjet init`."
    return unusable(connection, reason, remedy)


def _shape(connection: Connection) -> dict[str, set[str]]:
    """Return the tables of eventjet that exist, with the names of their columns."""
    inspector = inspect(connection)
    names = [name for name in inspector.get_table_names() if name.startswith("eventjet_")]
    columns_of = inspector.get_multi_columns(filter_names=names) if names else {}
    return {name: {column["name"] for column in columns} for (_, name), columns in columns_of.items()}
