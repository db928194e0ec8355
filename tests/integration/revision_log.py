"""Helpers for the tests of revisions: deploys, checkpoints of revisions, and their expected rows."""

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
    """Return the old deploy over an empty log, with its tables."""
    ledger = Ledger(Settings(servers=(server,), database=database))
    ledger.create()
    init(ledger, "old")
    return ledger


def init(ledger: Ledger, deploy: str) -> list[str]:
    """Create the tables that `eventjet init` of this deploy creates."""
    return create_tables(ledger.where.sync_engine(), DEPLOYS[deploy][1])


def checkpoints(ledger: Ledger) -> dict[tuple[str, int], Checkpoint]:
    with reading(ledger.settings.database) as connection:
        return {(checkpoint.name, checkpoint.revision): checkpoint for checkpoint, _ in read_all(connection)}


def rows(ledger: Ledger, resolved: ResolvedProjection) -> list[tuple[Any, ...]]:
    """Return the rows of a revision by key, wherever its table is."""
    location = checkpoints(ledger)[resolved.name, resolved.revision].location
    with reading(ledger.settings.database) as connection:
        table = located(resolved.table, location, ledger.where.dialect)
        return sorted(tuple(row) for row in connection.execute(select(table)))


def folded(ledger: Ledger, revision: int, last: int, deploy: str = "old") -> list[tuple[Any, ...]]:
    """Return the expected rows of a revision, by a plain loop over the log."""
    balances: dict[str, Any] = {}
    for event in deployed(deploy, ledger.settings, ledger.name).recorded(last):
        if isinstance(event.data, Opened | Added | NewerAdded | Closed):
            balances[event.aggregate_id] = FOLDS[revision](balances.get(event.aggregate_id), event)
    return sorted(astuple(row) for row in balances.values() if row is not None)


async def stands(ledger: Ledger, revision: int, *, location: str | None = None, position: int | None = None) -> None:
    async def is_there() -> bool:
        checkpoint = (await asyncio.to_thread(checkpoints, ledger)).get(("balances", revision))
        return (
            checkpoint is not None
            and location in (None, checkpoint.location)
            and position in (None, checkpoint.position)
        )

    await eventually(is_there, f"revision {revision} to be in {location!r} at {position}", 60)


async def is_past(ledger: Ledger, revision: int, position: int) -> bool:
    current = await asyncio.to_thread(checkpoints, ledger)
    return current["balances", revision].position >= position


async def waits(ledger: Ledger) -> bool:
    current = await asyncio.to_thread(checkpoints, ledger)
    return "'ledger.added' schema 2" in (current["balances", 1].reason or "")
