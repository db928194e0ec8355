"""`eventjet status`: where each read model stands."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

from eventjet.cli.target import AppDirOption, AppOption, DatabaseOption, JsonOption, ServersOption, target

if TYPE_CHECKING:
    from eventjet.workers.status import ProjectionStatus


def status(
    json: JsonOption = False,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    servers: ServersOption = None,
    database: DatabaseOption = None,
) -> None:
    """Show each projection's state, position, lag in events and in seconds, and the worker that keeps it."""
    from eventjet.cli.terminal import counted, print_json, print_table, say
    from eventjet.workers.status import status as read

    at = target(app, app_dir, servers, database)
    found = asyncio.run(read(at.app(), at.settings))
    if json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        say("The app declares no projections.")
        return
    print_table(("projection", "rev", "state", "position", "lag", "lag s", "worker"), list(map(_row, found)))
    for one in found:
        if one.parked:
            say(f"{one.name}: {counted(one.parked, 'event')} parked; see `eventjet quarantine list {one.name}`")
        if one.reason:
            say(f"{one.name}: {one.reason}")
        if not one.declared:
            say(f"{one.name} revision {one.revision}: the app no longer declares it, so only older workers advance it")


def _row(one: ProjectionStatus) -> tuple[object, ...]:
    lag_s = None if one.lag_s is None else round(one.lag_s, 1)
    return one.name, one.revision, one.state, one.position, one.lag_events, lag_s, one.owner
