"""Where a lost race is run again: by a command, by a transaction and by an import alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from eventjet.errors import ConcurrencyConflict

T = TypeVar("T")

CONFLICTS_MAX = 100
"""Races lost in a row before the conflict is raised."""


async def retried(
    attempt: Callable[[bool], Awaitable[T | ConcurrencyConflict]], conflicts_max: int = CONFLICTS_MAX
) -> T:
    """`attempt` until it returns something other than a conflict; the argument says whether to read again first.

    Raises the last conflict after `conflicts_max` lost races.
    """
    lost = 0
    while True:
        outcome = await attempt(lost > 0)
        if not isinstance(outcome, ConcurrencyConflict):
            return outcome
        lost += 1
        if lost == conflicts_max:
            raise outcome
        # Between processes nobody queues: spread the rivals out, further with each lost race.
        spread = random.random()  # noqa: S311  no secret
        await asyncio.sleep(spread * min(0.2, 0.002 * 2 ** min(lost, 7)))
