"""Waiting for a read model without a connection to the server."""

from __future__ import annotations

from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.waiting import Checkpoints, Waiting


async def wait_caught_up(database: str, resolved: AnyResolved, position: int, timeout_s: float) -> None:
    """Wait as `Jet.caught_up` does, reading the checkpoint again and again."""
    checkpoints = Checkpoints(database)
    waiting = Waiting("", checkpoints)
    try:
        await waiting.caught_up(resolved, position, timeout_s)
    finally:
        await waiting.close()
        await checkpoints.close()
