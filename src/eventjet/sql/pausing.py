"""Pausing and resuming projections, which workers and rebuilds respect.

A pause deposes the worker: it is fenced at its next commit or renewal and stands by. Nothing of the batch in hand is
lost, since the next owner reads it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy import Connection

from eventjet.errors import UsageError
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import FAILED, PAUSED, Checkpoint, ensure, lock
from eventjet.sql.database import COMMAND, Database
from eventjet.sql.locations import check_owner

_Change: TypeAlias = Callable[[Connection, Checkpoint], Checkpoint | None]


@dataclass(frozen=True, slots=True)
class Paused:
    """What came of pausing or resuming one projection."""

    name: str
    revision: int
    state: str
    position: int
    changed: bool
    """False where it was so already."""


async def pause(
    database: str, chosen: Sequence[tuple[str, int]], *, app: str = "", declared: bool = True
) -> list[Paused]:
    """Pause (name, revision) pairs of an app, all or none; those that are `declared` may never have begun.

    Raises `UsageError` for one that failed or is retired, and `Unreachable`, also as `check_owner`.
    """
    return await _change(database, _pause, chosen, app=app, declared=declared)


async def resume(
    database: str, chosen: Sequence[tuple[str, int]], *, app: str = "", declared: bool = True
) -> list[Paused]:
    """Let (name, revision) pairs of an app go on, all or none.

    Raises `UsageError` for one that is not paused, and `Unreachable`, also as `check_owner`.
    """
    return await _change(database, _resume, chosen, app=app, declared=declared)


async def _change(
    database: str, change: _Change, chosen: Sequence[tuple[str, int]], *, app: str = "", declared: bool
) -> list[Paused]:
    where = Database(database)
    engine = where.engine("eventjet pause", COMMAND)
    try:
        async with where.reaching(), engine.begin() as connection:
            return await connection.run_sync(
                lambda sync: [_changed(sync, change, *one, app=app, declared=declared) for one in sorted(chosen)]
            )
    finally:
        await engine.dispose()


def _changed(
    connection: Connection, change: _Change, name: str, revision: int, *, app: str = "", declared: bool
) -> Paused:
    check_owner(connection, name, app)
    if declared:
        ensure(connection, name, revision, app)
    before = lock(connection, name, revision)
    if before is None:
        raise UsageError(f"There is no revision {revision} of projection {name!r}. See `eventjet status`.")
    after = change(connection, before)
    return Paused(name, revision, (after or before).state, before.position, changed=after is not None)


def _pause(connection: Connection, found: Checkpoint) -> Checkpoint | None:
    if found.state != PAUSED and found.state not in checkpoint.PAUSE.states:
        because = f" ({' '.join(found.reason.split()).rstrip('.')})" if found.reason else ""
        what = f"Revision {found.revision} of projection {found.name!r} is {found.state}{because}"
        raise UsageError(f"{what}, so nothing advances it. There is nothing to pause.")
    return checkpoint.pause(connection, found)


def _resume(connection: Connection, found: Checkpoint) -> Checkpoint | None:
    if found.state != PAUSED:
        remedy = "Start a worker that takes it, or rebuild it." if found.state == FAILED else "Nothing to resume."
        what = f"Revision {found.revision} of projection {found.name!r} is {found.state}"
        raise UsageError(f"{what}, not paused. {remedy}")
    return checkpoint.resume(connection, found)
