"""Saves of a process that share batches: the product's batch queue over the simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eventjet.log.outcome import Answer, NoReply
from eventjet.log.publish import BatchQueue, PendingSave
from tests.simulation.stream import Message

if TYPE_CHECKING:
    from tests.simulation.world import World


class Requester(Protocol):
    """A sender that waits for an answer."""

    def answered(self, token: int, answer: Answer) -> None: ...

    def awaits(self, token: int) -> bool: ...


class Bus:
    """The sender of batches, one at a time, with a token for each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._queue: BatchQueue[tuple[Requester, int, Sequence[Message]]] = BatchQueue()
        self._batch: list[PendingSave[tuple[Requester, int, Sequence[Message]]]] = []
        self._token = 0

    def put(self, client: Requester, token: int, messages: Sequence[Message]) -> None:
        """Send them, at once or with the next batch."""
        subjects = {message.subject for message in messages}
        self._queue.put(PendingSave(subjects, len(messages), len(messages), (client, token, messages)))
        if not self._batch:
            self._send_next()

    def leave(self, client: Requester) -> None:
        """Discard the queued saves of a client that no longer waits."""
        for save in list(self._queue):
            if save.payload[0] is client:
                self._queue.discard(save)

    def awaits(self, token: int) -> bool:
        return token == self._token and bool(self._batch)

    def answered(self, token: int, answer: Answer) -> None:
        """Give the answer of the batch to each of its saves, and send the next batch."""
        if not self.awaits(token):
            return
        batch, self._batch = self._batch, []
        counts = [save.events for save in batch]
        for save, own in zip(batch, self._world.rules.shared(answer, counts), strict=True):
            client, its_token, _ = save.payload
            if len(batch) > 1:
                self._world.count(f"{type(own).__name__} for one of several")
            client.answered(its_token, own)
        self._send_next()

    def _send_next(self) -> None:
        world = self._world
        self._batch = self._queue.next_batch()
        if not self._batch:
            return
        self._token += 1
        messages = [message for save in self._batch for message in save.payload[2]]
        world.note("batch", self._token, [message.event_id for message in messages])
        world.at(world.weather.request_s, self.answered, self._token, NoReply("no answer"))
        world.transmit(self, self._token, f"bus.{self._token}", 1, messages)
