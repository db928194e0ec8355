"""From a loaded shadow to the live read model: checked, caught up, swapped. Until the swap nothing live changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from eventjet import failpoints
from eventjet.errors import LogRolledBack, RebuildError, VerificationFailed
from eventjet.nats.api import stream_info
from eventjet.nats.connection import ask_once
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild.catchup import catching_up
from eventjet.rebuild.job import Job
from eventjet.rebuild.load import Part
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.shadow import Shadow, Swapped
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.exchange import NotNow
from eventjet.sql.quarantine_rows import Parked
from eventjet.workers.log_identity import check_log

PATIENCE_S = 60.0
"""How long a swap is tried while others hold the table."""

_BACKOFF_S = (0.05, 2.0)


class Follower(Protocol):
    """Brings a shadow further along the log."""

    def to(self, position: int) -> None:
        """Write what is missing up to a position."""
        ...


def check_loaded(shadow: Shadow[AnyResolved], plan: Plan, parts: Sequence[Part]) -> int:
    """Compare what was read, what was acknowledged and what is there; raises `VerificationFailed`."""
    name = shadow.resolved.name
    own = [part for part in parts if part.projection == name]
    events = sum(part.events for part in own)
    if events != plan.events:
        raise VerificationFailed(name, f"{events} events were folded, and the log holds {plan.events}")
    rows = sum(part.rows for part in own)
    found = shadow.count()
    if found != rows:
        raise VerificationFailed(name, f"{rows} rows were loaded, and the shadow holds {found}")
    return rows


def cut_over(shadow: Shadow[ResolvedProjection], job: Job, plan: Plan, parked: Sequence[Parked] = ()) -> Swapped:
    """Catch the finished shadow up and swap it in; raises `RebuildError` when that could not be done in time.

    `parked` is what could not be taken when it was loaded.
    """
    with catching_up(shadow, job, plan.first, plan.last, parked) as follower:
        return swap_in(shadow, follower, job)


def swap_in(shadow: Shadow[AnyResolved], follower: Follower, job: Job) -> Swapped:
    """As `cut_over`, with a follower that goes on where the shadow is."""
    log, watch = job.log, job.watch
    deadline = time.monotonic() + PATIENCE_S
    backoff_s = _BACKOFF_S[0]
    same_past = is_of_this_log(job, shadow.live_checkpoint())
    while True:
        with watch.phase("catch up"):
            state = ask_once(log.endpoint, stream_info(log.stream))
            if state.messages:
                follower.to(state.last)
            failpoints.reach("rebuild.caught_up")
        with watch.phase("swap"):
            failpoints.reach("rebuild.before_swap")
            try:
                swapped = shadow.swap(log.identity, follower.to if same_past else None)
                failpoints.reach("rebuild.after_swap")
                return swapped
            except NotNow as later:
                if time.monotonic() > deadline:
                    raise _no_swap(shadow, later) from later
        watch.wait(backoff_s)
        backoff_s = min(2 * backoff_s, _BACKOFF_S[1])


def is_of_this_log(job: Job, live: Checkpoint | None) -> bool:
    """Whether the live read model was made from this log, so that its position may not be fallen short of."""
    try:
        if live is not None:
            check_log(job.log.endpoint, job.log.stream, live)
    except LogRolledBack:
        return False
    return True


def _no_swap(shadow: Shadow[AnyResolved], later: NotNow) -> RebuildError:
    return RebuildError(
        f"The rebuilt {shadow.resolved.name!r} could not be swapped in within {PATIENCE_S:g} s: {later}. "
        "The live table is untouched. End the transactions that stay open on it, then run the rebuild again."
    )
