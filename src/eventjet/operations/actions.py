"""Pause, resume and promote, and the audit entries of the actions that people take in the console.

An audit entry is written before its action is carried out, and completed when the action has ended. The functions that
read or write audit entries raise `Unreachable` where the database cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, Row, insert, literal, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet.app import App
from eventjet.errors import UsageError
from eventjet.jetstream.client import connected
from eventjet.projections.sql_projection import AnyResolved
from eventjet.settings import Settings
from eventjet.sql import revisions
from eventjet.sql.database import COMMAND, Database
from eventjet.sql.own_tables import Clock, actions
from eventjet.sql.revisions import Paused, Promoted
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.supervisor import chosen_of
from eventjet.text import cut, printable

Outcome: TypeAlias = Literal["begun", "done", "refused", "failed", "cancelled"]

RESULT_MAX = 2_000
"""Characters of an action's result that its audit entry keeps."""
_SEPARATOR = ","
_columns = actions.c


async def pause(app: App, settings: Settings, names: Sequence[str], revision: int | None = None) -> list[Paused]:
    """Pause the named subscriptions, all or none. Raises `UsageError` if one cannot be paused, and `Unreachable`.

    `revision` names another revision than the app declares; then `names` is a single projection.
    """
    return await _change(app, settings, names, revision, revisions.pause, cursor_control.pause)


async def resume(app: App, settings: Settings, names: Sequence[str], revision: int | None = None) -> list[Paused]:
    """Resume the named subscriptions, all or none. Raises `UsageError` if one is not paused, and `Unreachable`."""
    return await _change(app, settings, names, revision, revisions.resume, cursor_control.resume)


def change_text(app: App, change: Paused, *, resumed: bool = False) -> str:
    """Return a line such as `balances revision 1 is paused at position 12`, or that it goes on from there."""
    name = f"{change.name} revision {change.revision}" if change.name in app.projections else change.name
    if resumed:
        return f"{name} goes on from position {change.position:,}"
    return f"{name} {'is paused' if change.changed else 'was paused already'} at position {change.position:,}"


async def _change(
    app: App,
    settings: Settings,
    names: Sequence[str],
    revision: int | None,
    change_projections: Callable[..., Coroutine[Any, Any, list[Paused]]],
    change_followers: Callable[[Cursors, Sequence[str]], Coroutine[Any, Any, list[Paused]]],
) -> list[Paused]:
    """Pause or resume: first the checkpoints of projections, since they may refuse, then the cursors."""
    chosen = chosen_of(app, names)
    if revision is not None and (len(chosen.projections) != 1 or chosen.followers):
        raise UsageError("A revision is about one projection. Name one.")
    pairs = [(resolved.name, revision or resolved.revision) for resolved in chosen.projections]
    done: list[Paused] = []
    if pairs:
        done += await change_projections(settings.database, pairs, app=app.name, declared=revision is None)
    if chosen.followers:
        async with connected(settings) as client:
            done += await change_followers(Cursors(client, app.name), [follower.name for follower in chosen.followers])
    return done


def promote(settings: Settings, resolved: AnyResolved) -> Promoted | None:
    """Activate the tables of the declared revision; None if they are already. Raises `PromotionRefused`. Blocks."""
    database = Database(settings.database)
    with database.reaching_sync():
        return revisions.promote(database, resolved)


def promoted_text(resolved: AnyResolved, promoted: Promoted | None) -> str:
    """Return the result of a promotion as one line of text."""
    names = ", ".join(table.name for table in resolved.tables)
    tables = f"the table {names}" if len(resolved.tables) == 1 else f"the tables {names}"
    has = f"{resolved.name} revision {resolved.revision} has {tables}"
    if promoted is None:
        return f"{has} already"
    inactive = ", ".join(f"revision {revision}" for revision in promoted.previous_revisions) or "no revision"
    return f"{has}; {inactive} is inactive now"


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action that somebody asked for; `id` is that of the submitted form."""

    id: str
    app: str
    actor: str
    action: str
    targets: tuple[str, ...]
    details: Mapping[str, Any]
    """The arguments of the action as JSON, without secrets and personal data."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A recorded action with its outcome."""

    record: ActionRecord
    at: float
    """When the action began, in seconds since 1970 by the database's clock."""
    outcome: Outcome
    result: str
    """The result in words."""
    ended_at: float | None
    age_s: float
    """Seconds since the action began."""


async def begin(database: Database, record: ActionRecord) -> bool:
    """Record an action before it is carried out; return False for an id that is recorded, and must not run again."""
    values = {
        "id": record.id,
        "app": record.app,
        "actor": record.actor,
        "at": Clock(),
        "action": record.action,
        "target": _SEPARATOR.join(record.targets),
        "details": json.dumps(record.details),
        "outcome": "begun",
    }
    try:
        async with _writing(database) as connection:
            await connection.execute(insert(actions).values(values))
    except IntegrityError:
        return False
    return True


async def end(database: Database, action_id: str, outcome: Outcome, result: str) -> None:
    """Record the outcome of an action that has begun; an entry that has ended is left unchanged."""
    text = "\n".join(map(printable, cut(result, RESULT_MAX).split("\n")))
    values = {"outcome": outcome, "result": text, "ended_at": Clock()}
    async with _writing(database) as connection:
        await connection.execute(
            update(actions).where(_columns.id == action_id, _columns.outcome == "begun").values(values)
        )


def audit_entries(
    connection: Connection, app: str, *, limit: int, skip: int = 0, target: str | None = None
) -> list[AuditEntry]:
    """Return the audit entries of an app, newest first; with `target` only those about it."""
    query = select(*_columns, Clock()).where(_columns.app == app)
    if target is not None:
        targets = literal(_SEPARATOR) + _columns.target + _SEPARATOR
        query = query.where(targets.contains(f"{_SEPARATOR}{target}{_SEPARATOR}", autoescape=True))
    rows = connection.execute(query.order_by(_columns.at.desc(), _columns.id).offset(skip).limit(limit))
    return [_entry(row) for row in rows]


def audit_entry(connection: Connection, app: str, action_id: str) -> AuditEntry | None:
    """Return the audit entry with this id; None where the app has none."""
    row = connection.execute(
        select(*_columns, Clock()).where(_columns.app == app, _columns.id == action_id)
    ).one_or_none()
    return None if row is None else _entry(row)


def _entry(row: Row[Any]) -> AuditEntry:
    values: Any = tuple(row)
    action_id, app, actor, at, action, target, details, outcome, result, ended_at, now = values
    record = ActionRecord(action_id, app, actor, action, tuple(target.split(_SEPARATOR)), json.loads(details))
    return AuditEntry(record, at, outcome, result, ended_at, max(0.0, now - at))


@asynccontextmanager
async def _writing(database: Database) -> AsyncGenerator[AsyncConnection]:
    engine = database.engine("eventjet ui", COMMAND, existing=True)
    try:
        async with database.reaching(), engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()
