"""What the tests of revisions share: what `init` of a deploy makes, where revisions stand, and what rows must be."""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from typing import Any

from sqlalchemy import select

from eventjet.projections.resolve import ResolvedProjection
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint, read_all
from eventjet.sql.locations import create_tables, located
from tests.integration.deploys import DEPLOYS, FOLDS, NewerAdded, deployed
from tests.integration.ledger_log import Ledger, eventually
from tests.integration.projecting import Added, Closed, Opened
from tests.tables import reading


def old_deploy(server: str, database: str) -> Ledger:
    """The old deploy over an empty log, with its tables."""
    ledger = Ledger(Settings(servers=(server,), database=database))
    ledger.create()
    init(ledger, "old")
    return ledger


def init(ledger: Ledger, deploy: str) -> list[str]:
    """What `eventjet init` of this deploy makes."""
    return create_tables(ledger.where.sync_engine(), DEPLOYS[deploy][1])


def checkpoints(ledger: Ledger) -> dict[tuple[str, int], Checkpoint]:
    with reading(ledger.settings.database) as connection:
        return {(one.name, one.revision): one for one, _ in read_all(connection)}


def rows(ledger: Ledger, resolved: ResolvedProjection) -> list[tuple[Any, ...]]:
    """The rows of a revision, wherever they are, by key."""
    location = checkpoints(ledger)[resolved.name, resolved.revision].location
    with reading(ledger.settings.database) as connection:
        table = located(resolved.table, location, ledger.where.dialect)
        return sorted(tuple(row) for row in connection.execute(select(table)))


def folded(ledger: Ledger, revision: int, last: int, deploy: str = "old") -> list[tuple[Any, ...]]:
    """What the rows must be, by the plainest loop."""
    found: dict[str, Any] = {}
    for one in deployed(deploy, ledger.settings, ledger.name).recorded(last):
        if isinstance(one.data, Opened | Added | NewerAdded | Closed):
            found[one.aggregate_id] = FOLDS[revision](found.get(one.aggregate_id), one)
    return sorted(astuple(row) for row in found.values() if row is not None)


async def stands(ledger: Ledger, revision: int, *, location: str | None = None, position: int | None = None) -> None:
    async def found() -> bool:
        one = (await asyncio.to_thread(checkpoints, ledger)).get(("balances", revision))
        return one is not None and location in (None, one.location) and position in (None, one.position)

    await eventually(found, f"revision {revision} to be in {location!r} at {position}", 60)


async def is_past(ledger: Ledger, revision: int, position: int) -> bool:
    found = await asyncio.to_thread(checkpoints, ledger)
    return found["balances", revision].position >= position


async def waits(ledger: Ledger) -> bool:
    found = await asyncio.to_thread(checkpoints, ledger)
    return "'ledger.added' schema 2" in (found["balances", 1].reason or "")
