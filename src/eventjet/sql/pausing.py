"""Pausing and resuming projections: a person's word, which workers and rebuilds respect.

A pause begins another epoch, so the worker is fenced at its next commit or renewal and stands by; nothing of the batch
in hand is lost, since the next owner reads it again. The state before it is kept in `reason`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy import Connection, update

from eventjet.errors import UsageError
from eventjet.sql.checkpoint import ACTIVE, BUILDING, FAILED, NEW, PAUSED, Checkpoint, ensure, is_row, lock
from eventjet.sql.database import Database
from eventjet.sql.own_tables import projections

_Change: TypeAlias = "Callable[[Connection, Sequence[Checkpoint]], list[Paused]]"
_WHILE = "paused while "


@dataclass(frozen=True, slots=True)
class Paused:
    """What came of pausing or resuming one projection."""

    name: str
    revision: int
    state: str
    position: int
    changed: bool
    """False where it was so already."""


async def pause(database: str, chosen: Sequence[tuple[str, int]], *, declared: bool = True) -> list[Paused]:
    """Pause (name, revision) pairs, all or none; those that are `declared` may never have begun.

    Raises `UsageError` for one that failed or is retired, and `Unreachable`.
    """
    return await _change(database, _pause, chosen, declared=declared)


async def resume(database: str, chosen: Sequence[tuple[str, int]], *, declared: bool = True) -> list[Paused]:
    """Let (name, revision) pairs go on, all or none.

    Raises `UsageError` for one that is not paused, and `Unreachable`.
    """
    return await _change(database, _resume, chosen, declared=declared)


async def _change(database: str, change: _Change, chosen: Sequence[tuple[str, int]], *, declared: bool) -> list[Paused]:
    def run(connection: Connection) -> list[Paused]:
        if declared:
            for one in sorted(chosen):
                ensure(connection, *one)
        return change(connection, [_locked(connection, *one) for one in sorted(chosen)])

    where = Database(database)
    engine = where.engine("eventjet pause")
    try:
        async with where.reaching(), engine.begin() as connection:
            return await connection.run_sync(run)
    finally:
        await engine.dispose()


def _pause(connection: Connection, found: Sequence[Checkpoint]) -> list[Paused]:
    for one in found:
        if one.state not in (NEW, BUILDING, ACTIVE, PAUSED):
            because = f" ({' '.join(one.reason.split()).rstrip('.')})" if one.reason else ""
            raise UsageError(
                f"Revision {one.revision} of projection {one.name!r} is {one.state}{because}, so nothing advances it. "
                "There is nothing to pause."
            )
    return [_set(connection, one, PAUSED, _WHILE + one.state) for one in found]


def _resume(connection: Connection, found: Sequence[Checkpoint]) -> list[Paused]:
    for one in found:
        if one.state != PAUSED:
            remedy = "Start a worker that takes it, or rebuild it." if one.state == FAILED else "Nothing to resume."
            raise UsageError(f"Revision {one.revision} of projection {one.name!r} is {one.state}, not paused. {remedy}")
    return [_set(connection, one, _before(one), None) for one in found]


def _before(one: Checkpoint) -> str:
    """The state it had. Building becomes active by itself, so it is the one to take when in doubt."""
    state = (one.reason or "").removeprefix(_WHILE)
    return state if state in (NEW, ACTIVE) else BUILDING


def _locked(connection: Connection, name: str, revision: int) -> Checkpoint:
    found = lock(connection, name, revision)
    if found is None:
        raise UsageError(f"There is no revision {revision} of projection {name!r}. See `eventjet status`.")
    return found


def _set(connection: Connection, one: Checkpoint, state: str, reason: str | None) -> Paused:
    if one.state == state:
        return Paused(one.name, one.revision, state, one.position, changed=False)
    values = {"state": state, "reason": reason, "epoch": one.epoch + 1, "owner": None, "lease_until": 0}
    connection.execute(update(projections).where(is_row(one.name, one.revision)).values(**values))
    return Paused(one.name, one.revision, state, one.position, changed=True)
