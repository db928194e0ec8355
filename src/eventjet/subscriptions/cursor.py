"""`Cursor`: how far a subscription has come, which process moves it, and its transitions. PURE.

A cursor is the value of one key in a key-value stream and is only replaced by compare-and-set: a writer names the
sequence that it read, and a fenced writer names an old sequence. So there is no epoch: the sequence is the fence. Its
states and transitions are those of `domain.position`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

import orjson

from eventjet.domain.position import ACTIVE, FAILED, PAUSE_CURSOR, PAUSED, RESUME_AS, SET_CURSOR, TAKE, Transition
from eventjet.errors import CursorDamaged
from eventjet.text import with_escapes

PROCESS = "process"
"""The kind of a process cursor: code of a higher revision looks at the process's waiting instances again."""
_REASON_MAX = 2_000
_OPTIONAL = ("waking", "began", "tries", "origins")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The stored progress of one reactor partition, process, publication or inbox."""

    name: str
    kind: str
    """`reactor`, `process`, `publication` or `inbox`."""
    log: str
    """UUID of the log that the position belongs to; for an inbox, when its stream was created."""
    position: int = 0
    """Every event up to and including this position is done."""
    event_id: str = ""
    """Id of the event at `position`."""
    done: tuple[tuple[int, int], ...] = ()
    """Ranges (first, last) of positions beyond `position` that are done.

    A range may also cover positions of events that do not concern this subscription.
    """
    owner: str | None = None
    """The worker that has the cursor; None when no worker has it."""
    revision: int = 0
    """Revision of the code that took the cursor last, 0 when none has; code of a lower revision stands by."""
    state: str = ACTIVE
    reason: str | None = None
    """Why the subscription failed, or what an active subscription waits for."""
    waking: tuple[int, int] | None = None
    """Range of positions in which code of a higher revision still has to look at process instances.

    Instances whose last event is after the first position, and not after the second, remain to be looked at. Later
    events wake their instances as usual. None when no instance remains.
    """
    began: int = 0
    """The lowest position the cursor was ever put at: the subscription never followed events up to there."""
    tries: tuple[tuple[int, int], ...] = ()
    """Positions whose handlers block the event loop of a worker, and how many tries of each have blocked it.

    A try counts unless a worker saw it end in time. No position is done, except for events of the quarantine that are
    tried again.
    """
    origins: tuple[tuple[str, str], ...] = ()
    """For an inbox whose stream is gathered: (origin, when it was made) of each origin, as its last message says."""

    def encoded(self) -> bytes:
        """Return the stored JSON; fields that earlier releases do not know are left out where they are empty."""
        values = {name: value for name, value in asdict(self).items() if value or name not in _OPTIONAL}
        return orjson.dumps(values)

    @classmethod
    def decoded(cls, body: bytes) -> Cursor:
        """Return the cursor in a stored value, without fields of a later release; raises `CursorDamaged`."""
        try:
            values = cast("dict[str, Any]", orjson.loads(body))
            values["done"] = tuple((int(first), int(last)) for first, last in values["done"])
            values["tries"] = tuple((int(position), int(count)) for position, count in values.get("tries", ()))
            values["origins"] = tuple((str(name), str(made)) for name, made in values.get("origins", ()))
            if values.get("waking") is not None:
                after, until = values["waking"]
                values["waking"] = int(after), int(until)
            return cls(**declared_fields(cls, values))
        except (ValueError, TypeError, KeyError) as error:
            raise CursorDamaged(body, str(error)) from None

    @property
    def furthest(self) -> int:
        """The last position that is done, also beyond positions that are not."""
        return max([self.position, *(last for _, last in self.done)])

    def is_done(self, position: int) -> bool:
        """Return whether the event at this position is done."""
        return position <= self.position or any(first <= position <= last for first, last in self.done)

    def tries_of(self, position: int) -> int:
        """Return how many tries of the event at this position blocked the event loop, as `tries` counts them."""
        return dict(self.tries).get(position, 0)

    @property
    def blocking(self) -> str | None:
        """Which handler calls block the event loop, in one sentence; None if none is known."""
        if not self.tries:
            return None
        position, count = self.tries[-1]
        what = "a try" if count == 1 else f"{count} tries"
        others = f" (and at {len(self.tries) - 1} more)" if len(self.tries) > 1 else ""
        return (
            f"its handler blocked the event loop in {what} at position {position:,}{others}. Call what blocks with "
            "`await asyncio.to_thread(…)`"
        )

    def first_open(self, position: int) -> int:
        """Return the first position from this one on that is not done."""
        position = max(position, self.position + 1)
        for first, last in sorted(self.done):
            if first <= position <= last:
                position = last + 1
        return position

    def is_free(self, revision: int, owner: str, *, silent: bool, failed_at: int) -> bool:
        """Return whether a process may take the cursor: it has no owner, or its owner has gone silent.

        A cursor that failed in another process is tried once in this process too, but not when this process already
        failed at the same position (`failed_at`).
        """
        if (
            self.state not in TAKE.states
            or self.revision > revision
            or (self.state == FAILED and self.position == failed_at)
        ):
            return False
        return self.owner in (None, owner) or silent

    def refusal_of(self, revision: int) -> str | None:
        """Return why code of this revision does not take the cursor, and the ways out; None unless it is too low."""
        if self.revision <= revision or self.state not in TAKE.states:
            return None
        return (
            f"revision {self.revision} of its code had it last, and workers of revision {revision} stand by. Start "
            f"workers of the release with revision {self.revision}. Or, to go on with the code of revision {revision}, "
            f"declare that with revision={self.revision + 1}."
        )

    def taken(self, owner: str, revision: int) -> Cursor:
        """Return the cursor with this owner and revision.

        A higher revision of a process may define other steps and deadlines for the instances that wait. So it looks at
        all instances again, from `began` on, even where an earlier revision had not finished looking. When no revision
        has run yet, no instance waits.
        """
        is_higher = self.kind == PROCESS and 0 < self.revision < revision
        waking = (self.began, self.furthest) if is_higher else self.waking
        reason = self.reason if self.state == ACTIVE else None  # only progress clears the reason to wait
        return replace(
            self, owner=owner, revision=revision, state=TAKE.states[self.state], reason=reason, waking=waking
        )

    def moved(
        self,
        position: int,
        event_id: str,
        done: tuple[tuple[int, int], ...],
        waking: tuple[int, int] | None = None,
        reason: str | None = None,
        retried: Container[int] = (),
    ) -> Cursor:
        """Return the cursor at another position, with a reason to wait; tries of done events go, unless `retried`."""
        moved = replace(self, position=position, event_id=event_id, done=done, waking=waking)
        if self.tries:
            tries = tuple(tried for tried in self.tries if tried[0] in retried or not moved.is_done(tried[0]))
            moved = replace(moved, tries=tries)
        return moved.waiting(reason)

    def tried(self, position: int, number: int) -> Cursor:
        """Return the cursor with at least this number of tries at a position; 0, for deadlines, is not counted."""
        if not position or self.tries_of(position) >= number:
            return self
        return replace(self, tries=(*self.untried({position}).tries, (position, number)))

    def untried(self, positions: Container[int]) -> Cursor:
        """Return the cursor without the tries of these positions."""
        return replace(self, tries=tuple(tried for tried in self.tries if tried[0] not in positions))

    def waiting(self, reason: str | None) -> Cursor:
        """Return the cursor with a reason to wait, which passes by itself, cut to 2,000 characters; None clears it."""
        return replace(self, reason=None if reason is None else with_escapes(reason[:_REASON_MAX]))

    def released(self) -> Cursor:
        """Return the cursor without an owner, so that another worker can take it at once."""
        return replace(self, owner=None)

    def failed(self, reason: str) -> Cursor:
        """Return the cursor as failed, with 2,000 characters of the reason; a next session calls its handler again."""
        return replace(self, owner=None, state=FAILED, reason=with_escapes(reason[:_REASON_MAX]), tries=())

    def paused(self) -> Cursor:
        """Return the cursor as paused: no worker takes it until it is resumed."""
        return self._deposed(PAUSE_CURSOR)

    def resumed(self) -> Cursor:
        """Return a paused cursor as active and without tries; any other cursor is returned unchanged."""
        return replace(self._deposed(RESUME_AS[ACTIVE]), tries=()) if self.state == PAUSED else self

    def decided(self) -> Cursor:
        """Return the cursor after somebody resolved a quarantined event; the next session reads the quarantine anew."""
        return self._deposed(SET_CURSOR)

    def set_to(self, log: str, position: int, event_id: str) -> Cursor:
        """Return the cursor at a position that an operator chose, perhaps in another log; a paused cursor stays so."""
        began = min(self.began, position)
        waking = self.waking if log == self.log or self.waking is None else (began, position)
        moved = replace(self, log=log, position=position, event_id=event_id, done=(), waking=waking, began=began)
        moved = replace(moved, tries=())
        return moved._deposed(SET_CURSOR)

    def divided(self, name: str, revision: int, *, paused: bool) -> Cursor:
        """Return the cursor of one partition of a new division, at this position and without an owner."""
        state = PAUSED if paused else ACTIVE
        return replace(self, name=name, revision=revision, owner=None, done=(), state=state, reason=None, tries=())

    def _deposed(self, transition: Transition) -> Cursor:
        """Return the cursor after a transition, without an owner and a reason."""
        return replace(self, owner=None, state=transition.states[self.state], reason=None)


def declared_fields(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored values that the dataclass has fields for; a later release may have stored more."""
    return {field.name: values[field.name] for field in fields(cls) if field.name in values}
