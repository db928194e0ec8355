"""`Cursor`: how far something that follows the log has come, who moves it, and every change of that. PURE.

It lives at one key of a key-value stream and is only ever replaced by compare-and-set: whoever writes it names the
sequence that it read, and one who was fenced names an old one. So there is no epoch: the sequence is the fence.

Each cell says what the state becomes: `=` stays, `-` is refused and changes nothing.

| transition | active | paused | failed | whose |
|------------|--------|--------|--------|-------|
| take       | =      | -      | active | whoever finds it free |
| move       | =      | -      | -      | the owner's |
| release    | =      | -      | -      | the owner's |
| wait       | =      | -      | -      | the owner's: a reason, which goes as soon as it moves |
| fail       | failed | -      | -      | the owner's |
| pause      | paused | =      | paused | anybody's; the owner is fenced |
| resume     | -      | active | -      | anybody's |
| decide     | =      | =      | active | anybody's: a verdict on a parked event; the owner is fenced |
| set        | active | =      | active | anybody's: another position; the owner is fenced |
| divide     | =      | =      | active | `init`'s, `cursor set`'s: into another number of partitions |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

import orjson

from eventjet.errors import CursorDamaged

ACTIVE, PAUSED, FAILED = "active", "paused", "failed"
PROCESS = "process"
"""The kind of what waits: its instances are looked at by code of a higher revision."""
_REASON_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Cursor:
    """What is at the key of one name."""

    name: str
    kind: str
    """`reactor`, `process`, `publication` or `inbox`."""
    log: str
    """UUID of the log that it stands in."""
    position: int = 0
    """Everything up to here is done."""
    event_id: str = ""
    """Id of the event there."""
    done: tuple[tuple[int, int], ...] = ()
    """Ranges of positions beyond it that are done; between two neighbours may lie what does not concern it."""
    owner: str | None = None
    """The process that works on it, None when nobody does."""
    revision: int = 0
    """Of the code that took it last; older code stands by. 0 while none has."""
    state: str = ACTIVE
    reason: str | None = None
    """Why it failed, or what an active one waits for."""
    waking: tuple[int, int] | None = None
    """Of a process that code of a higher revision has taken: those whose last event is after the first position, and up
    to the second, are still to be looked at; what comes later is followed as ever. None for none."""
    began: int = 0
    """The first position that it was put at: it never followed anything up to there."""

    def encoded(self) -> bytes:
        """Without `waking` and `began` where there are none: releases that do not know them read the rest."""
        told = {name: value for name, value in asdict(self).items() if value or name not in ("waking", "began")}
        return orjson.dumps(told)

    @classmethod
    def decoded(cls, body: bytes) -> Cursor:
        """The cursor in a value; raises `CursorDamaged` for what is none. What a later release added is dropped."""
        try:
            told = cast("dict[str, Any]", orjson.loads(body))
            told["done"] = tuple((int(first), int(last)) for first, last in told["done"])
            if told.get("waking") is not None:
                after, until = told["waking"]
                told["waking"] = int(after), int(until)
            return cls(**known_fields(cls, told))
        except (ValueError, TypeError, KeyError) as error:
            raise CursorDamaged(body, str(error)) from None

    def is_done(self, position: int) -> bool:
        return position <= self.position or any(first <= position <= last for first, last in self.done)

    def first_open(self, position: int) -> int:
        """Return the first position from this one on that is not done."""
        position = max(position, self.position + 1)
        for first, last in sorted(self.done):
            if first <= position <= last:
                position = last + 1
        return position

    def is_free(self, revision: int, owner: str, *, silent: bool, failed_at: int) -> bool:
        """Whether a process may take it: nobody has it, or its owner has gone silent.

        What failed elsewhere is tried once here as well, but not where it `failed_at` this position in this process.
        """
        if self.state == PAUSED or self.revision > revision or (self.state == FAILED and self.position == failed_at):
            return False
        return self.owner in (None, owner) or silent

    # Transitions.

    def taken(self, owner: str, revision: int) -> Cursor:
        """A higher revision of a process may want other steps and deadlines of those that wait: from the first one on
        that was followed, whatever an earlier revision had come to. Where none has run, nothing waits for anything yet.
        """
        is_higher = self.kind == PROCESS and 0 < self.revision < revision
        waking = (self.began, self._reached) if is_higher else self.waking
        reason = self.reason if self.state == ACTIVE else None  # only work shows that nothing is in its way any more
        return replace(self, owner=owner, revision=revision, state=ACTIVE, reason=reason, waking=waking)

    @property
    def _reached(self) -> int:
        """The last position that something was done about."""
        return max([self.position, *(last for _, last in self.done)])

    def moved(
        self,
        position: int,
        event_id: str,
        done: tuple[tuple[int, int], ...],
        waking: tuple[int, int] | None = None,
        reason: str | None = None,
    ) -> Cursor:
        """`reason` is what some of it waits for meanwhile."""
        moved = replace(self, position=position, event_id=event_id, done=done, waking=waking)
        return moved.waiting(reason)

    def waiting(self, reason: str | None) -> Cursor:
        """It goes on by itself once what the reason says is over; None for nothing that it waits for."""
        return replace(self, reason=None if reason is None else reason[:_REASON_MAX])

    def released(self) -> Cursor:
        return replace(self, owner=None)

    def failed(self, reason: str) -> Cursor:
        return replace(self, owner=None, state=FAILED, reason=reason[:_REASON_MAX])

    def paused(self) -> Cursor:
        return replace(self, owner=None, state=PAUSED, reason=None)

    def resumed(self) -> Cursor:
        return replace(self, owner=None, state=ACTIVE, reason=None) if self.state == PAUSED else self

    def decided(self) -> Cursor:
        """Somebody decided about what is parked: whoever works on it looks anew."""
        state = self.state if self.state == PAUSED else ACTIVE
        return replace(self, owner=None, state=state, reason=None)

    def set_to(self, log: str, position: int, event_id: str) -> Cursor:
        state = self.state if self.state == PAUSED else ACTIVE
        began = min(self.began, position)
        waking = self.waking if log == self.log or self.waking is None else (began, position)
        moved = replace(self, log=log, position=position, event_id=event_id, done=(), waking=waking, began=began)
        return replace(moved, owner=None, state=state, reason=None)

    def divided(self, name: str, revision: int, *, paused: bool) -> Cursor:
        """One of another number of partitions, at this position, where nobody has it."""
        state = PAUSED if paused else ACTIVE
        return replace(self, name=name, revision=revision, owner=None, done=(), state=state, reason=None)


def known_fields(cls: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """What a class has fields for, of what was stored, perhaps by a later release."""
    return {one.name: told[one.name] for one in fields(cls) if one.name in told}
