"""A client of the simulation: it loads, saves with the product's state machine, and continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eventjet.log.outcome import (
    Answer,
    Conflicted,
    Look,
    NextMessage,
    NoReply,
    Outcome,
    Save,
    Send,
    Step,
    Stored,
    Unknown,
    shared,
)
from tests.simulation.stream import Message, Stream

if TYPE_CHECKING:
    from tests.simulation.world import World

REPEATS_MAX = 3
"""The limit of repetitions of a command."""
LEAST_S = 0.05
"""The shortest timeout of a request, however near the deadline is."""


def slot_of(stream: Stream, subject: str, expected: int) -> tuple[int, Message] | None:
    """Return the message in the slot, which a look reads."""
    return stream.slot(subject, expected)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a client: those of the product, unless a test breaks one on purpose."""

    save: type[Save] = Save
    look: Callable[[Stream, str, int], tuple[int, Message] | None] = slot_of
    shared: Callable[[Answer, Sequence[int]], list[Answer]] = shared
    """Derives the answer of each save from the answer to their batch."""
    fresh_ids: bool = False
    """Each attempt has new event ids."""
    looks_for_commands: bool = True
    """A repeated command is searched for in the log before it is decided again."""
    looks_at_all_members: bool = True
    """If only some members of a command are found, the newest states of the others are read."""
    believes_the_end: bool = False
    """After a lost race, the end in the refusal is taken for the position of the rival's event."""


@dataclass(slots=True)
class Attempt:
    """A save and its outcome."""

    name: str
    parts: list[list[Message]]
    """Messages by subject."""
    deadline: float
    outcome: Outcome | None = None
    decided_at: float = 0.0
    ids: list[list[str]] = field(default_factory=list[list[str]])
    """The ids of all events, once for each different set that was sent."""
    was_unknown: bool = False
    command: str = ""
    """The command of the save, the first time or repeated."""

    @property
    def messages(self) -> list[Message]:
        return [message for part in self.parts for message in part]


