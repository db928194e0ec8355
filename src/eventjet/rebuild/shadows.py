"""Which kind of shadow a database gets, and how long it lives: claimed, leased, and dropped at the end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from eventjet import failpoints
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild import postgres, sqlite
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import renewed
from eventjet.rebuild.sequential import TablesShadow
from eventjet.rebuild.shadow import Shadow
from eventjet.rebuild.tables_postgres import PostgresTables
from eventjet.rebuild.tables_sqlite import SqliteTables
from eventjet.sql.database import Database

S = TypeVar("S", bound=Shadow | TablesShadow)


def shadow_of(
    database: Database, resolved: ResolvedProjection, run: str, watch: Watch, *, to_swap: bool = True
) -> AbstractContextManager[Shadow]:
    """A shadow that is gone afterwards, swapped in or not."""
    return _living(_shadow(database, resolved, run), database, run, watch, to_swap=to_swap)


def tables_of(
    database: Database, resolved: ResolvedSql, run: str, watch: Watch, *, to_swap: bool = True
) -> AbstractContextManager[TablesShadow]:
    """The same for SQL by hand."""
    return _living(_tables(database, resolved, run), database, run, watch, to_swap=to_swap)


def unmade(database: Database, resolved: AnyResolved, run: str) -> Shadow | TablesShadow:
    """One of which nothing is made, to ask it what it would meet."""
    return _tables(database, resolved, run) if isinstance(resolved, ResolvedSql) else _shadow(database, resolved, run)


def _shadow(database: Database, resolved: ResolvedProjection, run: str) -> Shadow:
    if database.dialect.name == POSTGRESQL:
        return postgres.PostgresShadow(database, resolved, run)
    return sqlite.SqliteShadow(database, resolved, run)


def _tables(database: Database, resolved: ResolvedSql, run: str) -> TablesShadow:
    if database.dialect.name == POSTGRESQL:
        return PostgresTables(database, resolved, run)
    return SqliteTables(database, resolved, run)


@contextmanager
def _living(shadow: S, database: Database, run: str, watch: Watch, *, to_swap: bool) -> Generator[S]:
    kind = postgres if database.dialect.name == POSTGRESQL else sqlite
    with kind.claimed(database, run):
        failpoints.reach("rebuild.claimed")
        try:
            with watch.interrupted_by(shadow.interrupt), renewed(database.sync_engine("eventjet rebuild"), run):
                shadow.create(to_swap=to_swap)
                failpoints.reach("rebuild.shadow_made")
                yield shadow
        finally:
            shadow.drop()
            failpoints.reach("rebuild.dropped")


def clear_abandoned(database: Database) -> list[str]:
    """Remove what runs left behind whose process is gone; return their names."""
    kind = postgres if database.dialect.name == POSTGRESQL else sqlite
    return kind.clear_abandoned(database)
