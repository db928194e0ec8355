"""A schedule: a virtual clock, a network that loses and delays, a server that pauses, loses its leader or has two.

Everything is drawn from one seed, so the same seed gives the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any

from eventjet.log.outcome import Acked, Answer, Conflicted, ErrorReply, NextMessage, NoReply, PermissionDenied
from tests.simulation.bus import Bus, Requester
from tests.simulation.checks import check, check_repeated
from tests.simulation.client import Attempt, Client, Rules
from tests.simulation.stream import CLAIMED, FULL, Message, Proposal, Stream
from tests.simulation.weather import BUSY, NO_SPACE, UNAVAILABLE, UNLISTED, Weather, Window, drawn

EVENTS_MAX = 20_000
"""The limit of events in a schedule: one with more does not end."""
SHARING = 0.3
"""The share of schedules whose clients are in the same process."""
PRODUCT = Rules()
_NO_RESPONDERS = NoReply("no responders")


class World:
    """The whole state of a schedule."""

    def __init__(self, seed: int, rules: Rules = PRODUCT, trace: list[Any] | None = None) -> None:
        self.random = random = Random(seed).random
        self.rules = rules
        self.now = 0.0
        self.weather: Weather = drawn(random)
        self.stream = Stream(replicas=self.weather.replicas, dedupe_s=self.weather.dedupe_s)
        self.bus = Bus(self) if random() < SHARING else None
        """The sender of saves of several events, if all clients are in the same process."""
        self.subjects = "abcdefgh" if self.bus is not None else "abc"[: 1 + int(random() * 3)]
        self.attempts: list[Attempt] = []
        self.counts: dict[str, int] = {}
        self._trace = trace
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._outstanding: dict[int, Proposal] = {}
        self._deposed: Stream | None = None
        self._rivals = 0
        self._claimed = 0

    def run(self) -> None:
        """Run until nothing is under way, including late copies; raise `Broken` for a broken promise."""
        self.count(f"replicas {self.weather.replicas}")
        for window in self.weather.windows:
            self.at(window.start, self._begin, window)
        clients, within_s = (4, 0.05) if self.bus is not None else (2, 2.0)
        for number in range(clients + int(self.random() * 3)):
            self.at(self.random() * within_s, Client(self, f"c{number}", 1 + int(self.random() * 2)).next_save)
        heap = self._heap
        calls = 0
        while heap:
            self.now, _, call, arguments = heappop(heap)
            call(*arguments)
            calls += 1
            assert calls < EVENTS_MAX, "the schedule does not end"
        check(self.stream, self.attempts, self.weather.request_s)

    def at(self, after: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay."""
        self._order += 1
        heappush(self._heap, (self.now + after, self._order, call, arguments))

    def note(self, *details: Any) -> None:
        """Add an entry to the trace."""
        if self._trace is not None:
            self._trace.append((round(self.now, 6), *map(str, details)))

    def count(self, occurrence: str) -> None:
        """Increase the count of an occurrence."""
        self.counts[occurrence] = self.counts.get(occurrence, 0) + 1

    def decided(self, attempt: Attempt, tries: int) -> None:
        """Take the outcome of a save."""
        self.note("outcome", attempt.name, attempt.outcome)
        if not attempt.was_unknown:
            self.attempts.append(attempt)
        kind = type(attempt.outcome).__name__
        if isinstance(attempt.outcome, Conflicted) and attempt.outcome.index is None:
            self.count("Conflicted without another's event")
        self.count(f"{kind} {'when resumed' if attempt.was_unknown else 'at once' if tries == 1 else 'after doubt'}")
        check(self.stream, [attempt], self.weather.request_s, final=False)

    def repeated(self, attempt: Attempt, positions: Sequence[int]) -> None:
        """Take the first positions of a repeated command on its subjects, 0 for none."""
        self.note("repeated", attempt.command, positions)
        self.count("repeated and answered")
        check_repeated(attempt.command, positions)

    def load(self, subject: str) -> tuple[int, int]:
        """Return position and version of a subject's last event from a replica that may lag."""
        length = len(self.stream.log)
        if self.random() < self.weather.stale:
            length -= int(self.random() * 4)
            self.count("stale load")
        position = self.stream.last_by(length, subject)
        return position, self.stream.log[position - 1].version if position else 0

    def transmit(self, client: Requester, token: int, name: str, tries: int, messages: list[Message]) -> None:
        """Put an attempt on the network: whole, late, cut in two, with a hole, or not at all."""
        random, mishap = self.random, self.weather.mishap
        draw = random()
        if draw < mishap:
            self.count("request lost")
        elif draw < 2 * mishap:
            self.count("request late")
            self.at(random() * 30.0, self._arrive, client, token, f"{name}/{tries}", messages, 0, len(messages))
        elif len(messages) > 1 and draw < 3 * mishap:
            self._cut(client, token, f"{name}/{tries}", messages)
        else:
            delay = 0.0005 + 0.05 * random() * random()
            self.at(delay, self._arrive, client, token, f"{name}/{tries}", messages, 0, len(messages))
        if random() < mishap / 2:
            self.count("connection lost")
            self.at(random() * 0.1, client.answered, token, NoReply("the connection was lost"))

    def ask_slot(self, client: Requester, token: int, index: int, message: Message) -> None:
        """Ask the leader for a slot."""
        if self.random() >= self.weather.mishap:
            self.at(0.0005 + 0.02 * self.random(), self._read, client, token, index, message)

    def _cut(self, client: Requester, token: int, batch: str, messages: list[Message]) -> None:
        """Break the connection within a batch: the rest comes later, or never, or messages on the way are lost."""
        self.count("batch cut")
        random = self.random
        first = int(random() * len(messages))
        second = first + int(random() * (len(messages) - first))
        self.at(0.001 + random() * 0.01, self._arrive, client, token, batch, messages, 0, first)
        if random() < 0.8:
            later = 0.2 + random() * (2.0 if random() < 0.7 else 20.0)
            self.at(later, self._arrive, client, token, batch, messages, second, len(messages))

    def _window(self) -> Window | None:
        now = self.now
        for window in self.weather.windows:
            if window.start <= now < window.end:
                return window
        return None

    def _begin(self, window: Window) -> None:
        self.count(window.kind)
        self.note("begins", window.kind)
        if window.kind in ("election", "deposed"):
            self._deposed = self.stream.as_of_now() if window.kind == "deposed" else None
            for number, proposal in list(self._outstanding.items()):
                if self.random() < 0.5:
                    self.at(window.end - self.now, self._survive, number, proposal)
                else:
                    del self._outstanding[number]
                    self.count("proposal lost")
            self.stream.lose_leader()
        elif window.kind == "restart":
            self.stream.lose_leader()

    def _survive(self, number: int, proposal: Proposal) -> None:
        if self._outstanding.pop(number, None) is not None:
            self.count("proposal survived")
            self.stream.apply(proposal, self.now)

    def _arrive(self, client: Requester, token: int, batch: str, messages: list[Message], first: int, end: int) -> None:
        """Deliver messages of an attempt to the server; the last of all asks for an answer."""
        window = self._window()
        kind = "" if window is None else window.kind
        last = end == len(messages)
        if kind == "pause" and window is not None:
            self.at(window.end - self.now, self._arrive, client, token, batch, messages, first, end)
        elif kind in ("election", "deposed", "restart"):
            if last and self.random() < 0.8:
                self._reply(client, token, _NO_RESPONDERS)
        elif kind == "denied":
            if last:
                self._reply(client, token, PermissionDenied("permissions violation"))
        elif not self._turned_away(kind, client, token, last=last):
            if kind == "two leaders" and self._deposed is not None and self.random() < 0.8:
                answer = _taken(self._deposed, batch, messages, first, end, self.now)
                if last and answer is not None and not isinstance(answer, Proposal):
                    self.count("answer of a deposed leader")
                    self._reply(client, token, answer)
            self._take(client, token, batch, messages, first, end)

    def _turned_away(self, kind: str, client: Requester, token: int, *, last: bool) -> bool:
        """Return whether the server answers without reading the message; some of these answers are false."""
        answer: ErrorReply | None = {
            "full": FULL, "busy": BUSY, "unavailable": UNAVAILABLE, "sick": NO_SPACE, "unlisted": UNLISTED
        }.get(kind)  # fmt: skip
        if answer is None:
            return False
        if last:
            self._reply(client, token, answer)
        # The other replicas may have stored it although the leader could not; an unlisted error may mean anything.
        return kind not in ("sick", "unlisted") or self.random() < 0.5

    def _take(self, client: Requester, token: int, batch: str, messages: list[Message], first: int, end: int) -> None:
        last = end == len(messages)
        if last and self.random() < self.weather.rival:
            self._rival(messages, "won the slot")
        if self.random() < self.weather.claimed:
            self._claim(messages)
        before = len(self.stream.log)
        answer = _taken(self.stream, batch, messages, first, end, self.now)
        if isinstance(answer, Proposal):
            self._order += 1
            self._outstanding[self._order] = answer
            slow = 3.0 if self.random() < 0.15 else 0.01
            self.at(self.random() * slow, self._commit, client, token, self._order, answer)
        elif answer is not None and last:
            if isinstance(answer, ErrorReply):
                self.count(f"error {answer.code}")
            elif answer.duplicate:
                self.count("duplicate")
            self._reply(client, token, answer)
        if len(self.stream.log) > before:
            self._landed(client, token, messages)

    def _commit(self, client: Requester, token: int, number: int, proposal: Proposal) -> None:
        if self._outstanding.pop(number, None) is None:
            return
        window = self._window()
        if window is not None and window.kind == "pause":
            self._outstanding[number] = proposal
            self.at(window.end - self.now, self._commit, client, token, number, proposal)
            return
        self._reply(client, token, self.stream.apply(proposal, self.now))
        self._landed(client, token, list(proposal.messages))

    def _landed(self, client: Requester, token: int, messages: list[Message]) -> None:
        self.note("stored", messages[0].event_id, len(self.stream.log))
        if not client.awaits(token):
            self.count("landed late")
        if self.random() < self.weather.rival:
            self._rival(messages, "buried the slot")

    def _rival(self, messages: list[Message], how: str) -> None:
        """Store an event of another writer on one of these subjects, at once."""
        subject = messages[int(self.random() * len(messages))].subject
        position = self.stream.last.get(subject, 0)
        version = self.stream.log[position - 1].version if position else 0
        self._rivals += 1
        answer = self.stream.publish(Message(subject, f"r{self._rivals}", position, version=version + 1), self.now)
        if isinstance(answer, Proposal):
            answer = self.stream.apply(answer, self.now)
        if isinstance(answer, Acked):
            self.count(f"rival {how}")

    def _claim(self, messages: list[Message]) -> None:
        """Use one of these event ids for another writer on a subject of its own."""
        event_id = messages[int(self.random() * len(messages))].event_id
        version = self._claimed + 1
        answer = self.stream.publish(Message(CLAIMED, event_id, None, version=version), self.now)
        if isinstance(answer, Proposal):
            answer = self.stream.apply(answer, self.now)
        if isinstance(answer, Acked) and not answer.duplicate:
            self._claimed = version
            self.count("id claimed")

    def _reply(self, client: Requester, token: int, answer: Answer) -> None:
        draw, mishap = self.random(), self.weather.mishap
        if draw < mishap:
            self.count("answer lost")
        elif draw < 1.5 * mishap:
            self.at(self.random() * 10.0, client.answered, token, answer)
        else:
            self.at(0.0005 + self.random() * 0.005, client.answered, token, answer)

    def _read(self, client: Requester, token: int, index: int, message: Message) -> None:
        window = self._window()
        kind = "" if window is None else window.kind
        if kind in ("election", "deposed", "restart", "unavailable"):
            self.at(0.001, client.look_failed, token)
        elif kind == "pause" and window is not None:
            self.at(window.end - self.now, self._read, client, token, index, message)
        elif self.random() >= self.weather.mishap:
            stream = self.stream
            if kind == "two leaders" and self._deposed is not None and self.random() < 0.5:
                self.count("slot of a deposed leader")
                stream = self._deposed
            stored = self.rules.look(stream, message.subject, message.expected or 0)
            slot = None
            if stored is not None:
                record = stored[0], 0, message.subject.encode(), b"", b""
                slot = NextMessage(stored[0], stored[1].event_id or "", record=record)
            self.at(0.0005 + self.random() * 0.005, client.slot_read, token, index, slot)


def _taken(
    stream: Stream, batch: str, messages: list[Message], first: int, end: int, now: float
) -> Acked | ErrorReply | Proposal | None:
    """Return the answer of the stream to some messages of an attempt."""
    if len(messages) == 1:
        return stream.publish(messages[0], now) if end > first else None
    answer: Acked | ErrorReply | Proposal | None = None
    for number in range(first, end):
        answer = stream.stage(batch, number + 1, number + 1 == len(messages), messages[number], now)
    return answer
