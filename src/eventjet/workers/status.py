"""`status`: where each projection of an app stands."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Self

from sqlalchemy.ext.asyncio import AsyncEngine

from eventjet.errors import EventjetError
from eventjet.nats.api import next_record
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.application import Application
from eventjet.quarantine.rows import parked_counts
from eventjet.settings import Settings
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import ACTIVE, BUILDING, NEW, Checkpoint
from eventjet.sql.database import READ_ONLY, Database
from eventjet.workers.log_identity import state_of_log

_PACE_S = 10.0


@dataclass(frozen=True, slots=True)
class ProjectionStatus:
    """One projection at one revision."""

    name: str
    revision: int
    state: str
    position: int
    """What its rows are true for."""
    log_position: int
    """The log's last position."""
    lag_events: int
    lag_s: float | None
    """Age of the oldest event that is not in it yet; None when it cannot be known."""
    owner: str | None
    """The worker that holds the lease now."""
    generation: int
    """Rebuilds swapped in, and one."""
    reason: str | None
    """Why it failed or waits."""
    declared: bool
    """Whether the app still declares this revision; nobody advances one that no process declares."""
    location: str = ""
    """Where its tables are: empty where they are declared and read, else a schema, or a suffix on SQLite."""
    parked: int = 0
    """Events it could not take, which wait for a decision or for a worker that tries them again."""
    events_per_s: float | None = None
    """How fast its position moves; None when only one look was taken."""
    eta_s: float | None = None
    """When it will have caught up with the log, which grows meanwhile; None when it will not at this pace."""


@dataclass(frozen=True, slots=True)
class Look:
    """All projections at one moment."""

    at: float
    """By this process's monotonic clock."""
    projections: list[ProjectionStatus]


async def status(app: Application, settings: Settings) -> list[ProjectionStatus]:
    """Every projection that is declared or has a checkpoint, by name and revision. Raises `Unreachable`."""
    async with Looker(app, settings) as looker:
        return (await looker.look()).projections


async def measured(app: Application, settings: Settings, pause_s: float = 1.0) -> list[ProjectionStatus]:
    """As `status`, with pace and time left: where something lags, by a second look after a pause."""
    async with Looker(app, settings) as looker:
        first = await looker.look()
        if any(one.lag_events and one.state in (BUILDING, ACTIVE) for one in first.projections):
            await asyncio.sleep(pause_s)
            return paced(first, await looker.look())
        return paced(first, first)


async def watched(
    app: Application, settings: Settings, interval_s: float
) -> AsyncGenerator[list[ProjectionStatus] | EventjetError]:
    """A look every `interval_s` without end, its pace by the looks of the last ten seconds.

    Raises what the first look raises; what goes wrong later is yielded, and looked after again.
    """
    async with Looker(app, settings) as looker:
        looks = deque([await looker.look()])
        yield paced(looks[0], looks[-1])
        while True:
            await asyncio.sleep(interval_s)
            try:
                looks.append(await looker.look())
            except EventjetError as error:
                yield error
                continue
            while len(looks) > 2 and looks[1].at < looks[-1].at - _PACE_S:
                looks.popleft()
            yield paced(looks[0], looks[-1])


def paced(before: Look, after: Look) -> list[ProjectionStatus]:
    """The later look, with what the earlier one tells of pace and time left."""
    seconds = after.at - before.at
    known = {(one.name, one.revision, one.generation): one for one in before.projections}
    return [_paced(one, known.get((one.name, one.revision, one.generation)), seconds) for one in after.projections]


def _paced(one: ProjectionStatus, before: ProjectionStatus | None, seconds: float) -> ProjectionStatus:
    if seconds <= 0 or before is None or one.position < before.position:
        return replace(one, eta_s=None if one.lag_events else 0.0)
    pace = (one.position - before.position) / seconds
    gain = pace - max(0, one.log_position - before.log_position) / seconds
    eta_s = 0.0
    if one.lag_events:
        eta_s = one.lag_events / gain if gain > 0 else None
    return replace(one, events_per_s=pace, eta_s=eta_s)


class Looker:
    """Looks again and again, over connections that it keeps; a fault drops them. Used by one task."""

    def __init__(self, app: Application, settings: Settings) -> None:
        self._app = app
        self._where = Database(settings.database)
        self._endpoint = Endpoint.of(settings)
        self._declared = {(resolved.name, resolved.revision) for resolved in app.projections.values()}
        self._engine: AsyncEngine | None = None
        self._link: NatsConnection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def look(self) -> Look:
        """Every projection that is declared or has a checkpoint, by name and revision. Raises `Unreachable`."""
        try:
            found, parked = await self._checkpoints()
            at = time.monotonic()
            for name, revision in self._declared - {(one.name, one.revision) for one, _ in found}:
                found.append((Checkpoint(name, revision, 1, 0, "", "", 0, None, 0.0, NEW, None), 0.0))
            found.sort(key=lambda pair: (pair[0].name, pair[0].revision))
            compared = await asyncio.to_thread(self._compared, found)
            return Look(at, [replace(one, parked=parked.get((one.name, one.revision), 0)) for one in compared])
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of the connections; the next look opens others."""
        engine, self._engine = self._engine, None
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if engine is not None:
            await engine.dispose()

    async def _checkpoints(self) -> tuple[list[tuple[Checkpoint, float]], dict[tuple[str, int], int]]:
        if self._engine is None:
            self._engine = self._where.engine("eventjet status")
        async with self._where.reaching(), self._engine.connect() as connection:
            await connection.execution_options(**{READ_ONLY: True})
            return await connection.run_sync(lambda sync: (checkpoint.read_all(sync), parked_counts(sync)))

    def _compared(self, found: list[tuple[Checkpoint, float]]) -> list[ProjectionStatus]:
        if self._link is None:
            self._link = NatsConnection.open(self._endpoint)
        return _compared(self._link, self._app.name, found, self._declared)


def _compared(
    link: NatsConnection, stream: str, found: list[tuple[Checkpoint, float]], declared: set[tuple[str, int]]
) -> list[ProjectionStatus]:
    _, state = state_of_log(link, stream)
    ages: dict[int, float | None] = {}
    for one, _ in found:
        if one.position < state.last and one.position not in ages:
            following = next_record(link, stream, one.position + 1)
            ages[one.position] = None if following is None else max(0.0, time.time() - following[1] / 1e9)
    return [
        ProjectionStatus(
            name=one.name,
            revision=one.revision,
            state=one.state,
            position=one.position,
            log_position=state.last,
            lag_events=max(0, state.last - one.position),
            lag_s=ages.get(one.position, 0.0 if one.position >= state.last else None),
            owner=one.owner if lease_left_s > 0 else None,
            generation=one.generation,
            reason=one.reason,
            declared=(one.name, one.revision) in declared,
            location=one.location,
        )
        for one, lease_left_s in found
    ]
