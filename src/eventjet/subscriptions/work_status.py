"""`WorkStatus`: the status of one subscription, its condition in one word, and remarks about it. PURE.

`eventjet status`, `eventjet doctor` and the console say the same words, since they all ask `WorkStatus.condition`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from eventjet.domain.position import BUILDING, FAILED, NEW, PAUSED, RETIRED
from eventjet.findings import Level
from eventjet.text import counted, duration, in_location

PROJECTION = "projection"
BEHIND_S = 2.0
"""Age in seconds of the oldest event that is not done, up to which a subscription keeps up."""
LAG_MAX_S = 60.0
"""Age in seconds of the oldest event that is not done, above which a lag that does not shrink is a warning."""
_PACE_S = 10.0
"""The time over which pace and trend are measured, in seconds."""


@dataclass(frozen=True, slots=True)
class Condition:
    """How a subscription does: a word, and how much it should worry an operator."""

    word: str
    level: Level


@dataclass(frozen=True, slots=True)
class WorkStatus:
    """The status of one projection at one revision, or of one reactor partition, process, publication or inbox."""

    name: str
    revision: int
    state: str
    position: int
    """Position up to which events are in the rows, or done."""
    log_position: int
    """The log's last position; 0 when it is not known."""
    lag_events: int
    """Number of positions that are still to come."""
    lag_s: float | None = None
    """Age in seconds of the oldest event that is not done yet; None when unknown."""
    owner: str | None = None
    """The worker that has the lease or cursor now."""
    generation: int = 1
    """Number of rebuilds swapped in, plus 1."""
    reason: str | None = None
    """Why it failed or what it waits for."""
    declared: bool = True
    """Whether the app still declares this revision; no worker advances a revision that no process declares."""
    location: str = ""
    """The table slot: empty for the declared tables, which readers see; else a schema, or a suffix on SQLite."""
    lost_owner: str | None = None
    """The last worker, if it did not release its lease or cursor: it was killed, stopped or cut off."""
    lost_s: float | None = None
    """Seconds since the lost owner was last seen; None where the database's clock has been set back since."""
    quarantined: int = 0
    """Number of quarantined events, which wait for a decision or for a worker that tries them again."""
    events_per_s: float | None = None
    """How many positions it advances per second; None when only one snapshot was taken."""
    lag_per_s: float | None = None
    """How many positions the lag grows per second, negative while it shrinks; None when only one snapshot was taken."""
    eta_s: float | None = None
    """Seconds until it has caught up with the growing log; None when it will not at this pace."""
    kind: str = PROJECTION
    """`projection`, `reactor`, `process`, `publication` or `inbox`."""
    rebuilding: bool = False
    """Whether a rebuild or a verification of this revision runs."""

    @property
    def condition(self) -> Condition:
        """How the subscription does: the first of these conditions that is true."""
        lags = self.lag_events > 0
        if self.state == RETIRED:
            return Condition("retired", Level.FAULT if self.declared else Level.NOTE)
        if self.state == FAILED:
            return _REBUILDING if self.rebuilding else Condition("stopped", Level.FAULT)
        if self.state == PAUSED:
            return Condition("paused", Level.WARNING if lags else Level.NOTE)
        if self.state == NEW and self.kind != PROJECTION:
            return Condition("not begun", Level.FAULT)
        if self.owner is None:
            return self._without_worker
        condition = self._with_worker
        if self.quarantined and condition.level is Level.OK:
            return Condition("quarantined", Level.WARNING)
        return condition

    @property
    def _without_worker(self) -> Condition:
        if not self.declared:
            return Condition("not declared", Level.NOTE)
        if self.rebuilding:
            return _REBUILDING
        if self.reason and not self.lost_owner:
            return Condition("waiting", Level.WARNING)
        return Condition("no worker", Level.WARNING if self.lag_events or self.lost_owner else Level.NOTE)

    @property
    def _with_worker(self) -> Condition:
        if self.reason and not self.location:
            return Condition("waiting", Level.WARNING)
        if self.position and not self.log_position:
            return Condition("lag unknown", Level.UNKNOWN)
        trend = self.lag_per_s or 0.0
        if self.lag_events and (self.lag_s is None or self.lag_s > BEHIND_S):
            if trend > 0:
                return Condition("falling behind", Level.WARNING)
            if self.state == BUILDING:
                return Condition("building", Level.OK if trend < 0 else Level.NOTE)
            if trend < 0:
                return Condition("catching up", Level.OK)
            return Condition("behind", Level.WARNING if (self.lag_s or 0.0) > LAG_MAX_S else Level.NOTE)
        return Condition("standing by", Level.NOTE) if self.location else Condition("working", Level.OK)

    def remarks(self) -> Iterator[str]:
        """Yield what has no column in a table, one sentence each, without the name."""
        if self.quarantined:
            yield f"{counted(self.quarantined, 'event')} quarantined; see `eventjet quarantine list {self.name}`"
        if self.reason:
            yield self.reason
        if self.lost_owner:
            since = "since the database's clock was set back" if self.lost_s is None else f"for {duration(self.lost_s)}"
            yield f"its worker {self.lost_owner} has not been seen {since}; none has taken over yet"
        if self.rebuilding:
            yield "a rebuild or a verification of it is running"
        if self.location:
            yield f"its tables are inactive, {in_location(self.location)}, and not what readers see"
        if self.state == RETIRED and self.declared:
            yield "its tables were dropped; `eventjet init` makes them anew, empty"
        elif self.state == RETIRED:
            yield "its tables were dropped, and nothing is left of it but this line"
        elif not self.declared and self.owner is not None:
            yield "the app does not declare it, and a worker with other code advances it now; leave it to that"
        elif not self.declared:
            is_projection = self.kind == PROJECTION
            drop = f"db unused --drop {self.name}:{self.revision}" if is_projection else f"cursor drop {self.name}"
            yield (
                f"the app does not declare it, so only workers with other code advance it; `eventjet {drop}` removes it"
            )


