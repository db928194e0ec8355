"""PURE: what became of a save, as a state machine driven from outside.

The driver sends and reads, and tells the machine what it saw; the machine says what to do next. Its rules (ADR 0006):

* An answer that leaves the outcome open is resolved by sending the *same* event ids with the *same* expectations, and
  by reading the **next message** of each subject: the first one after its expected position, through the leader. Ours
  on any subject: stored. Another's on any: conflict. None on all: not stored *yet*, so send again; a late copy is
  harmless, since either it becomes the next message with our ids, or the expectation refuses it.
* The last message of a subject is never compared: a rival may have written after us.
* `duplicate: true` is never believed without reading the stored message.
* No conflict is believed before another's event is read there, not even the answer to the first try: on one replica an
  exact retry of a stored event answers 10071, and on three a deposed leader that has not heard of its successor answers
  10164 or 10071 to a publish that the successor stores a millisecond later.
* A batch counts as stored when its last event is where it has to be, too: nats-server 2.15.1 stores the first messages
  of a batch and answers nothing when the account reaches its limit within it, or `max_bytes` is lowered onto it.
* Saves may share a batch, which is stored whole or not at all. What the server answers to it is its answer to each,
  except for a refusal: that may be meant for another save, so each is sent again, and by itself after two of them.
* A refusal is definite only when its code is listed, and only when nothing before it was in doubt.
* Past the deadline the outcome is unknown, never failed.
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
"""What the server checks before it stores: the account's limits, the message's size and headers, a sealed stream,
batches switched off. Any other code leaves the outcome open."""

STALE_LEADER_S = 2.0
"""How long a deposed leader may not have heard of its successor, which beats every second. A save that is answered
10071 for longer, with nothing else between and no next message on any subject, expects a position that the log does not
have."""
BACKOFF_CONTESTED_S = 0.005
"""The first pause after a conflict without a next message: a rival's event is on its way."""
BACKOFF_FIRST_S = 0.05
REJECTED_MAX = 2
"""A save in so many rejected batches is sent by itself from then on: it might be the one to blame."""
BACKOFF_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Acked:
    """The server acknowledged; `position` is that of the last event."""

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
    """No answer: a timeout, no responders, a closed connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class PermissionDenied:
    """These credentials may not publish it, or it was not sent; nothing was stored by this try."""

    reason: str
    refused: Refused | None = None
    """Why it was not sent."""


@dataclass(frozen=True, slots=True)
class BatchRejected:
    """The batch that the save shared with others was refused, and the server does not say which of them is to blame."""

    cause: str
    is_conflict: bool
    """Whether one of them may have lost a race; otherwise nothing of the batch is stored, for certain."""


Answer = Acked | ErrorReply | NoReply | PermissionDenied | BatchRejected


@dataclass(frozen=True, slots=True)
class NextMessage:
    """The first message on a subject after the expected position."""

    position: int
    event_id: str
    is_torn: bool = False
    """Whether it is ours and the last event of the save is not where it has to be."""
    record: RawRecord | None = None
    """The whole record, for a command that decides again after a rival's event."""


def shared(answer: Answer, counts: Sequence[int]) -> list[Answer]:
    """Return what the answer to a batch means to each save in it; `counts` are their numbers of events, in order."""
    if len(counts) == 1:
        return [answer]
    match answer:
        case Acked(position=last, duplicate=duplicate):
            answers: list[Answer] = []
            for count in reversed(counts):
                answers.append(Acked(last, duplicate))
                last -= count
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
    """Parse the server's answer to a publish; one that cannot be read decides nothing."""
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
    """Return the position of the subject's last message in "wrong last sequence: 6", if it is there."""
    digits = text.rpartition(": ")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


NextMessages = Sequence[NextMessage | None]
"""One for each subject of the save, in its order; None where there is none."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send everything (again), after a pause; a batch gets a new batch id."""

    after_s: float = 0.0
    alone: bool = False
    """Whether its batch is shared with no other save."""


