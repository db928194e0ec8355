"""Streams of the simulated server, by the rules measured on nats-server 2.15.1 (facts 1 to 3): cursors and timers.

A message replaces the earlier message on its subject if the stream keeps one for each subject, a batch is stored whole
or not at all, a message with a time to live expires, and a schedule fires: late, and now and then twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from eventjet.codec.headers import EXPECTED, header_block
from tests.simulation.reactions.loop import VirtualLoop

BASE_NS = 1_767_600_000 * 1_000_000_000
"""The beginning of schedules by the server's clock."""
WRONG_SEQUENCE, IN_PROCESS, NOT_FOUND = 10071, 10164, 10037
_TTL, _SCHEDULE, _TARGET = "Nats-TTL", "Nats-Schedule", "Nats-Schedule-Target"
_FLOOR_S = 0.25
"""The interval at which the server looks for due schedules."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the servers and the event handlers; a test breaks one on purpose."""

    compares: bool = True
    """A cursor is replaced only by a write that expects its sequence."""
    atomic: bool = True
    """A batch is stored whole or not at all; else some quarantine entries get lost."""
    log_compares: bool = True
    """An event is stored only after the event that it expects."""
    on_time: bool = True
    """A schedule never fires before its time, nor says so."""
    once: bool = True
    """A handler's commands have ids."""
    clocks: bool = True
    """The clocks of all workers are equally fast."""
    waits: bool = True
    """A process does not rest on a state without the event that woke it."""
    clears_last: bool = True
    """A fired timer is cleared after it was handled."""
    orders: bool = True
    """The events of an aggregate are handled one after the other."""


class Message(NamedTuple):
    """A message as it is sent."""

    subject: str
    headers: dict[str, str]
    body: bytes


class Stored(NamedTuple):
    """A message as it is stored."""

    sequence: int
    time_ns: int
    subject: str
    block: bytes
    body: bytes


class Refused(Exception):
    """An error of the API."""

    def __init__(self, status: int, code: int) -> None:
        self.status = status
        self.code = code
        super().__init__(f"{status} {code}")


class SimulatedStream:
    """A stream and its schedules."""

    def __init__(
        self, loop: VirtualLoop, random: Callable[[], float], rules: Rules, *, keeps_last: bool, replicas: int
    ) -> None:
        self.records: dict[int, Stored] = {}
        self.on_stored: Callable[[Sequence[Stored]], None] = lambda stored: None
        self.fired: dict[str, int] = {}
        self.twice = 0
        self._loop = loop
        self._random = random
        self._rules = rules
        self._keeps_last = keeps_last
        self._replicas = replicas
        self._sequence = 0
        self._by_subject: dict[str, list[int]] = {}

    def publish(self, messages: Sequence[Message]) -> int:
        """Store messages and return the sequence of the last; raise `Refused` for a wrong expectation."""
        rules = self._rules
        if rules.compares:
            self._compare(messages)
        accepted = (
            messages
            if rules.atomic
            else [message for message in messages if ".q." not in message.subject or self._random() < 0.8]
        )
        stored = [self._store(message) for message in accepted]
        self.on_stored(stored)
        for message, record in zip(accepted, stored, strict=True):
            if _TTL in message.headers:
                self._loop.after(_seconds(message.headers[_TTL]), self._expire, record.sequence)
            if _SCHEDULE in message.headers:
                self._schedule(message, record)
        return self._sequence

    def last(self, subject: str) -> Stored | None:
        known = self._by_subject.get(subject)
        return self.records[known[-1]] if known else None

    def newest(self, pattern: str) -> Stored | None:
        """Return the last record of all subjects that match."""
        if "*" not in pattern:
            return self.last(pattern)
        return next((record for record in reversed(self.records.values()) if is_match(pattern, record.subject)), None)

    def next(self, position: int, pattern: str) -> Stored | None:
        for sequence, record in self.records.items():
            if sequence >= position and is_match(pattern, record.subject):
                return record
        return None

    def purge(self, subject: str, below: int) -> int:
        removed = [sequence for sequence in self._by_subject.get(subject, ()) if sequence < below]
        for sequence in removed:
            self._remove(sequence)
        return len(removed)

    def now_ns(self) -> int:
        return BASE_NS + int(self._loop.now * 1e9)

    def _compare(self, messages: Sequence[Message]) -> None:
        for message in messages:
            expected = message.headers.get(EXPECTED)
            last = self.last(message.subject)
            if expected is not None and int(expected) != (last.sequence if last else 0):
                is_race = self._replicas == 3 and self._random() < 0.3
                raise Refused(400, IN_PROCESS if is_race else WRONG_SEQUENCE)

    def _store(self, message: Message) -> Stored:
        self._sequence += 1
        known = self._by_subject.setdefault(message.subject, [])
        if self._keeps_last or _SCHEDULE in message.headers:
            for sequence in list(known):
                self._remove(sequence)
        block = header_block(message.headers.items()) if message.headers else b""
        record = Stored(self._sequence, self.now_ns(), message.subject, block, message.body)
        self.records[self._sequence] = record
        self._by_subject.setdefault(message.subject, []).append(self._sequence)
        return record

    def _remove(self, sequence: int) -> None:
        record = self.records.pop(sequence)
        self._by_subject[record.subject].remove(sequence)

    def _expire(self, sequence: int) -> None:
        if sequence in self.records:
            self._remove(sequence)

    def _schedule(self, message: Message, record: Stored) -> None:
        due = datetime.fromisoformat(message.headers[_SCHEDULE].removeprefix("@at ")).timestamp() - BASE_NS / 1e9
        early = 0.0 if self._rules.on_time else 5.0
        late = 0.001 + self._random() * (0.42 if self._random() < 0.9 else 4.0)
        delay = max(due - early - self._loop.now, 0.0 if not self._rules.on_time else _FLOOR_S - 0.25)
        self._loop.after(delay + late, self._fire, message, record.sequence, due)

    def _fire(self, message: Message, sequence: int, due: float) -> None:
        if sequence not in self.records:
            return  # the schedule was replaced or purged
        target = message.headers[_TARGET]
        headers = {name: value for name, value in message.headers.items() if name not in (_SCHEDULE, _TARGET, EXPECTED)}
        fired = self._store(Message(target, {**headers, "Nats-Scheduler": message.subject}, message.body))
        if not self._rules.on_time:
            due_ns = BASE_NS + int(due * 1e9) + 1_000_000
            self.records[fired.sequence] = fired._replace(time_ns=max(due_ns, fired.time_ns))
        self.fired[message.subject] = self.fired.get(message.subject, 0) + 1
        if self._random() < 0.1:
            # The server was killed before it had forgotten the schedule.
            self.twice += 1
            self._loop.after(self._random() * 2.0, self._fire, message, sequence, due)
        else:
            self._remove(sequence)


@lru_cache(maxsize=4_096)
def is_match(pattern: str, subject: str) -> bool:
    """Return whether a subject matches a pattern with `*`."""
    pattern_tokens, tokens = pattern.split("."), subject.split(".")
    return len(pattern_tokens) == len(tokens) and all(
        token in ("*", name) for token, name in zip(pattern_tokens, tokens, strict=True)
    )


def _seconds(duration: str) -> float:
    return float(duration[:-1]) * (3600.0 if duration.endswith("h") else 1.0)
