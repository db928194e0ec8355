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
from eventjet.sql import transitions
from eventjet.sql.checkpoint import FAILED, PAUSED, Checkpoint, ensure, lock
from eventjet.sql.database import Database

_Change: TypeAlias = "Callable[[Connection, Sequence[Checkpoint]], list[Paused]]"


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
        if one.state != PAUSED and one.state not in transitions.PAUSE.states:
            because = f" ({' '.join(one.reason.split()).rstrip('.')})" if one.reason else ""
            raise UsageError(
                f"Revision {one.revision} of projection {one.name!r} is {one.state}{because}, so nothing advances it. "
                "There is nothing to pause."
            )
    return [_outcome(one, transitions.pause(connection, one)) for one in found]


def _resume(connection: Connection, found: Sequence[Checkpoint]) -> list[Paused]:
    for one in found:
        if one.state != PAUSED:
            remedy = "Start a worker that takes it, or rebuild it." if one.state == FAILED else "Nothing to resume."
            raise UsageError(f"Revision {one.revision} of projection {one.name!r} is {one.state}, not paused. {remedy}")
    return [_outcome(one, transitions.resume(connection, one)) for one in found]


def _outcome(before: Checkpoint, after: Checkpoint | None) -> Paused:
    state = before.state if after is None else after.state
    return Paused(before.name, before.revision, state, before.position, changed=after is not None)


def _locked(connection: Connection, name: str, revision: int) -> Checkpoint:
    found = lock(connection, name, revision)
    if found is None:
        raise UsageError(f"There is no revision {revision} of projection {name!r}. See `eventjet status`.")
    return found
