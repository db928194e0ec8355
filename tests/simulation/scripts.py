"""Operations as raw messages, which a real server and the simulated server must answer alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import uuid4

from eventjet.codec.headers import EXPECTED, MSG_ID
from tests.simulation.stream import STAGED_S, Stream
from tests.simulation.wire import BATCH_COMMIT, BATCH_ID, BATCH_NUMBER, Wire


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, which `asks` for an answer or not."""

    subject: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b"x"
    asks: bool = True


@dataclass(frozen=True, slots=True)
class Read:
    """A read through the leader."""

    body: tuple[tuple[str, Any], ...]


Step = Sent | Read
Script = Sequence[tuple[str, Sequence[Step]]]
"""(what is tried, its steps) for each operation."""


def single(subject: str, event_id: str | None = None, expected: int | None = None) -> list[Sent]:
    """Return the steps of a plain publish."""
    return [Sent(f"ev.{subject}", _headers(event_id, expected))]


def batch(
    *messages: tuple[str, str | None, int | None],
    numbers: Sequence[int] = (),
    asks: bool = False,
    commit: bool = True,
    batch_id: str = "",
) -> list[Sent]:
    """Return the steps of an atomic batch; `numbers` other than 1, 2, 3 … make it faulty."""
    batch_id = batch_id or uuid4().hex
    sent: list[Sent] = []
    for index, (subject, event_id, expected) in enumerate(messages):
        number = numbers[index] if numbers else index + 1
        headers = [*_headers(event_id, expected), (BATCH_ID, batch_id), (BATCH_NUMBER, str(number))]
        last = commit and index == len(messages) - 1
        if last:
            headers.append((BATCH_COMMIT, "1"))
        sent.append(Sent(f"ev.{subject}", tuple(headers), asks=asks or last))
    return sent


def slot(subject: str, expected: int) -> list[Read]:
    """Return a read of the first message on a subject after a position."""
    return [Read((("seq", expected + 1), ("next_by_subj", f"ev.{subject}")))]


def newest(subject: str) -> list[Read]:
    """Return a read of the last message on a subject."""
    return [Read((("last_by_subj", f"ev.{subject}"),))]


def _headers(event_id: str | None, expected: int | None) -> tuple[tuple[str, str], ...]:
    pairs = ((MSG_ID, event_id), (EXPECTED, None if expected is None else str(expected)))
    return tuple((name, value) for name, value in pairs if value is not None)


WRITTEN: Script = [
    ("the first event", single("a", "a0", 0)),
    ("an exact retry", single("a", "a0", 0)),
    ("its id again, expectation right", single("a", "a0", 1)),
    ("its id again, no expectation", single("a", "a0")),
    ("its id on another subject", single("b", "a0", 0)),
    ("its id on another subject, expectation wrong", single("b", "a0", 5)),
    ("a stale expectation", single("a", "a1", 0)),
    ("an expectation of what does not exist", single("a", "a1", 50)),
    ("the refused id is not remembered", single("a", "a1", 1)),
    ("two subjects at once", batch(("c", "c0", 0), ("c", "c1", None), ("d", "d0", 0))),
    ("the whole batch again", batch(("c", "c0", 0), ("c", "c1", None), ("d", "d0", 0))),
    ("again, each message asking", batch(("c", "c0", 0), ("c", "c1", None), ("d", "d0", 0), asks=True)),
    ("a used id first, expectation right", batch(("c", "c0", 4), ("c", "c9", None))),
    ("a used id second", batch(("c", "c8", 4), ("c", "c1", None))),
    ("an id used elsewhere", batch(("e", "a0", 0), ("e", "e1", None))),
    ("a conflict first", batch(("c", "c8", 3), ("c", "c9", None))),
    ("a conflict second", batch(("e", "e0", 0), ("c", "c9", 3))),
    ("a conflict first, a used id second", batch(("c", "c8", 3), ("e", "a0", 0))),
    ("a used id first, a conflict second", batch(("e", "a0", 0), ("c", "c8", 3))),
    ("a conflict second, each message asking", batch(("e", "e0", 0), ("c", "c9", 3), asks=True)),
    ("an expectation of what does not exist", batch(("e", "e0", 99), ("e", "e1", None))),
    ("one id twice", batch(("e", "e0", 0), ("e", "e0", None))),
    ("one id twice, on two subjects", batch(("e", "e0", 0), ("f", "e0", 0))),
    ("the expectation repeated", batch(("e", "e0", 0), ("e", "e1", 0))),
    ("the expectation of the second as if the first were stored", batch(("e", "e0", 0), ("e", "e1", 6))),
    ("after all these refusals", batch(("e", "e0", 0), ("e", "e1", None))),
    ("no beginning", batch(("g", "g0", 0), numbers=[2])),
    ("a hole", batch(("g", "g0", 0), ("g", "g2", None), numbers=[1, 3])),
    ("a hole, filled late", batch(("g", "g0", 0), ("g", "g2", None), ("g", "g1", None), numbers=[1, 3, 2], asks=True)),
    ("the beginning twice", batch(("g", "g0", 0), ("g", "g0", 0), ("g", "g1", None), numbers=[1, 1, 2])),
    ("nothing of those was stored", single("g", "g0", 0)),
    ("a batch of one", batch(("h", "h0", 0))),
    ("too large a batch", batch(*[("i", None, None)] * 1_001)),
    ("the slot after nothing", slot("a", 0)),
    ("the slot after the first", slot("a", 1)),
    ("the slot after the last", slot("a", 2)),
    ("a slot beyond the log", slot("a", 10_000)),
    ("the slot of nobody", slot("nobody", 0)),
    ("the slot of a batch", slot("d", 0)),
    ("the last event", newest("c")),
    ("the last event of nobody", newest("nobody")),
    ("more batches than may be open", [batch(("j", None, None), commit=False, asks=True)[0] for _ in range(51)]),
    ("a batch while so many are open", batch(("k", "k0", 0), ("k", "k1", None))),
    ("a single event while so many are open", single("k", "k0", 0)),
]  # fmt: skip
"""A script with each rule once."""

