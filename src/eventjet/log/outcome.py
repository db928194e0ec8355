"""PURE: what became of a save, as a state machine driven from outside.

The driver sends, looks, and tells the machine what it saw; the machine says what to do next. Rules it keeps:

* Unknown answers are resolved by sending the *same* event ids with the *same* expectations, and by looking at the
  **slot**: the first message on each subject after its expected position, read through the leader. Ours in any slot:
  stored. Another's in any: conflict. All empty: not stored *yet*, so send again; a late copy is harmless, since either
  it fills the slot with our ids or the expectation refuses it.
* The tail is never compared: a rival may have written after us.
* `duplicate: true` is never believed without reading the stored message.
* No conflict is believed before another's event is seen in the slot, not even the answer to the first try: on one
  replica an exact retry of a stored event answers 10071, and on three a deposed leader that has not heard of its
  successor answers 10164 or 10071 to a publish that the successor stores a millisecond later.
* A batch counts as stored when its last event is where it has to be, too: nats-server 2.15.1 stores the first messages
  of a batch and answers nothing when the account reaches its limit within it, or `max_bytes` is lowered onto it.
* Saves may share a batch, which is stored whole or not at all. What the server says to it is what it says to each, but
  for a refusal: that may be meant for another one of them, so each is sent again, and after two of them by itself.
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
"""How long a deposed leader may not have heard of its successor, which beats every second. Who is told 10071 for
longer, with nothing else between and all slots empty, expects a position that the log does not have."""
BACKOFF_CONTESTED_S = 0.005
"""The first pause after a conflict with an empty slot: a rival's event is on its way into the slot."""
BACKOFF_FIRST_S = 0.05
PARTED_MAX = 2
"""A save that shared so many batches that were refused shares none any more: it might be the one to blame."""
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
class Silence:
    """No answer: a timeout, no responders, a closed connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class Violation:
    """The server denied the publish to these credentials, or was not asked; nothing was stored by this try."""

    reason: str
    refused: Refused | None = None
    """Why it was not asked."""


@dataclass(frozen=True, slots=True)
class Parted:
    """The batch that it shared with other saves was refused; which of them is to blame is not told."""

    cause: str
    is_conflict: bool
    """Whether it may have been a race that one of them lost; otherwise nothing of it is stored, for certain."""


Answer = Acked | ErrorReply | Silence | Violation | Parted


@dataclass(frozen=True, slots=True)
class SlotFound:
    """The first message on a subject after the expected position."""

    position: int
    event_id: str
    is_torn: bool = False
    """It is ours, and the last event of the save is not where it would be."""
    record: RawRecord | None = None
    """All of it, for whoever decides again after a rival's event."""


def shared(answer: Answer, counts: Sequence[int]) -> list[Answer]:
    """What the answer to a batch means to each of the saves in it, of so many events, in their order."""
    if len(counts) == 1:
        return [answer]
    match answer:
        case Acked(position=last, duplicate=duplicate):
            found: list[Answer] = []
            for count in reversed(counts):
                found.append(Acked(last, duplicate))
                last -= count
            return found[::-1]
        case ErrorReply(code=code, text=text) if code in (WRONG_SEQUENCE, IN_PROCESS, REPEATED_ID):
            return [Parted(f"error {code}: {text}", is_conflict=True)] * len(counts)
        case ErrorReply() if _is_refusal(answer):
            return [Parted(f"error {answer.code}: {answer.text}", is_conflict=False)] * len(counts)
        case Violation(reason=reason):
            return [Parted(reason, is_conflict=False)] * len(counts)
        case _:
            return [answer] * len(counts)


def _is_refusal(answer: ErrorReply) -> bool:
    return answer.code in REFUSALS or (answer.code == STORE_FAILED and answer.text in LIMITS)


