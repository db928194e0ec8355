"""Giving a revision the declared tables, for readers to see."""

from __future__ import annotations

from eventjet.projections.sql_projection import AnyResolved
from eventjet.settings import Settings
from eventjet.sql import revisions
from eventjet.sql.database import Database
from eventjet.sql.revisions import Promoted


def promote(settings: Settings, resolved: AnyResolved) -> Promoted | None:
    """Blocks; None where it has them already. Raises `PromotionRefused` and `Unreachable`."""
    where = Database(settings.database)
    with where.reaching_sync():
        return revisions.promote(where, resolved)


def promoted_told(resolved: AnyResolved, done: Promoted | None) -> str:
    """What came of it, in words."""
    names = ", ".join(table.name for table in resolved.tables)
    tables = f"the table {names}" if len(resolved.tables) == 1 else f"the tables {names}"
    has = f"{resolved.name} revision {resolved.revision} has {tables}"
    if done is None:
        return f"{has} already"
    aside = ", ".join(f"revision {revision}" for revision in done.left) or "no revision"
    return f"{has}; {aside} went aside"