FORGOTTEN_S = STAGED_S + 10.0
"""The time after which the open batches of `WRITTEN` are dropped."""
AFTER_A_WHILE: Script = [
    ("a batch after the open ones were dropped", batch(("k", "k2", None), ("k", "k3", None))),
]


def drawn(seed: int, count: int) -> Script:
    """Draw operations by a seed, on few subjects and ids so that rules meet, and reads of the whole log at the end."""
    random = Random(seed)
    wire = Wire("ev", Stream())
    script: list[tuple[str, Sequence[Step]]] = []
    for number in range(count):
        steps = list(_drawn(random, wire.stream, f"b{seed}-{number}"))
        for step in steps:
            if isinstance(step, Sent):
                wire.publish(step.subject, step.body, dict(step.headers), 0.0)
        script.append((f"operation {number} of seed {seed}", steps))
    reads = [Read((("seq", position),)) for position in range(1, len(wire.stream.log) + 1)]
    return [*script, ("the whole log", reads)]


def _drawn(random: Random, stream: Stream, batch_id: str) -> Iterator[Step]:
    if random.random() < 0.2:
        yield from slot(random.choice("abc"), random.randrange(len(stream.log) + 2))
        return
    count = 1 if random.random() < 0.5 else random.randrange(1, 5)
    messages = [_drawn_message(random, stream, set()) for _ in range(1)]
    while len(messages) < count:
        messages.append(_drawn_message(random, stream, {subject for subject, _, _ in messages}))
    if count == 1 and random.random() < 0.8:
        yield from single(*messages[0])
        return
    numbers = list(range(1, count + 1))
    if random.random() < 0.15:
        numbers[random.randrange(count)] += random.choice((-1, 1))
    yield from batch(*messages, numbers=numbers, asks=random.random() < 0.3, batch_id=batch_id)


def _drawn_message(random: Random, stream: Stream, used_subjects: set[str]) -> tuple[str, str | None, int | None]:
    subject = random.choice("abc")
    used = sorted(stream.ids)
    event_id = random.choice(used) if used and random.random() < 0.2 else f"id-{random.randrange(10_000)}"
    draw = random.random()
    if subject in used_subjects or draw < 0.1:
        expected = None if draw < 0.9 else 0
    else:
        expected = stream.last.get(f"ev.{subject}", 0) if draw < 0.85 else random.randrange(len(stream.log) + 3)
    return subject, event_id if random.random() < 0.95 else None, expected
