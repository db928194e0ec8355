"""The JetStream store over the simulated server, with interferences of a test between both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from eventjet.codec.catalog import EncodedEvent
from eventjet.domain.identity import new_event_id
from eventjet.errors import StoreUnavailable
from eventjet.log.store import Append, NewEvent
from eventjet.nats.protocol import Frame
from tests.simulation.store import SimulatedClient, SimulatedStore, frame

REQUEST_S = 0.25
SAVE_S = 0.4
SLACK_S = 15.0
"""Extra time for a machine that is busy with other tests."""
LATEST_S = SAVE_S + REQUEST_S + SLACK_S

PATIENT_S = 30.0

Interference = Callable[[str, bytes], bytes | None]
"""(subject, payload) → the answer, or None for the true answer; may raise `StoreUnavailable`, `Forbidden`."""


def writes(*counts: int, expected: int = 0) -> list[Append]:
    """Return a save of aggregates with these numbers of events."""
    return [
        Append("thing", f"t-{number}", expected, 0, tuple(event() for _ in range(count)))
        for number, count in enumerate(counts)
    ]


def event() -> NewEvent:
    return NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, b"{}"))


class DisturbedClient(SimulatedClient):
    """A client of the simulated server with interferences of a test."""

    before: Sequence[Interference] = ()
    """Interferences that answer instead of the server: the request does not reach it."""
    sent = ""
    """The subjects of the current request."""
    after: Sequence[Interference] = ()
    """Interferences after the server has carried out the request."""

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        earlier_messages: Collection[tuple[str, bytes, bytes]] = (),
        stream: str = "",
    ) -> Frame:
        self.sent = " ".join([*(message[0] for message in earlier_messages), subject])
        for interfere in self.before:
            instead = interfere(subject, payload)
            if instead is not None:
                return await self._answer(instead, timeout_s)
        answer = await super().request(subject, payload, headers, timeout_s, earlier_messages, stream)
        for interfere in self.after:
            instead = interfere(subject, payload)
            if instead is not None:
                return await self._answer(instead, timeout_s)
        return answer

    async def _answer(self, instead: bytes, timeout_s: float | None) -> Frame:
        if instead == SILENCE:
            await asyncio.sleep(timeout_s or self.timeout_s)
            raise StoreUnavailable("A request", "no answer")
        return frame(instead)


SILENCE = b"(silence)"


def disturbed(replicas: int = 1) -> tuple[SimulatedStore, DisturbedClient]:
    store = SimulatedStore("shop", replicas=replicas, save_timeout_s=SAVE_S)
    client = DisturbedClient(store.wire, REQUEST_S)
    store.reach(client)
    return store, client


def publishes(answer: bytes) -> Interference:
    """Return an interference with publishes to the log only."""
    return lambda subject, _: answer if subject.startswith("shop.") else None


def everything(answer: bytes) -> Interference:
    return lambda subject, _: answer


def once(interfere: Interference) -> Interference:
    """Return an interference that acts only the first time."""
    left = [interfere]

    def first(subject: str, payload: bytes) -> bytes | None:
        answer = left[0](subject, payload) if left else None
        if answer is not None:
            left.clear()
        return answer

    return first
