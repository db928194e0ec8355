"""`eventjet init`: what the app needs on the server and in the database, made where it is missing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from eventjet.cli.failure import ANSWER_IS_NO
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import print_json, say

if TYPE_CHECKING:
    from eventjet.store.topology import Topology


@dataclass(frozen=True, slots=True)
class InitReport:
    """What `init` found and made."""

    app: str
    topology: Topology
    tables: tuple[str, ...]
    """Tables it created."""


@on_app()
def init(
    at: AppTarget,
    json: JsonOption = False,
) -> None:
    """Create or check the app's stream, bucket and tables; nothing that exists is changed.

    Exit status 1 when something exists and is not as it should be.
    """
    done = asyncio.run(prepare(at))
    drifts = done.topology.drifts
    if json:
        print_json(
            {
                "app": done.app,
                "log": done.topology.identity,
                "created": [*done.topology.created, *done.tables],
                "drifts": [str(drift) for drift in drifts],
            }
        )
    else:
        made = [f"stream {name}" for name in done.topology.created] + [f"table {name}" for name in done.tables]
        for one in made:
            say(f"created  {one}")
        say(f"{done.app} is ready: log {done.topology.identity}, {at.settings.shown()['database']}")
        for drift in drifts:
            say(f"differs  {drift}")
        if drifts:
            say("What differs was made by something else; change it on the server with `nats stream edit`.")
    if drifts:
        raise typer.Exit(ANSWER_IS_NO)


async def prepare(at: AppTarget) -> InitReport:
    """Make what is missing; raises `Unreachable`."""
    from eventjet.sql.database import Database
    from eventjet.sql.locations import create_tables

    app = at.app()
    where = Database(at.settings.database)
    async with app.connect(at.settings) as jet:
        topology = await jet.init()
    engine = where.sync_engine("eventjet init")
    try:
        async with where.reaching():
            tables = create_tables(engine, app.projections.values())
    finally:
        engine.dispose()
    return InitReport(app.name, topology, tuple(tables))
