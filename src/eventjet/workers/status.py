"""`status`: where each projection of an app stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from eventjet.codec.catalog import Catalog
from eventjet.projections import checkpoint
from eventjet.projections.checkpoint import NEW, Checkpoint
from eventjet.projections.database import READ_ONLY, Database
from eventjet.projections.sql import AnyBound
from eventjet.settings import Settings
from eventjet.wire import Endpoint, Link, next_record
from eventjet.workers.identity import state_of_log


class Projecting(Protocol):
    """What workers need of an app."""

    @property
    def name(self) -> str:
        """Of its stream too."""
        ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def projections(self) -> Mapping[str, AnyBound]: ...


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


async def status(app: Projecting, settings: Settings) -> list[ProjectionStatus]:
    """Every projection that is declared or has a checkpoint, by name and revision. Raises `Unreachable`."""
    found = await _checkpoints(Database(settings.database))
    declared = {(bound.name, bound.revision) for bound in app.projections.values()}
    for name, revision in declared - {(one.name, one.revision) for one, _ in found}:
        found.append((Checkpoint(name, revision, 1, 0, "", "", 0, None, 0.0, NEW, None), 0.0))
    found.sort(key=lambda pair: (pair[0].name, pair[0].revision))
    return await asyncio.to_thread(_compared, Endpoint.of(settings), app.name, found, declared)


async def _checkpoints(where: Database) -> list[tuple[Checkpoint, float]]:
    engine = where.engine("eventjet status")
    try:
        async with where.reaching(), engine.connect() as connection:
            await connection.execution_options(**{READ_ONLY: True})
            return await connection.run_sync(checkpoint.read_all)
    finally:
        await engine.dispose()


def _compared(
    endpoint: Endpoint, stream: str, found: list[tuple[Checkpoint, float]], declared: set[tuple[str, int]]
) -> list[ProjectionStatus]:
    with Link.open(endpoint) as link:
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
        )
        for one, lease_left_s in found
    ]
