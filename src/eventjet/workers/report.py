"""`Report`: what a projector tells of its work, once a batch: to those who wait for positions, and to the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from eventjet.observability.metrics import Meter
from eventjet.workers.notify import Notifier


@dataclass(frozen=True, slots=True)
class Report:
    """About one projection, of one process."""

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
