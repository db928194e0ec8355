"""Streams of the simulated server, by the rules measured on nats-server 2.15.1 (facts 1 to 3): cursors and timers.

A message replaces the one before it on its subject where the stream keeps one a subject, a batch is stored whole or not
at all, what has a time to live goes, and a schedule fires: late, and now and then twice.
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
"""When schedules begin, by the server's clock."""
WRONG_SEQUENCE, IN_PROCESS, NOT_FOUND = 10071, 10164, 10037
_TTL, _SCHEDULE, _TARGET = "Nats-TTL", "Nats-Schedule", "Nats-Schedule-Target"
_FLOOR_S = 0.25
"""The server looks for what is due no more often."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the servers do, and the followers; a test breaks one on purpose."""

    compares: bool = True
    """A cursor is replaced only by whoever names the sequence that is there."""
    atomic: bool = True
    """A batch is stored whole or not at all; else some of what is parked gets lost."""
    log_compares: bool = True
    """An event is stored only after the one it names."""
    on_time: bool = True
    """A schedule never fires before its time, nor says so."""
    once: bool = True
    """A handler's commands have ids."""
    clocks: bool = True
    """The clocks of all workers are equally fast."""
    waits: bool = True
    """A process rests on no state that does not contain what woke it."""
    clears_last: bool = True
    """A timer that has fired is cleared once it was dealt with."""
    orders: bool = True
    """The events of an aggregate are handled one after the other."""


class Message(NamedTuple):
    """As it is sent."""

    subject: str
    headers: dict[str, str]
    body: bytes


class Stored(NamedTuple):
    """As it is kept."""

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
    """One stream, and its schedules."""

    def __init__(
        self, loop: VirtualLoop, random: Callable[[], float], rules: Rules, *, one_each: bool, replicas: int
    ) -> None:
        self.records: dict[int, Stored] = {}
        self.on_stored: Callable[[Sequence[Stored]], None] = lambda stored: None
        self.fired: dict[str, int] = {}
        self.twice = 0
        self._loop = loop
        self._random = random
        self._rules = rules
        self._one_each = one_each
        self._replicas = replicas
        self._sequence = 0
        self._by_subject: dict[str, list[int]] = {}

    def publish(self, messages: Sequence[Message]) -> int:
        """The sequence of the last; raises `Refused`."""
        rules = self._rules
        if rules.compares:
            self._compare(messages)
        kept = (
            messages if rules.atomic else [one for one in messages if ".q." not in one.subject or self._random() < 0.8]
        )
        stored = [self._store(one) for one in kept]
        self.on_stored(stored)
        for one, record in zip(kept, stored, strict=True):
            if _TTL in one.headers:
                self._loop.after(_seconds(one.headers[_TTL]), self._expire, record.sequence)
            if _SCHEDULE in one.headers:
                self._schedule(one, record)
        return self._sequence

    def last(self, subject: str) -> Stored | None:
        known = self._by_subject.get(subject)
        return self.records[known[-1]] if known else None

    def newest(self, pattern: str) -> Stored | None:
        """The last record of all subjects that match."""
        if "*" not in pattern:
            return self.last(pattern)
        return next((one for one in reversed(self.records.values()) if is_match(pattern, one.subject)), None)

    def next(self, position: int, pattern: str) -> Stored | None:
        for sequence, record in self.records.items():
            if sequence >= position and is_match(pattern, record.subject):
                return record
        return None

    def purge(self, subject: str, below: int) -> int:
        gone = [each for each in self._by_subject.get(subject, ()) if each < below]
        for sequence in gone:
            self._remove(sequence)
        return len(gone)

    def now_ns(self) -> int:
        return BASE_NS + int(self._loop.now * 1e9)

    def _compare(self, messages: Sequence[Message]) -> None:
        for one in messages:
            expected = one.headers.get(EXPECTED)
            last = self.last(one.subject)
            if expected is not None and int(expected) != (last.sequence if last else 0):
                is_race = self._replicas == 3 and self._random() < 0.3
                raise Refused(400, IN_PROCESS if is_race else WRONG_SEQUENCE)

    def _store(self, message: Message) -> Stored:
        self._sequence += 1
        known = self._by_subject.setdefault(message.subject, [])
        if self._one_each or _SCHEDULE in message.headers:
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
            return  # it was replaced or purged
        target = message.headers[_TARGET]
        headers = {name: value for name, value in message.headers.items() if name not in (_SCHEDULE, _TARGET, EXPECTED)}
        fired = self._store(Message(target, {**headers, "Nats-Scheduler": message.subject}, message.body))
        if not self._rules.on_time:
            told = BASE_NS + int(due * 1e9) + 1_000_000
            self.records[fired.sequence] = fired._replace(time_ns=max(told, fired.time_ns))
        self.fired[message.subject] = self.fired.get(message.subject, 0) + 1
        if self._random() < 0.1:
            # The server was killed before it had forgotten the schedule.
            self.twice += 1
            self._loop.after(self._random() * 2.0, self._fire, message, sequence, due)
        else:
            self._remove(sequence)


@lru_cache(maxsize=4_096)
def is_match(pattern: str, subject: str) -> bool:
    """Whether a subject is one of those that a pattern with `*` means."""
    wanted, told = pattern.split("."), subject.split(".")
    return len(wanted) == len(told) and all(one in ("*", name) for one, name in zip(wanted, told, strict=True))


def _seconds(told: str) -> float:
    return float(told[:-1]) * (3600.0 if told.endswith("h") else 1.0)