_REBUILDING = Condition("rebuilding", Level.NOTE)


def labels(statuses: Sequence[WorkStatus]) -> list[str]:
    """Return a label for each status: its name, with the revision where the list has several of that name."""
    revisions = Counter(status.name for status in statuses)
    return [
        f"{status.name} revision {status.revision}" if revisions[status.name] > 1 else status.name
        for status in statuses
    ]


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """The status of all subscriptions at one moment."""

    at: float
    """Time of the snapshot in seconds, by this process's monotonic clock."""
    projections: list[WorkStatus]


class StatusHistory:
    """The snapshots of the last seconds, from which pace and trend are measured."""

    def __init__(self, window_s: float = _PACE_S) -> None:
        self._window_s = window_s
        self._snapshots: deque[StatusSnapshot] = deque()

    def add(self, snapshot: StatusSnapshot) -> None:
        """Add a snapshot, and forget those that are too old; at least two are kept."""
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[1].at < snapshot.at - self._window_s:
            self._snapshots.popleft()

    @property
    def last(self) -> StatusSnapshot | None:
        return self._snapshots[-1] if self._snapshots else None

    def statuses(self) -> list[WorkStatus]:
        """Return the newest statuses, with pace and trend over the last ten seconds; empty without a snapshot."""
        if not self._snapshots:
            return []
        *earlier, last = self._snapshots
        recent = [snapshot for snapshot in earlier if snapshot.at >= last.at - _PACE_S]
        # Without a recent snapshot an older one is compared.
        before = (recent or earlier[-1:] or [last])[0]
        return paced(before, last)

    def lags(self, name: str, revision: int) -> list[tuple[float, int]]:
        """Return (time of the snapshot, lag in positions) of one subscription, oldest first."""
        return [
            (snapshot.at, status.lag_events)
            for snapshot in self._snapshots
            for status in snapshot.projections
            if (status.name, status.revision) == (name, revision)
        ]


def paced(before: StatusSnapshot, after: StatusSnapshot) -> list[WorkStatus]:
    """Return the later snapshot's statuses, with pace, trend and time left measured from the earlier snapshot."""
    previous = {(status.name, status.revision, status.generation): status for status in before.projections}
    return [
        _paced(status, previous.get((status.name, status.revision, status.generation)), after.at - before.at)
        for status in after.projections
    ]


def _paced(status: WorkStatus, previous: WorkStatus | None, seconds: float) -> WorkStatus:
    if seconds <= 0 or previous is None or status.position < previous.position:
        return replace(status, eta_s=None if status.lag_events else 0.0)
    pace = (status.position - previous.position) / seconds
    trend = max(0, status.log_position - previous.log_position) / seconds - pace
    eta_s = status.lag_events / -trend if trend < 0 else None
    return replace(status, events_per_s=pace, lag_per_s=trend, eta_s=eta_s if status.lag_events else 0.0)