def answer_in(reply: bytes) -> Answer:
    """What the server's acknowledgement says; one that cannot be read decides nothing."""
    try:
        value: dict[str, Any] = orjson.loads(reply)
        if "error" not in value:
            return Acked(int(value["seq"]), bool(value.get("duplicate")))
        error: dict[str, Any] = value["error"]
        status, code = int(error.get("code", 0)), int(error.get("err_code", 0))
        return ErrorReply(status, code, str(error.get("description", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Silence(f"an answer that cannot be read: {reply[:80]!r}")


def _last_in(text: str) -> int | None:
    """Position of the subject's last message in "wrong last sequence: 6"; None where it is not told."""
    told = text.rpartition(": ")[2]
    return int(told) if told.isascii() and told.isdecimal() and len(told) < 20 else None


Slots = Sequence[SlotFound | None]
"""One for each subject of the save, in its order; None where the slot is empty."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send everything (again), after a pause; a batch gets a new batch id."""

    after_s: float = 0.0
    alone: bool = False
    """In a batch that it shares with no other save."""


@dataclass(frozen=True, slots=True)
class Look:
    """Read the slots through the leader, after a pause."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """All events are in the log; the last is at `position`."""

    position: int


@dataclass(frozen=True, slots=True)
class Conflicted:
    """Nothing is stored: another's event holds the slot of subject number `index`.

    None: no slot is taken, and yet the server kept refusing; the expected position is not in the log.
    """

    index: int | None = None
    rival: RawRecord | None = None
    """That event, where the server said that it was the subject's last one."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The deadline passed first."""

    cause: str
    is_read_only: bool = False
    """Whether the server answered reads and no save: several went silent, and the slots could be read."""
    is_torn: bool = False
    """Whether a part of the save is in the log."""


Failed = Conflicted | ErrorReply | Violation | Unknown
"""An error or a violation is definite as an outcome: nothing is stored, and sending it again would not help."""
Outcome = Stored | Failed
Step = Send | Look | Outcome


class Save:
    """One save, from the first try to its outcome. Time comes in as `now`, in seconds of any steady clock.

    `event_ids` are those of each subject. It ends at its deadline, plus the one request that is then under way.
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
        self._silences = 0
        self._parted = 0

    def resume(self) -> Step:
        """The first step for a save that may have been sent before: look, since nothing is certain.

        Any other save begins with `Send()`.
        """
        self._uncertain = True
        return Look()

    def answered(self, answer: Answer) -> Step:
        """What to do after a send was answered."""
        self._silences = self._silences + 1 if isinstance(answer, Silence) else 0
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
            case Parted(cause=cause, is_conflict=is_conflict):
                self._parted += 1 if is_conflict else PARTED_MAX
                self._contested |= is_conflict
                self._compared = False
                self._cause = cause
                return Look()
            case Violation() if self._untroubled:
                return answer
            case Violation(reason=reason) | Silence(reason=reason):
                return self._doubt(reason)

    def looked(self, slots: Slots | None, now: float) -> Step:
        """What to do after the slots were read; None when they could not be."""
        for index, slot in enumerate(slots or ()):
            if slot is not None and slot.event_id == self._event_ids[index][0]:
                return self._torn(now) if slot.is_torn else Stored(self.last_position(index, slot))
        for index, slot in enumerate(slots or ()):
            if slot is not None:
                return Conflicted(index, slot.record if slot.position == self._last else None)
        if slots is not None and self._expects_what_is_not_there(now):
            return Conflicted()
        if now >= self._deadline:
            return Unknown(self._cause, is_read_only=slots is not None and self._silences > 1)
        pause = min(self._pause(), self._deadline - now)
        if slots is None:
            # Who may write but not read, or cannot at the moment, still learns from an acknowledgement.
            self._blind += 1
            if self._blind % 2:
                return Look(pause)
        self._sent_at = now + pause
        return Send(pause, alone=self._parted >= PARTED_MAX)

    def last_position(self, index: int, slot: SlotFound) -> int:
        """Where the save's last event is, when its first one of subject `index` is in the slot: a batch is unbroken."""
        return slot.position + sum(map(len, self._event_ids[index:])) - 1

    def _torn(self, now: float) -> Step:
        """Neither stored nor not: it is looked at again, and never sent again, for it would never fit."""
        self._uncertain = True
        self._cause = "the log holds only a part of them"
        if now >= self._deadline:
            return Unknown(self._cause, is_torn=True)
        return Look(min(self._pause(), self._deadline - now))

    def _expects_what_is_not_there(self, now: float) -> bool:
        """Told after the slots were read and all are empty."""
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
