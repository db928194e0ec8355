"""PURE: what became of a save, as a state machine driven from outside.

The driver sends, looks, and tells the machine what it saw; the machine says what to do next. Rules it keeps:

* Unknown answers are resolved by sending the *same* event ids with the *same* expectations, and by looking at the
  **slot**: the first message on each subject after its expected position, read through the leader. Ours in any slot:
  stored. Another's in any: conflict. All empty: not stored *yet*, so send again; a late copy is harmless, since either
  it fills the slot with our ids or the expectation refuses it.
* The tail is never compared: a rival may have written after us.
* `duplicate: true` is never believed without reading the stored message.
* A conflict is definite only when no earlier try has an unknown outcome (on one replica an exact retry of a stored
  event answers 10071).
* Past the deadline the outcome is unknown, never failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFLICTS = frozenset({10071, 10164})
"""Wrong last sequence: sequential writers get the first, racing writers on three replicas the second."""
UNKNOWN = frozenset({10008, 10023, 10158, 10176, 10201, 10210})
"""Not available, id in process, incomplete batch, duplicate inside a batch, too many batches in flight."""
STORE_FAILED = 10077
"""The generic code of a failed store: definite only when its text names a limit."""

BACKOFF_FIRST_S = 0.05
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
    """The server denied the publish; nothing was stored by this try."""

    reason: str


Answer = Acked | ErrorReply | Silence | Violation


@dataclass(frozen=True, slots=True)
class SlotFound:
    """The first message on a subject after the expected position."""

    position: int
    event_id: str


Slots = Sequence[SlotFound | None]
"""One for each subject of the save, in its order; None where the slot is empty."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send everything (again), after a pause; a batch gets a new batch id."""

    after_s: float = 0.0


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
    """Nothing is stored: another's event holds the slot of subject number `index` (None: not told which)."""

    index: int | None = None


@dataclass(frozen=True, slots=True)
class RefusedOutcome:
    """Nothing is stored, and sending it again would not help."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForbiddenOutcome:
    """Nothing is stored: the credentials may not do this."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The deadline passed first."""

    cause: str


Outcome = Stored | Conflicted | RefusedOutcome | ForbiddenOutcome | Unknown
Step = Send | Look | Outcome


@dataclass(frozen=True, slots=True)
class Part:
    """One subject of a save: the ids of its events, and where its first one stands in the whole."""

    event_ids: tuple[str, ...]
    offset: int


class Save:
    """One save, from the first try to its outcome. Time comes in as `now`, in seconds of any steady clock."""

    __slots__ = ("_cause", "_count", "_deadline", "_jitter", "_parts", "_tries", "_uncertain")

    def __init__(self, parts: Sequence[Part], *, deadline: float, jitter: Callable[[], float]) -> None:
        self._parts = tuple(parts)
        self._count = sum(len(part.event_ids) for part in parts)
        self._deadline = deadline
        self._jitter = jitter
        self._tries = 0
        self._uncertain = False
        self._cause = "nothing was sent"

    def begin(self) -> Step:
        """The first step."""
        return Send()

    def resume(self) -> Step:
        """The first step for a save whose deadline passed before: look first, nothing is certain."""
        self._uncertain = True
        return Look()

    def answered(self, answer: Answer) -> Step:
        """What to do after a send was answered."""
        match answer:
            case Acked(position=position, duplicate=False):
                return Stored(position)
            case Acked():
                return self._doubt("the server called it a duplicate")
            case ErrorReply(code=code) if code in CONFLICTS:
                return self._doubt(f"error {code}") if self._uncertain else Conflicted()
            case ErrorReply(status=status, code=code, text=text):
                if _is_definite(status, code, text) and not self._uncertain:
                    return RefusedOutcome(code, text)
                return self._doubt(f"error {code}: {text}")
            case Violation(reason=reason):
                return self._doubt(reason) if self._uncertain else ForbiddenOutcome(reason)
            case Silence(reason=reason):
                return self._doubt(reason)

    def looked(self, slots: Slots | None, now: float) -> Step:
        """What to do after the slots were read; None when they could not be."""
        if slots is None:
            return Unknown(self._cause) if now >= self._deadline else Look(self._pause())
        for part, slot in zip(self._parts, slots, strict=True):
            if slot is not None and slot.event_id == part.event_ids[0]:
                return Stored(slot.position - part.offset + self._count - 1)
        for index, slot in enumerate(slots):
            if slot is not None:
                return Conflicted(index)
        return Unknown(self._cause) if now >= self._deadline else Send(self._pause())

    def _doubt(self, cause: str) -> Step:
        self._uncertain = True
        self._cause = cause
        # One look even past the deadline: it may turn unknown into known.
        return Look()

    def _pause(self) -> float:
        self._tries += 1
        pause: float = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self._tries - 1, 10))
        return pause * (0.5 + self._jitter())


def _is_definite(status: int, code: int, text: str) -> bool:
    if code == STORE_FAILED:
        return "maximum" in text or "exceed" in text
    return code not in UNKNOWN and status not in (409, 429) and status < 500
