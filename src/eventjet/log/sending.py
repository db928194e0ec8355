"""`Sender`: one try of a save, from its events to the server's answer.

One event goes as a plain publish, several as an atomic batch (ADR-50) with a new batch id on every try. While a batch
is on its way, saves of several events wait and go together in the next one: see `lane`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eventjet.codec.headers import header_block, mark_saves
from eventjet.codec.subjects import subject_of
from eventjet.errors import Forbidden, Refused, StoreUnavailable
from eventjet.jetstream.client import Client
from eventjet.log import outcome
from eventjet.log.lane import Lane, Rider
from eventjet.log.store import Append, event_headers, message_size

GRACE_S = 0.05
"""A try is given this much, however near the deadline is."""
GATHER_SHARE = 0.1
GATHER_MAX_S = 0.005
"""So long, and no longer than this share of what the last batch took, those whose saves it answered are waited for."""

_Writes: TypeAlias = Sequence[Append]


@dataclass(slots=True, eq=False)
class _Ticket:
    """A save in the lane, and its answer."""

    writes: _Writes
    answer: asyncio.Future[outcome.Answer]

    def settle(self, answer: outcome.Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Sender:
    """For any number of tasks of one loop."""

    def __init__(self, app: str, client: Client) -> None:
        self._app = app
        self._client = client
        self._lane: Lane[_Ticket] = Lane()
        self._driver: asyncio.Task[None] | None = None
        self._gathering: asyncio.Future[None] | None = None
        self._expected = 0

    async def send(self, writes: _Writes, deadline: float, *, alone: bool = False) -> outcome.Answer:
        """One try, and its answer. `deadline` is by the monotonic clock.

        It takes no longer than one request, or, where it waits for others, than until the deadline.
        """
        left_s = max(GRACE_S, deadline - time.monotonic())
        if len(writes) == 1 and len(writes[0].events) == 1:
            (write,) = writes
            body, headers = write.events[0].encoded.body, header_block(event_headers(write, 0))
            return await self._ask(self._subject(write), body, headers, min(self._client.timeout_s, left_s))
        if not alone:
            ticket = _Ticket(writes, asyncio.get_running_loop().create_future())
            rider = self._rider(ticket)
            if self._lane.takes(rider):
                return await self._ride(rider, left_s)
        return await self._publish([writes], min(self._client.timeout_s, left_s))

    def _rider(self, ticket: _Ticket) -> Rider[_Ticket]:
        subjects = {self._subject(write) for write in ticket.writes}
        sizes = [message_size(new) for write in ticket.writes for new in write.events]
        return Rider(subjects, len(sizes), sum(sizes), ticket)

    async def _ride(self, rider: Rider[_Ticket], left_s: float) -> outcome.Answer:
        ticket = rider.told
        late = outcome.Silence("its batch was not answered in time")
        timer = asyncio.get_running_loop().call_later(left_s, ticket.settle, late)
        self._lane.put(rider)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        elif self._gathering is not None and len(self._lane) >= self._expected:
            self._gathered()
        try:
            return await ticket.answer
        finally:
            timer.cancel()
            self._lane.leave(rider)

    async def _drive(self) -> None:
        """Send batch after batch, until nobody waits."""
        try:
            while riders := self._lane.depart():
                began = time.monotonic()
                await self._send_together([rider.told for rider in riders])
                await self._gather(len(riders), time.monotonic() - began)
        finally:
            self._driver = None

    async def _send_together(self, tickets: Sequence[_Ticket]) -> None:
        try:
            answer = await self._publish([ticket.writes for ticket in tickets], self._client.timeout_s)
        except Exception as error:  # noqa: BLE001 - it is raised where the save is made, by itself
            if len(tickets) == 1:
                if not tickets[0].answer.done():
                    tickets[0].answer.set_exception(error)
                return
            for ticket in tickets:
                ticket.settle(outcome.Parted(str(error), is_conflict=True))
            return
        counts = [sum(len(write.events) for write in ticket.writes) for ticket in tickets]
        for ticket, own in zip(tickets, outcome.shared(answer, counts), strict=True):
            ticket.settle(own)

    async def _gather(self, answered: int, took_s: float) -> None:
        """Give those that were just answered a moment to come again, where there are several.

        Without it the first of them would go alone, and all others would wait for its batch, for ever in turns.
        """
        self._expected = answered + len(self._lane)
        if self._expected < 2:
            return
        loop = asyncio.get_running_loop()
        self._gathering = loop.create_future()
        timer = loop.call_later(min(GATHER_MAX_S, GATHER_SHARE * took_s), self._gathered)
        try:
            await self._gathering
        finally:
            timer.cancel()
            self._gathering = None

    def _gathered(self) -> None:
        if self._gathering is not None and not self._gathering.done():
            self._gathering.set_result(None)

    async def _publish(self, saves: Sequence[_Writes], timeout_s: float) -> outcome.Answer:
        """Send saves as one batch."""
        blocks = [
            [event_headers(write, index) for write in writes for index in range(len(write.events))] for writes in saves
        ]
        mark_saves(blocks)
        bodies = [
            (self._subject(write), new.encoded.body) for writes in saves for write in writes for new in write.events
        ]
        headers = [header_block(block) for each in blocks for block in each]
        *before, last = [(*body, block) for body, block in zip(bodies, headers, strict=True)]
        return await self._ask(*last, timeout_s, before)

    async def _ask(
        self,
        subject: str,
        body: bytes,
        headers: bytes,
        timeout_s: float,
        before: Sequence[tuple[str, bytes, bytes]] = (),
    ) -> outcome.Answer:
        """The server's answer to the last message, which speaks for all of them."""
        try:
            reply = await self._client.request(subject, body, headers, timeout_s, before, self._app)
        except StoreUnavailable as error:
            return outcome.Silence(error.reason)
        except Forbidden as error:
            return outcome.Violation(error.reason)
        except Refused as error:  # it is too large
            return outcome.Violation(error.reason, error)
        return outcome.answer_in(reply[4])

    def _subject(self, write: Append) -> str:
        return subject_of(self._app, write.aggregate, write.aggregate_id)