@dataclass(frozen=True, slots=True)
class Look:
    """Read the next message of each subject through the leader, after a pause."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """All events are in the log; the last is at `position`."""

    position: int


@dataclass(frozen=True, slots=True)
class Conflicted:
    """Nothing is stored: the next message of subject number `index` is another's.

    None: there is no next message, and yet the server kept refusing; the expected position is not in the log.
    """

    index: int | None = None
    rival: RawRecord | None = None
    """That message, where the server said that it was the subject's last one."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The deadline passed first."""

    cause: str
    is_read_only: bool = False
    """Whether the server answered reads and no save: several had no reply, and the next messages could be read."""
    is_torn: bool = False
    """Whether only a part of the save is in the log."""


Failed = Conflicted | ErrorReply | PermissionDenied | Unknown
"""An error or a denied permission is definite here: nothing is stored, and sending it again would not help."""
Outcome = Stored | Failed
Step = Send | Look | Outcome


class Save:
    """One save, from the first try to its outcome. It ends at its deadline, plus the one request then under way.

    `event_ids` are those of each subject. Time comes in as `now`, in seconds of any steady clock.
    """

    def __init__(self, event_ids: Sequence[Sequence[str]], *, deadline: float, jitter: Callable[[], float]) -> None:
        self._event_ids = event_ids
        self._deadline = deadline
        self._jitter = jitter
        self._pauses = 0
        self._blind = 0
        self._uncertain = False
        self._contested = False
        self._compared = False
        self._last: int | None = None
        self._since: float | None = None
        self._sent_at = 0.0
        self._cause = "nothing was sent"
        self._unanswered = 0
        self._rejected = 0

    def resume(self) -> Step:
        """Return the first step of a save that may have been sent before; any other save begins with `Send()`."""
        self._uncertain = True
        return Look()

    def answered(self, answer: Answer) -> Step:
        """Return what to do after a send was answered."""
        self._unanswered = self._unanswered + 1 if isinstance(answer, NoReply) else 0
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
                self._rejected += 1 if is_conflict else REJECTED_MAX
                self._contested |= is_conflict
                self._compared = False
                self._cause = cause
                return Look()
            case PermissionDenied() if self._untroubled:
                return answer
            case PermissionDenied(reason=reason) | NoReply(reason=reason):
                return self._doubt(reason)

    def looked(self, following: NextMessages | None, now: float) -> Step:
        """Return what to do after the next messages were read; None when they could not be."""
        for index, message in enumerate(following or ()):
            if message is not None and message.event_id == self._event_ids[index][0]:
                return self._torn(now) if message.is_torn else Stored(self.last_position(index, message))
        for index, message in enumerate(following or ()):
            if message is not None:
                return Conflicted(index, message.record if message.position == self._last else None)
        if following is not None and self._expects_what_is_not_there(now):
            return Conflicted()
        if now >= self._deadline:
            return Unknown(self._cause, is_read_only=following is not None and self._unanswered > 1)
        pause = min(self._pause(), self._deadline - now)
        if following is None:
            # Whoever may write but not read, or cannot at the moment, still learns from an acknowledgement.
            self._blind += 1
            if self._blind % 2:
                return Look(pause)
        self._sent_at = now + pause
        return Send(pause, alone=self._rejected >= REJECTED_MAX)

    def last_position(self, index: int, message: NextMessage) -> int:
        """Return where the save's last event is when `message`, its first on subject `index`, is stored: a batch has
        no gaps."""
        return message.position + sum(map(len, self._event_ids[index:])) - 1

    def _torn(self, now: float) -> Step:
        """Return a step that reads again: a save stored in part is never sent again, since it could never fit."""
        self._uncertain = True
        self._cause = "the log holds only a part of them"
        if now >= self._deadline:
            return Unknown(self._cause, is_torn=True)
        return Look(min(self._pause(), self._deadline - now))

    def _expects_what_is_not_there(self, now: float) -> bool:
        """Return whether the position is one the log never had; called when no subject has a next message."""
        if self._uncertain or not self._compared:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and self._sent_at - self._since >= STALE_LEADER_S

    @property
    def _untroubled(self) -> bool:
        return not (self._uncertain or self._contested)

    def _doubt(self, cause: str) -> Step:
        self._uncertain = True
        self._cause = cause
        # One look even past the deadline: it may turn unknown into known.
        return Look()

    def _pause(self) -> float:
        first = BACKOFF_FIRST_S if self._uncertain else BACKOFF_CONTESTED_S
        pause: float = min(BACKOFF_MAX_S, first * 2.0 ** min(self._pauses, 10))
        self._pauses += 1
        return pause * (0.5 + self._jitter())
