"""The outcome of a save, decided by a state machine without I/O. PURE.

The caller sends the save, reads the log, and passes the results to the machine, which returns the next step. Its rules
(ADR 0006):

* An answer that leaves the outcome open is resolved by sending the *same* event ids with the *same* expectations, and
  by reading the **next message** of each subject: the first message after its expected position, through the leader.
  If it is ours on any subject, the save is stored. If it is another's on any, there is a conflict. If there is none on
  all of them, the save is not stored *yet* and is sent again; a late copy is harmless, since either it becomes the next
  message with our ids, or the expectation refuses it.
* The last message of a subject is never compared: another writer may have stored events after ours.
* `duplicate: true` is never believed without reading the stored message.
* No conflict is believed before the next message is read and is another's, not even as the answer to the first try: on
  one replica an exact retry of a stored event answers 10071, and on three a deposed leader that has not heard of its
  successor answers 10164 or 10071 to a publish that the successor stores a millisecond later.
* A batch counts as stored only if its last event is where it has to be, too: nats-server 2.15.1 stores the first
  messages of a batch and answers nothing when the account reaches its limit within it, or `max_bytes` is lowered onto
  it.
* Saves may share a batch, which is stored whole or not at all. The server's answer to the batch is its answer to each
  save, except for a refusal: it may be meant for another save, so each save is sent again, and by itself after two
  refusals.
* A refusal is definite only if its code is listed, and only if nothing before it was in doubt.
* After the deadline the outcome is unknown, never failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from eventjet.codec.headers import RawRecord
from eventjet.errors import Refused
from eventjet.jetstream.api import IN_PROCESS, LIMITS, REPEATED_ID, STORE_FAILED, WRONG_SEQUENCE

REFUSALS = frozenset(
    {10002, 10054, 10060, 10097, 10109, 10111, 10120, 10165, 10166, 10168, 10170, 10171}
    | {10174, 10175, 10177, 10179, 10188, 10189, 10190, 10191, 10192, 10193, 10199}
)
"""Error codes of what the server checks before it stores anything.

These are the account's limits, the message's size and headers, a sealed stream, and batches that are switched off. Any
other code leaves the outcome open.
"""

STALE_LEADER_S = 2.0
"""How long a deposed leader may not know of its successor, which sends a heartbeat every second.

A save that is answered 10071 for longer, with no other answer in between and no next message on any subject, expects a
position that the log does not have.
"""
BACKOFF_CONTESTED_S = 0.005
"""The first pause after a conflict without a next message: another writer's event is probably being stored."""
BACKOFF_FIRST_S = 0.05
REJECTED_MAX = 2
"""After this many rejected batches a save is sent by itself: it may be what the server refused."""
BACKOFF_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Acked:
    """The server acknowledged the save; `position` is the position of the last event."""

    position: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server answered with an error."""

    status: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class NoReply:
    """There was no answer: a timeout, no responders, or a closed connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class PermissionDenied:
    """These credentials may not publish the save, or it was not sent; nothing was stored by this try."""

    reason: str
    refused: Refused | None = None
    """Why the save was not sent; None if the server denied it."""


@dataclass(frozen=True, slots=True)
class BatchRejected:
    """The batch that the save shared with others was refused; the server does not say because of which save."""

    cause: str
    is_conflict: bool
    """Whether a save of the batch may have met a conflict; otherwise nothing of the batch is stored, for certain."""


Answer = Acked | ErrorReply | NoReply | PermissionDenied | BatchRejected


@dataclass(frozen=True, slots=True)
class NextMessage:
    """The first message on a subject after the expected position."""

    position: int
    event_id: str
    is_torn: bool = False
    """Whether the message is ours, but the last event of the save is not where it has to be."""
    record: RawRecord | None = None
    """The whole record, for a command that decides again after another writer's event."""


