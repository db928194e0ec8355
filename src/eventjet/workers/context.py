"""`WorkerContext`: what all projectors of one process share."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.catalog import Catalog
from eventjet.nats.endpoint import Endpoint
from eventjet.observability.metrics import Meter
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.quarantine.fold import BlockedAggregates
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.locations import located
from eventjet.workers.notify import Notifier
from eventjet.writers.fold_writer import FoldWriter


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Bounds of a worker; by default it takes over a dead worker's projection in under 5 s."""

    batch_max: int = 16_000
    """Events in one transaction, at most: with slow handlers a worker takes fewer."""
    lease_s: float = 3.5
    """How long a lease lives without a batch or a renewal."""
    poll_s: float = 0.5
    """How often a standby looks for a free lease."""
    backoff_s: tuple[float, float] = (0.1, 5.0)
    """First and longest pause after a transient fault; each is twice the one before."""
    drain_s: float = 10.0
    """How long a stopping worker may take to finish the batches in hand."""
    look_s: float = 5.0
    """How often health and metrics are looked after, where they are served."""
    stalled_s: float = 30.0
    """How long a projection may lag without progress before its worker is called unhealthy."""


@dataclass(frozen=True, slots=True)
class ProgressReporter:
    """Tells of the work on one projection, once a batch: those who wait for positions, and the metrics."""

    meter: Meter
    notifier: Notifier | None = None

    def committed(self, position: int, events: int, seconds: float) -> None:
        """A batch up to `position` is in the database."""
        self.meter.committed(events, seconds)
        if self.notifier is not None:
            self.notifier.tell(self.meter.projection, self.meter.revision, position)

    def ended(self, reason: str) -> None:
        """A term is over: one of `TERM_ENDS`."""
        self.meter.terms[reason] += 1


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Made within the loop that runs the projectors."""

    stream: str
    catalog: Catalog
    database: Database
    endpoint: Endpoint
    owner: str
    """This process, as leases name it."""
    options: WorkerOptions = WorkerOptions()
    notifier: Notifier | None = None
    meters: dict[str, Meter] = field(default_factory=dict[str, Meter], repr=False)
    """What this process has done, by durable."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def reporter(self, resolved: AnyResolved) -> ProgressReporter:
        """For the projector of one projection."""
        meter = self.meters.setdefault(resolved.durable, Meter(resolved.name, resolved.revision))
        return ProgressReporter(meter, self.notifier)

    def fold_writer(
        self, resolved: ResolvedProjection, held: Checkpoint, blocked: BlockedAggregates | None = None
    ) -> FoldWriter:
        """For one term: it writes to where the checkpoint says that the table is."""
        dialect = self.database.dialect
        table = located(resolved.table, held.location, dialect)
        return FoldWriter(resolved, dialect, lease_s=self.options.lease_s, table=table, blocked=blocked)

    def turn(self) -> AbstractAsyncContextManager[Any]:
        """Held while writing: where one writer excludes all others, queueing here is cheaper than polling there."""
        return nullcontext() if self.database.dialect.is_concurrent else self._turn
