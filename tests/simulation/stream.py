"""A JetStream stream by the rules measured on nats-server 2.15.1, without a clock, network or thread.

One replica checks the expectation before the message id, three check the id first and refuse a subject that is in
process. Batches check ids first on both. Tests compare these rules with the answers of real servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eventjet.log.outcome import Acked, ErrorReply

INCOMPLETE = ErrorReply(400, 10176, "atomic publish batch is incomplete")
DUPLICATE_IN_BATCH = ErrorReply(400, 10201, "atomic publish batch contains duplicate message id")
TOO_MANY_BATCHES = ErrorReply(429, 10210, "atomic publish too many inflight")
TOO_LARGE_BATCH = ErrorReply(400, 10199, "atomic publish batch is too large: 1000")
TOO_LARGE = ErrorReply(400, 10054, "message size exceeds maximum allowed")
IN_PROCESS = ErrorReply(409, 10158, "duplicate message id is in process")
RACED = ErrorReply(400, 10164, "wrong last sequence")
FULL = ErrorReply(503, 10077, "maximum messages exceeded")

BATCH_MAX = 1_000
BATCHES_MAX = 50
CLAIMED = "claimed"
"""The subject of a writer that uses event ids of others."""
STAGED_S = 10.0
"""The time after which a batch without new messages is dropped."""
SIZE_MAX = 900_000


class Message(NamedTuple):
    """A message as the stream sees it."""

    subject: str
    event_id: str | None
    expected: int | None
    block: bytes = b""
    body: bytes = b""
    version: int = 0
    """The version of the event in its aggregate; the stream ignores it."""
    command: str = ""
    """The command that recorded it; the stream ignores it."""


@dataclass(slots=True)
class _Staged:
    messages: list[Message]
    touched: float


@dataclass(slots=True)
class Proposal:
    """Messages that passed the checks of a leader of three replicas and wait for the others."""

    messages: Sequence[Message]
    position: int | None = None
    """The position of the last message, once it is applied."""


def conflict(last: int) -> ErrorReply:
    """Return the answer of a leader to a wrong expectation."""
    return ErrorReply(400, 10071, f"wrong last sequence: {last}")


@dataclass(slots=True)
class Stream:
    """The log and the memory of its leader."""

    replicas: int = 1
    dedupe_s: float = 120.0
    messages_max: int | None = None
    log: list[Message] = field(default_factory=list[Message])
    last: dict[str, int] = field(default_factory=dict[str, int])
    ids: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    in_process: dict[str, Proposal] = field(default_factory=dict[str, Proposal])
    """Open proposals of a leader of three, by subjects with an expectation and by message ids."""
    batches: dict[str, _Staged] = field(default_factory=dict[str, _Staged])

    def publish(self, message: Message, now: float) -> Acked | ErrorReply | Proposal:
        """Publish a message. Three replicas answer with a proposal, which `apply` or `forget` ends."""
        refusal = self._single_check(message, now)
        if refusal is None:
            return self._accept((message,), now)
        return refusal

    def stage(
        self, batch_id: str, number: int, commit: bool, message: Message, now: float
    ) -> Acked | ErrorReply | Proposal | None:
        """Add a message of a batch and return its answer, None for one that is staged without an answer."""
        self._drop_abandoned(now)
        staged = self.batches.get(batch_id)
        if staged is None and number == 1:
            if len(self.batches) >= BATCHES_MAX:
                return TOO_MANY_BATCHES
            staged = self.batches[batch_id] = _Staged([], now)
        if staged is None:
            return INCOMPLETE
        refusal = self._stage_check(staged, number, message)
        if refusal is not None:
            del self.batches[batch_id]
            return refusal
        staged.messages.append(message)
        staged.touched = now
        if not commit:
            return None
        del self.batches[batch_id]
        refusal = self._batch_check(staged.messages, now)
        return self._accept(staged.messages, now) if refusal is None else refusal

    def apply(self, proposal: Proposal, now: float) -> Acked:
        """Store a proposal that the other replicas agreed to."""
        self.forget(proposal)
        proposal.position = self._store(proposal.messages, now)
        return Acked(proposal.position)

    def forget(self, proposal: Proposal) -> None:
        """End a proposal; unless applied, it leaves nothing behind."""
        self.in_process = {
            name: open_proposal for name, open_proposal in self.in_process.items() if open_proposal is not proposal
        }

    def lose_leader(self) -> None:
        """Drop the memory of the leader."""
        self.in_process.clear()
        self.batches.clear()

    def as_of_now(self) -> Stream:
        """Return the stream as an isolated leader knows it."""
        return Stream(
            self.replicas, self.dedupe_s, self.messages_max,
            list(self.log), dict(self.last), dict(self.ids), dict(self.in_process),
        )  # fmt: skip

    def slot(self, subject: str, expected: int) -> tuple[int, Message] | None:
        """Return the first message on a subject after a position, with its position."""
        log = self.log
        for position in range(expected, len(log)):
            if log[position].subject == subject:
                return position + 1, log[position]
        return None

    def last_by(self, length: int, subject: str) -> int:
        """Return the position of the subject's last message within the first `length`."""
        log = self.log
        for position in range(min(length, len(log)), 0, -1):
            if log[position - 1].subject == subject:
                return position
        return 0

    def recorded(self, subject: str, command: str, until: int) -> int:
        """Return the position of a command's first message on a subject, 0 for none up to `until`."""
        for position, message in enumerate(self.log[:until], 1):
            if message.subject == subject and message.command == command:
                return position
        return 0

    def _single_check(self, message: Message, now: float) -> Acked | ErrorReply | None:
        if len(message.block) + len(message.body) > SIZE_MAX:
            return TOO_LARGE
        subject, event_id, expected = message.subject, message.event_id, message.expected
        if self.replicas == 1:
            if expected is not None and self.last.get(subject, 0) != expected:
                return conflict(self.last.get(subject, 0))
            position = self._seen(event_id, now)
            if position:
                return Acked(position, duplicate=True)
        else:
            if event_id is not None and event_id in self.in_process:
                return IN_PROCESS
            position = self._seen(event_id, now)
            if position:
                return Acked(position, duplicate=True)
            if expected is not None:
                if subject in self.in_process:
                    return RACED
                if self.last.get(subject, 0) != expected:
                    return conflict(self.last.get(subject, 0))
        return FULL if self._is_full(1) else None

    def _batch_check(self, messages: Sequence[Message], now: float) -> ErrorReply | None:
        ids: set[str] = set()
        touched: set[str] = set()
        for message in messages:
            subject, event_id, expected = message.subject, message.event_id, message.expected
            if event_id is not None:
                if event_id in ids or event_id in self.in_process or self._seen(event_id, now):
                    return DUPLICATE_IN_BATCH
                ids.add(event_id)
            if expected is not None:
                if subject in touched or subject in self.in_process:
                    return RACED
                if self.last.get(subject, 0) != expected:
                    return conflict(self.last.get(subject, 0))
            touched.add(subject)
        return FULL if self._is_full(len(messages)) else None

    def _stage_check(self, staged: _Staged, number: int, message: Message) -> ErrorReply | None:
        if number != len(staged.messages) + 1:
            return INCOMPLETE
        if number > BATCH_MAX:
            return TOO_LARGE_BATCH
        return TOO_LARGE if len(message.block) + len(message.body) > SIZE_MAX else None

    def _accept(self, messages: Sequence[Message], now: float) -> Acked | Proposal:
        if self.replicas == 1:
            return Acked(self._store(messages, now))
        proposal = Proposal(messages)
        for message in messages:
            if message.expected is not None:
                self.in_process[message.subject] = proposal
            if message.event_id is not None:
                self.in_process[message.event_id] = proposal
        return proposal

    def _store(self, messages: Sequence[Message], now: float) -> int:
        for message in messages:
            self.log.append(message)
            self.last[message.subject] = len(self.log)
            if message.event_id is not None:
                self.ids[message.event_id] = (len(self.log), now)
        return len(self.log)

    def _seen(self, event_id: str | None, now: float) -> int:
        known = None if event_id is None else self.ids.get(event_id)
        return 0 if known is None or now - known[1] >= self.dedupe_s else known[0]

    def _is_full(self, more: int) -> bool:
        return self.messages_max is not None and len(self.log) + more > self.messages_max

    def _drop_abandoned(self, now: float) -> None:
        for batch_id, staged in list(self.batches.items()):
            if now - staged.touched >= STAGED_S:
                del self.batches[batch_id]