def shared(answer: Answer, counts: Sequence[int]) -> list[Answer]:
    """Return what the answer to a batch means for each save in it; `counts` are the saves' numbers of events."""
    if len(counts) == 1:
        return [answer]
    match answer:
        case Acked(position=position, duplicate=duplicate):
            answers: list[Answer] = []
            for count in reversed(counts):
                answers.append(Acked(position, duplicate))
                position -= count
            return answers[::-1]
        case ErrorReply(code=code, text=text) if code in (WRONG_SEQUENCE, IN_PROCESS, REPEATED_ID):
            return [BatchRejected(f"error {code}: {text}", is_conflict=True)] * len(counts)
        case ErrorReply() if _is_refusal(answer):
            return [BatchRejected(f"error {answer.code}: {answer.text}", is_conflict=False)] * len(counts)
        case PermissionDenied(reason=reason):
            return [BatchRejected(reason, is_conflict=False)] * len(counts)
        case _:
            return [answer] * len(counts)


def _is_refusal(answer: ErrorReply) -> bool:
    return answer.code in REFUSALS or (answer.code == STORE_FAILED and answer.text in LIMITS)


def answer_in(reply: bytes) -> Answer:
    """Parse the server's answer to a publish; an answer that cannot be read counts as none."""
    try:
        value: dict[str, Any] = orjson.loads(reply)
        if "error" not in value:
            return Acked(int(value["seq"]), bool(value.get("duplicate")))
        error: dict[str, Any] = value["error"]
        status, code = int(error.get("code", 0)), int(error.get("err_code", 0))
        return ErrorReply(status, code, str(error.get("description", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return NoReply(f"an answer that cannot be read: {reply[:80]!r}")


def _last_in(text: str) -> int | None:
    """Return the position that an error text such as "wrong last sequence: 6" ends with; None for another text."""
    digits = text.rpartition(": ")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


NextMessages = Sequence[NextMessage | None]
"""The next message of each subject of the save, in the save's order; None for a subject without a next message."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the whole save, again or for the first time, after a pause; a batch gets a new batch id."""

    after_s: float = 0.0
    alone: bool = False
    """Whether the save must not share a batch with others."""


@dataclass(frozen=True, slots=True)
class Look:
    """Read the next message of each subject through the leader, after a pause."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """All events are in the log; the last event is at `position`."""

    position: int


@dataclass(frozen=True, slots=True)
class Conflicted:
    """Nothing is stored: the next message of subject number `index` is another writer's.

    `index` is None if no subject has a next message and the server still refused: the log does not have the expected
    position.
    """

    index: int | None = None
    rival: RawRecord | None = None
    """The other writer's message, if the server said that it was the subject's last one."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The deadline passed before the outcome was certain."""

    cause: str
    is_read_only: bool = False
    """Whether the server answered reads but no save: two or more sends in a row had no reply."""
    is_torn: bool = False
    """Whether only a part of the save is in the log."""


Failed = Conflicted | ErrorReply | PermissionDenied | Unknown
"""The outcomes of a save that failed or may have failed; an error or a denied permission is definite here."""
Outcome = Stored | Failed
Step = Send | Look | Outcome


class Save:
    """The state machine of one save, from the first try to its outcome.

    It ends at its deadline, or with the request that is under way then. Time is passed in as `now`, in seconds of any
    monotonic clock.
    """

    def __init__(self, event_ids: Sequence[Sequence[str]], *, deadline: float, jitter: Callable[[], float]) -> None:
        """`event_ids` are the ids of the save's events, for each subject; `jitter` returns a number from 0 to 1."""
        self._event_ids = event_ids
        self._deadline = deadline
        self._jitter = jitter
        self._pauses = 0
        self._blind_looks = 0
        self._uncertain = False
        self._contested = False
        self._compared = False
        self._last: int | None = None
        self._missing_since: float | None = None
        self._sent_at = 0.0
        self._cause = "nothing was sent"
        self._unanswered_sends = 0
        self._rejections = 0

    def resume(self) -> Step:
        """Return the first step of a save that may have been sent before; other saves begin with `Send()`."""
        self._uncertain = True
        return Look()

    def answered(self, answer: Answer) -> Step:
        """Return the next step after the answer to a send."""
        self._unanswered_sends = self._unanswered_sends + 1 if isinstance(answer, NoReply) else 0
        match answer:
            case Acked(position=position, duplicate=False):
                return Stored(position)
            case Acked():
                return self._doubt("the server called it a duplicate")
            case ErrorReply(code=code, text=text) if code in (WRONG_SEQUENCE, IN_PROCESS):
                self._contested = True
                self._compared = code == WRONG_SEQUENCE
                self._last = _last_in(text)
                self._cause = f"error {code}: {text}"
                return Look()
            case ErrorReply(code=code, text=text):
                if self._untroubled and _is_refusal(answer):
                    return answer
                return self._doubt(f"error {code}: {text}")
            case BatchRejected(cause=cause, is_conflict=is_conflict):
                self._rejections += 1 if is_conflict else REJECTED_MAX
                self._contested |= is_conflict
                self._compared = False
                self._cause = cause
                return Look()
            case PermissionDenied() if self._untroubled:
                return answer
            case PermissionDenied(reason=reason) | NoReply(reason=reason):
                return self._doubt(reason)

    def looked(self, next_messages: NextMessages | None, now: float) -> Step:
        """Return the next step after the next messages were read; `next_messages` is None if they could not be read."""
        for index, message in enumerate(next_messages or ()):
            if message is not None and message.event_id == self._event_ids[index][0]:
                return self._torn(now) if message.is_torn else Stored(self.last_position(index, message))
        for index, message in enumerate(next_messages or ()):
            if message is not None:
                return Conflicted(index, message.record if message.position == self._last else None)
        if next_messages is not None and self._expected_position_missing(now):
            return Conflicted()
        if now >= self._deadline:
            return Unknown(self._cause, is_read_only=next_messages is not None and self._unanswered_sends > 1)
        pause = min(self._pause(), self._deadline - now)
        if next_messages is None:
            # A writer that may not read, or cannot at the moment, still learns the outcome from an acknowledgement.
            self._blind_looks += 1
            if self._blind_looks % 2:
                return Look(pause)
        self._sent_at = now + pause
        return Send(pause, alone=self._rejections >= REJECTED_MAX)

    def last_position(self, index: int, message: NextMessage) -> int:
        """Return the position of the save's last event, by its first on subject `index`: a batch has no gaps."""
        return message.position + sum(map(len, self._event_ids[index:])) - 1

    def _torn(self, now: float) -> Step:
        """Return a step that reads again: a save stored in part is never sent again, since its expectations fail."""
        self._uncertain = True
        self._cause = "the log holds only a part of them"
        if now >= self._deadline:
            return Unknown(self._cause, is_torn=True)
        return Look(min(self._pause(), self._deadline - now))

    def _expected_position_missing(self, now: float) -> bool:
        """Return whether the log does not have the expected position; called if no subject has a next message."""
        if self._uncertain or not self._compared:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        return self._missing_since is not None and self._sent_at - self._missing_since >= STALE_LEADER_S

    @property
    def is_in_doubt(self) -> bool:
        """Whether a try may have been stored although the log has not shown it."""
        return self._uncertain

    @property
    def _untroubled(self) -> bool:
        return not (self._uncertain or self._contested)

    def _doubt(self, cause: str) -> Step:
        self._uncertain = True
        self._cause = cause
        # Look once even after the deadline: it may show the outcome.
        return Look()

    def _pause(self) -> float:
        first_pause = BACKOFF_FIRST_S if self._uncertain else BACKOFF_CONTESTED_S
        pause: float = min(BACKOFF_MAX_S, first_pause * 2.0 ** min(self._pauses, 10))
        self._pauses += 1
        return pause * (0.5 + self._jitter())
