"""`Prefetch`: the next batch, folded while the database commits the one before it."""

from __future__ import annotations

import logging

from eventjet.sql.statements import Changes
from eventjet.workers.reader import EventReader
from eventjet.writers.writer import Batch, Writer

_log = logging.getLogger(__name__)


class Prefetch:
    """Work done early, and nothing more: what fails here is left to fail in its turn, and the checkpoint lets the batch
    in after the one before it or not at all."""

    def __init__(self, consumer: EventReader) -> None:
        self._consumer = consumer
        self._taken: Batch | None = None
        self._folded: tuple[Batch, Changes] | None = None

    async def take(self, timeout_s: float) -> Batch | None:
        """The next events; None when none came in time or the consumer was woken."""
        batch, self._taken = self._taken, None
        return await self._consumer.take(timeout_s) if batch is None else batch

    def changes(self, batch: Batch) -> Changes | None:
        """What this batch does, if it was folded, and everything before it is committed now."""
        folded, self._folded = self._folded, None
        return folded[1] if folded is not None and folded[0] is batch else None

    async def fold(self, writer: Writer, after: int) -> None:
        """Fold what follows that position once there is a whole batch of it; to be cancelled when it is too late.

        With less to do nobody is in a hurry, and batches would be small.
        """
        if self._taken is None:
            self._taken = await self._consumer.take_whole()
        if self._taken is None or self._taken.after != after:
            return
        try:
            changes = writer.prepare_next(self._taken)
        except Exception as error:  # noqa: BLE001 - it is raised again in its turn, after the batches before it
            _log.debug("the batch after position %d waits for its turn: %s", self._taken.after, error)
            return
        if changes is not None:
            self._folded = (self._taken, changes)
