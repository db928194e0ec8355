"""`Workplace`: what all projectors of one process share."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.catalog import Catalog
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.database import Database
from eventjet.wire import Endpoint


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Bounds of a worker; by default it takes over a dead worker's projection in under 5 s."""

    batch_max: int = 1_000
    """Events in one transaction, at most."""
    lease_s: float = 3.5
    """How long a lease lives without a batch or a renewal."""
    poll_s: float = 0.5
    """How often a standby looks for a free lease."""
    backoff_s: tuple[float, float] = (0.1, 5.0)
    """First and longest pause after a transient fault; each is twice the one before."""
    drain_s: float = 10.0
    """How long a stopping worker may take to finish the batches in hand."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """Made within the loop that runs the projectors."""

    stream: str
    catalog: Catalog
    database: Database
    endpoint: Endpoint
    owner: str
    """This process, as leases name it."""
    options: WorkerOptions = WorkerOptions()
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def turn(self) -> AbstractAsyncContextManager[Any]:
        """Held while writing: SQLite has one writer, and its own way of queueing is to poll."""
        return nullcontext() if self.database.dialect == POSTGRESQL else self._turn
