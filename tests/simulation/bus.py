"""The saves of one process that share batches: the product's own lane, over the simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eventjet.log.lane import Lane, Rider
from eventjet.log.outcome import Answer, Silence
from tests.simulation.stream import Message

if TYPE_CHECKING:
    from tests.simulation.world import World


class Asking(Protocol):
    """Whoever sends and waits for an answer."""

    def answered(self, token: int, answer: Answer) -> None: ...

    def awaits(self, token: int) -> bool: ...


class Bus:
    """One batch is on its way at a time; as a client of the network it has a token for each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lane: Lane[tuple[Asking, int, Sequence[Message]]] = Lane()
        self._riders: list[Rider[tuple[Asking, int, Sequence[Message]]]] = []
        self._token = 0

    def put(self, client: Asking, token: int, messages: Sequence[Message]) -> None:
        """Send them, at once or with the next batch."""
        subjects = {message.subject for message in messages}
        self._lane.put(Rider(subjects, len(messages), len(messages), (client, token, messages)))
        if not self._riders:
            self._depart()

    def leave(self, client: Asking) -> None:
        """Whoever waits no more is not sent either."""
        for rider in list(self._lane):
            if rider.told[0] is client:
                self._lane.leave(rider)

    def awaits(self, token: int) -> bool:
        return token == self._token and bool(self._riders)

    def answered(self, token: int, answer: Answer) -> None:
        """The answer to the batch on its way is that of all who share it; the next one goes."""
        if not self.awaits(token):
            return
        riders, self._riders = self._riders, []
        counts = [rider.events for rider in riders]
        for rider, own in zip(riders, self._world.rules.shared(answer, counts), strict=True):
            client, its_token, _ = rider.told
            if len(riders) > 1:
                self._world.count(f"{type(own).__name__} for one of several")
            client.answered(its_token, own)
        self._depart()

    def _depart(self) -> None:
        world = self._world
        self._riders = self._lane.depart()
        if not self._riders:
            return
        self._token += 1
        messages = [message for rider in self._riders for message in rider.told[2]]
        world.note("batch", self._token, [message.event_id for message in messages])
        world.at(world.weather.request_s, self.answered, self._token, Silence("no answer"))
        world.transmit(self, self._token, f"bus.{self._token}", 1, messages)