class Client:
    """A client that saves one time after the other, on subjects that it shares with others."""

    def __init__(self, world: World, name: str, saves: int) -> None:
        self._world = world
        self._name = name
        self._left = saves
        self._known: dict[str, tuple[int, int]] = {}
        self._token = 0
        self._tries = 0
        self._repeats = 0
        self._attempt: Attempt
        self._save: Save
        self._slots: list[NextMessage | None] = []
        self._awaited = 0

    def next_save(self) -> None:
        """Load, decide and begin to save."""
        if not self._left:
            return
        self._left -= 1
        world = self._world
        random = world.random
        subjects = list(world.subjects)
        first = int(random() * len(subjects))
        subjects = subjects[first : first + (1 if random() < 0.75 else 2)]
        self._repeats = 0
        name = f"{self._name}.{self._left}"
        states = [self._known.pop(subject, None) or world.load(subject) for subject in subjects]
        self._decide_on(name, name, subjects, states)

    def _decide_on(self, name: str, command: str, subjects: list[str], states: list[tuple[int, int]]) -> None:
        """Begin a save of a command on states at these positions and versions."""
        world = self._world
        self._tries = 0
        parts = [
            self._decided(f"{name}.{index}", command, subject, known)
            for index, (subject, known) in enumerate(zip(subjects, states, strict=True))
        ]
        patience = (1.5, 5.0, 12.0)[int(world.random() * 3)]
        self._attempt = Attempt(name, parts, world.now + patience, command=command)
        self._begin(resume=False)

    def _decided(self, name: str, command: str, subject: str, state: tuple[int, int]) -> list[Message]:
        random = self._world.random
        position, version = state
        if random() < 0.01:
            position, version = 10_000, 50  # a log that lost its tail: the expected event does not exist
        count = 1 if random() < (0.3 if self._world.bus is not None else 0.7) else 2
        return [
            Message(
                subject,
                f"{name}.{index}",
                position if index == 0 else None,
                version=version + index + 1,
                command=command,
            )
            for index in range(count)
        ]

    def _repeat(self, newest_state: tuple[str, int, int] | None = None) -> None:
        """Repeat the command in a process that may not know it: find it in the log, or decide again.

        After a lost race, `newest_state` is the (subject, position, version) of the rival's event.
        """
        world, attempt = self._world, self._attempt
        subjects = [part[0].subject for part in attempt.parts]
        states = [
            newest_state[1:] if newest_state is not None and newest_state[0] == subject else world.load(subject)
            for subject in subjects
        ]
        stream, command = world.stream, attempt.command
        rules = world.rules
        ends = [position for position, _ in states]
        positions = [
            stream.recorded(subject, command, position) for subject, position in zip(subjects, ends, strict=True)
        ]
        if rules.looks_for_commands and any(positions):
            if not all(positions) and rules.looks_at_all_members:
                world.count("repeated with a stale member")
                positions = [stream.recorded(subject, command, len(stream.log)) for subject in subjects]
            world.repeated(attempt, positions)
            world.at(world.random(), self.next_save)
            return
        self._repeats += 1
        world.count("repeated and decided anew")
        self._decide_on(f"{attempt.command}*{self._repeats}", command, subjects, states)

    def _begin(self, *, resume: bool) -> None:
        attempt = self._attempt
        ids = [[message.event_id or "" for message in part] for part in attempt.parts]
        self._save = self._world.rules.save(ids, deadline=attempt.deadline, jitter=self._world.random)
        self._go(self._save.resume() if resume else Send())

    def _go(self, step: Step) -> None:
        world = self._world
        if isinstance(step, Send):
            world.at(step.after_s, self._send, step.alone)
        elif isinstance(step, Look):
            world.at(step.after_s, self._look)
        else:
            self._decide(step)

    def _send(self, alone: bool) -> None:
        world, attempt = self._world, self._attempt
        self._token += 1
        self._tries += 1
        if world.rules.fresh_ids and self._tries > 1:
            attempt.parts = [
                [message._replace(event_id=f"{message.event_id}+") for message in part] for part in attempt.parts
            ]
        messages = attempt.messages
        ids = [message.event_id or "" for message in messages]
        if ids not in attempt.ids:
            attempt.ids.append(ids)
        world.note("send", attempt.name, self._tries)
        left_s = max(LEAST_S, attempt.deadline - world.now)
        if world.bus is not None and len(messages) > 1 and not alone:
            world.at(left_s, self._silent, self._token)
            world.bus.put(self, self._token, messages)
            return
        if alone:
            world.count("sent alone")
        world.at(min(world.weather.request_s, left_s), self._silent, self._token)
        world.transmit(self, self._token, attempt.name, self._tries, messages)

    def _look(self) -> None:
        world = self._world
        self._token += 1
        self._slots = [None] * len(self._attempt.parts)
        self._awaited = len(self._slots)
        world.at(world.weather.request_s, self._blind, self._token)
        for index, part in enumerate(self._attempt.parts):
            world.ask_slot(self, self._token, index, part[0])

    def awaits(self, token: int) -> bool:
        """Return whether the answer to this attempt still counts."""
        return token == self._token

    def answered(self, token: int, answer: Answer) -> None:
        """Take an answer; only the answer to the current attempt counts."""
        if token == self._token:
            self._token += 1
            self._world.note("answer", self._attempt.name, answer)
            self._go(self._save.answered(answer))

    def _silent(self, token: int) -> None:
        if token == self._token:
            if self._world.bus is not None:
                self._world.bus.leave(self)
            self.answered(token, NoReply("no answer"))

    def slot_read(self, token: int, index: int, slot: NextMessage | None) -> None:
        """Take the message of a slot that was read."""
        if token != self._token:
            return
        self._slots[index] = slot
        self._awaited -= 1
        if not self._awaited:
            self._token += 1
            self._world.note("slots", self._attempt.name, self._slots)
            self._go(self._save.looked(self._slots, self._world.now))

    def look_failed(self, token: int) -> None:
        """Take the failure of a read of the slots."""
        self._blind(token)

    def _blind(self, token: int) -> None:
        if token == self._token:
            self._token += 1
            self._world.note("blind", self._attempt.name)
            self._go(self._save.looked(None, self._world.now))

    def _decide(self, outcome: Outcome) -> None:
        world, attempt = self._world, self._attempt
        attempt.outcome = outcome
        attempt.decided_at = world.now
        world.decided(attempt, self._tries)
        if isinstance(outcome, Unknown) and not attempt.was_unknown and world.random() < 0.5:
            world.at(world.random() * 20.0, self._resume)
            return
        rival_state = (
            self._rival_state(outcome) if isinstance(outcome, Conflicted) and not attempt.was_unknown else None
        )
        if rival_state is not None and self._repeats < REPEATS_MAX and world.random() < 0.5:
            world.count("decided again on what was told")
            world.at(0.0, self._repeat, rival_state)
            return
        # The answer of a command may be lost between this process and its caller, too.
        is_repeated = not isinstance(outcome, Stored) or world.random() < 0.3
        if is_repeated and self._repeats < REPEATS_MAX and world.random() < 0.5:
            world.at(world.random() * 10.0, self._repeat)
            return
        if isinstance(outcome, Stored):
            position = outcome.position - len(attempt.messages)
            for part in attempt.parts:
                position += len(part)
                self._known[part[0].subject] = (position, part[-1].version)
        world.at(world.random(), self.next_save)

    def _rival_state(self, conflict: Conflicted) -> tuple[str, int, int] | None:
        """Return (subject, position, version) of the rival's event if it was the last."""
        rules, stream = self._world.rules, self._world.stream
        slots = [slot for slot in self._slots if slot is not None]
        record = slots[0].record if rules.believes_the_end and len(self._slots) == len(slots) == 1 else conflict.rival
        if record is None:
            return None
        subject, position = record[2].decode(), record[0]
        end = stream.last.get(subject, position) if rules.believes_the_end else position
        return subject, end, stream.log[position - 1].version

    def _resume(self) -> None:
        self._attempt.was_unknown = True
        self._attempt.deadline = self._world.now + 10.0
        self._begin(resume=True)
