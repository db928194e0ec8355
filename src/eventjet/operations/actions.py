"""What people did in the console: recorded before it is carried out, and again when it has ended.

Everything here raises `Unreachable` where the database cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, Row, insert, literal, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet.shown import cut, printable
from eventjet.sql.database import COMMAND, Database
from eventjet.sql.own_tables import Clock, actions

Outcome: TypeAlias = Literal["begun", "done", "refused", "failed", "cancelled"]

RESULT_MAX = 2_000
"""Characters of what an action came to that are kept."""
_BETWEEN = ","
_a = actions.c


@dataclass(frozen=True, slots=True)
class Begun:
    """An action that somebody asked for; `id` is of the form that they sent."""

    id: str
    app: str
    actor: str
    action: str
    targets: tuple[str, ...]
    details: Mapping[str, Any]
    """What was asked for, as JSON: no secret, nothing personal."""


@dataclass(frozen=True, slots=True)
class RecordedAction:
    """An action as it is recorded."""

    begun: Begun
    at: float
    """Seconds since 1970 by the database's clock."""
    outcome: Outcome
    result: str
    """What it came to, in words."""
    ended_at: float | None
    age_s: float
    """Since it was begun."""


async def begin(database: Database, action: Begun) -> bool:
    """Note it before it is carried out; False where it was noted before, so that it must not be carried out again."""
    values = {
        "id": action.id,
        "app": action.app,
        "actor": action.actor,
        "at": Clock(),
        "action": action.action,
        "target": _BETWEEN.join(action.targets),
        "details": json.dumps(action.details),
        "outcome": "begun",
    }
    try:
        async with _writing(database) as connection:
            await connection.execute(insert(actions).values(values))
    except IntegrityError:
        return False
    return True


async def end(database: Database, action_id: str, outcome: Outcome, result: str) -> None:
    """Note what became of one that was begun; of one that has ended nothing is changed."""
    shown = "\n".join(map(printable, cut(result, RESULT_MAX).split("\n")))
    values = {"outcome": outcome, "result": shown, "ended_at": Clock()}
    async with _writing(database) as connection:
        await connection.execute(update(actions).where(_a.id == action_id, _a.outcome == "begun").values(values))


def recorded(
    connection: Connection, app: str, *, limit: int, skip: int = 0, target: str | None = None
) -> list[RecordedAction]:
    """Those of an app, newest first; of one `target`, where it is named."""
    query = select(*_a, Clock()).where(_a.app == app)
    if target is not None:
        among = literal(_BETWEEN) + _a.target + _BETWEEN
        query = query.where(among.contains(f"{_BETWEEN}{target}{_BETWEEN}", autoescape=True))
    rows = connection.execute(query.order_by(_a.at.desc(), _a.id).offset(skip).limit(limit))
    return [_read(row) for row in rows]


def recorded_as(connection: Connection, app: str, action_id: str) -> RecordedAction | None:
    """The one of this id; None where the app has none."""
    row = connection.execute(select(*_a, Clock()).where(_a.app == app, _a.id == action_id)).one_or_none()
    return None if row is None else _read(row)


def _read(row: Row[Any]) -> RecordedAction:
    values: Any = tuple(row)
    action_id, app, actor, at, action, target, details, outcome, result, ended_at, now = values
    begun = Begun(action_id, app, actor, action, tuple(target.split(_BETWEEN)), json.loads(details))
    return RecordedAction(begun, at, outcome, result, ended_at, max(0.0, now - at))


@asynccontextmanager
async def _writing(database: Database) -> AsyncGenerator[AsyncConnection]:
    engine = database.engine("eventjet ui", COMMAND)
    try:
        async with database.reaching(), engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()
