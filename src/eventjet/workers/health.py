"""PURE: whether a process of workers does what it is there for, judged by successive looks at its projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eventjet.observability import names
from eventjet.observability.metrics import Sample
from eventjet.sql.checkpoint import ACTIVE, BUILDING, FAILED, NEW, PAUSED, RETIRED
from eventjet.workers.status import ProjectionStatus

_STATES = (NEW, BUILDING, ACTIVE, PAUSED, RETIRED, FAILED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `/healthz` answers."""

    healthy: bool
    reason: str | None
    """Why it is not healthy: of the first that is not."""
    projections: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "reason": self.reason, "projections": list(self.projections)}


@dataclass(frozen=True, slots=True)
class _Seen:
    status: ProjectionStatus
    moved_at: float
    """When it last moved or had nothing to do."""


@dataclass(frozen=True, slots=True)
class Health:
    """What the looks so far have shown; each look gives a new value, so that any thread may read the last."""

    owner: str
    """This process, as leases name it."""
    stalled_s: float
    began_at: float
    looked_at: float | None = None
    fault: str | None = None
    """Why the last look failed."""
    seen: Mapping[tuple[str, int], _Seen] | None = None

    def after(self, now: float, found: Sequence[ProjectionStatus]) -> Health:
        """With one more look, at the projections of this process."""
        before = self.seen or {}
        seen: dict[tuple[str, int], _Seen] = {}
        for one in found:
            last = before.get((one.name, one.revision))
            stands = last is not None and last.status.position == one.position and one.lag_events and self._ours(one)
            seen[one.name, one.revision] = _Seen(one, last.moved_at if last is not None and stands else now)
        return Health(self.owner, self.stalled_s, self.began_at, now, None, seen)

    def without(self, fault: str) -> Health:
        """With a look that failed."""
        return Health(self.owner, self.stalled_s, self.began_at, self.looked_at, fault, self.seen)

    def verdict(self, now: float) -> Verdict:
        """Healthy when every projection is kept, stands by elsewhere, or is paused; and looks succeed."""
        found = [self._judged(one, now) for one in (self.seen or {}).values()]
        reasons = [f"{one['name']}: {one['fault']}" for one in found if one["fault"]]
        silent_s = now - (self.began_at if self.looked_at is None else self.looked_at)
        if self.looked_at is None and silent_s <= self.stalled_s:
            reasons.insert(0, "starting" if self.fault is None else self.fault)
        elif silent_s > self.stalled_s:
            reasons.insert(0, f"nothing could be looked at for {silent_s:.0f} s: {self.fault or 'the process hangs'}")
        return Verdict(not reasons, reasons[0] if reasons else None, found)

    def samples(self, now: float) -> list[Sample]:
        """The gauges, of the last look."""
        found: list[Sample] = [(names.HEALTHY, (), int(self.verdict(now).healthy))]
        if self.looked_at is not None:
            found.append((names.LOOK_AGE, (), now - self.looked_at))
        for seen in (self.seen or {}).values():
            found += _gauges(seen.status, self.owner)
        log = max((seen.status.log_position for seen in (self.seen or {}).values()), default=None)
        return found if log is None else [*found, (names.LOG_POSITION, (), log)]

    def _judged(self, seen: _Seen, now: float) -> dict[str, Any]:
        one = seen.status
        fault: str | None = None
        stood_s = now - seen.moved_at
        if one.state == FAILED:
            fault = f"failed: {one.reason or 'without a reason'}"
        elif one.lag_events and self._ours(one) and stood_s > self.stalled_s:
            fault = f"{one.lag_events} events behind at position {one.position} without progress for {stood_s:.0f} s"
            fault += f": {one.reason}" if one.reason else ""
        return {
            "name": one.name,
            "revision": one.revision,
            "state": one.state,
            "held": one.owner == self.owner,
            "position": one.position,
            "lag_events": one.lag_events,
            "lag_s": one.lag_s,
            "fault": fault,
        }

    def _ours(self, one: ProjectionStatus) -> bool:
        """Whether it is up to this process that it moves: nobody else holds it, and it may."""
        return one.state not in (PAUSED, RETIRED) and one.owner in (None, self.owner)


def _gauges(one: ProjectionStatus, owner: str) -> list[Sample]:
    own = (one.name, str(one.revision))
    found: list[Sample] = [
        (names.POSITION, own, one.position),
        (names.LAG_EVENTS, own, one.lag_events),
        (names.PARKED, own, one.parked),
        (names.HELD, own, int(one.owner == owner)),
        *((names.STATE, (*own, state), int(one.state == state)) for state in _STATES),
    ]
    return found if one.lag_s is None else [*found, (names.LAG_SECONDS, own, one.lag_s)]
