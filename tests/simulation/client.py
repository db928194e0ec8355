"""A client of the simulation: it loads, saves by the product's own state machine, and goes on."""

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
"""How often a command is decided again."""
LEAST_S = 0.05
"""What a request is given, however near the deadline is."""


def slot_of(stream: Stream, subject: str, expected: int) -> tuple[int, Message] | None:
    """What a look reads: the slot."""
    return stream.slot(subject, expected)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a client does: the product's rules, unless a test breaks one on purpose."""

    save: type[Save] = Save
    look: Callable[[Stream, str, int], tuple[int, Message] | None] = slot_of
    shared: Callable[[Answer, Sequence[int]], list[Answer]] = shared
    """What the answer to a batch means to each of the saves in it."""
    fresh_ids: bool = False
    """New event ids on every try."""
    looks_for_commands: bool = True
    """A command that is repeated is looked for before it is decided again."""
    looks_at_all_members: bool = True
    """Where one member of it is known and another not, the newest state of the other is read."""
    believes_the_end: bool = False
    """After a lost race, that nothing lies between the rival's event and the end that the refusal told."""


@dataclass(slots=True)
class Attempt:
    """One save, and what became of it."""

    name: str
    parts: list[list[Message]]
    """Messages by subject."""
    deadline: float
    outcome: Outcome | None = None
    decided_at: float = 0.0
    ids: list[list[str]] = field(default_factory=list[list[str]])
    """Of all events, once for each different set of ids that was sent."""
    was_unknown: bool = False
    command: str = ""
    """The command whose save it is, the first one or a repetition."""

    @property
    def messages(self) -> list[Message]:
        return [message for part in self.parts for message in part]


class Client:
    """Makes its saves one after the other, on subjects it shares with others."""

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
        self._found: list[NextMessage | None] = []
        self._awaited = 0

    def next_save(self) -> None:
        """Load, decide, begin to save."""
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
        held = [self._known.pop(subject, None) or world.load(subject) for subject in subjects]
        self._decide_on(name, name, subjects, held)

    def _decide_on(self, name: str, command: str, subjects: list[str], held: list[tuple[int, int]]) -> None:
        """Begin a save of a command on states that stand at these positions and versions."""
        world = self._world
        self._tries = 0
        parts = [
            self._decided(f"{name}.{index}", command, subject, known)
            for index, (subject, known) in enumerate(zip(subjects, held, strict=True))
        ]
        patience = (1.5, 5.0, 12.0)[int(world.random() * 3)]
        self._attempt = Attempt(name, parts, world.now + patience, command=command)
        self._begin(resume=False)

    def _decided(self, name: str, command: str, subject: str, held: tuple[int, int]) -> list[Message]:
        random = self._world.random
        position, version = held
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

    def _repeat(self, told: tuple[str, int, int] | None = None) -> None:
        """The same command again, in a process that may know nothing of it: found in the log, or decided anew.

        Of one subject it may be told position and version, after a lost race.
        """
        world, attempt = self._world, self._attempt
        subjects = [part[0].subject for part in attempt.parts]
        held = [told[1:] if told is not None and told[0] == subject else world.load(subject) for subject in subjects]
        stream, command = world.stream, attempt.command
        rules = world.rules
        ends = [position for position, _ in held]
        found = [stream.recorded(subject, command, position) for subject, position in zip(subjects, ends, strict=True)]
        if rules.looks_for_commands and any(found):
            if not all(found) and rules.looks_at_all_members:
                world.count("repeated with a stale member")
                found = [stream.recorded(subject, command, len(stream.log)) for subject in subjects]
            world.repeated(attempt, found)
            world.at(world.random(), self.next_save)
            return
        self._repeats += 1
        world.count("repeated and decided anew")
        self._decide_on(f"{attempt.command}*{self._repeats}", command, subjects, held)

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
        self._found = [None] * len(self._attempt.parts)
        self._awaited = len(self._found)
        world.at(world.weather.request_s, self._blind, self._token)
        for index, part in enumerate(self._attempt.parts):
            world.ask_slot(self, self._token, index, part[0])

    def awaits(self, token: int) -> bool:
        """Whether the answer to this try still counts."""
        return token == self._token

    def answered(self, token: int, answer: Answer) -> None:
        """An answer came; only that of the try under way counts."""
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
        """One slot was read."""
        if token != self._token:
            return
        self._found[index] = slot
        self._awaited -= 1
        if not self._awaited:
            self._token += 1
            self._world.note("slots", self._attempt.name, self._found)
            self._go(self._save.looked(self._found, self._world.now))

    def look_failed(self, token: int) -> None:
        """The slots cannot be read."""
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
        told = self._told(outcome) if isinstance(outcome, Conflicted) and not attempt.was_unknown else None
        if told is not None and self._repeats < REPEATS_MAX and world.random() < 0.5:
            world.count("decided again on what was told")
            world.at(0.0, self._repeat, told)
            return
        # An answer may be lost between this process and whoever asked it, too.
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

    def _told(self, conflict: Conflicted) -> tuple[str, int, int] | None:
        """Subject, position and version of the rival's event, where it was the last one."""
        rules, stream = self._world.rules, self._world.stream
        slots = [slot for slot in self._found if slot is not None]
        record = slots[0].record if rules.believes_the_end and len(self._found) == len(slots) == 1 else conflict.rival
        if record is None:
            return None
        subject, position = record[2].decode(), record[0]
        end = stream.last.get(subject, position) if rules.believes_the_end else position
        return subject, end, stream.log[position - 1].version

    def _resume(self) -> None:
        self._attempt.was_unknown = True
        self._attempt.deadline = self._world.now + 10.0
        self._begin(resume=True)
