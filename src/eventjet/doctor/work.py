"""PURE: what the status of one projection or follower means: does it stand, is somebody at it, do readers see it?"""

from __future__ import annotations

from eventjet.doctor.diagnosis import Diagnoses
from eventjet.findings import Level
from eventjet.sql.checkpoint import FAILED, NEW, PAUSED, RETIRED
from eventjet.subscriptions.status import PROJECTION, WorkStatus

LAG_MAX_S = 60.0
"""From here on it is told how far behind it is, though somebody works on it."""


def tell_work(told: Diagnoses, one: WorkStatus) -> None:
    """At least one thing."""
    name, is_projection = one.name, one.kind == PROJECTION
    called = name if is_projection else f"{one.kind} {name}"
    stale = "readers see what was true then" if is_projection else "what events lead to does not happen"
    if not one.declared:
        told.add(
            "cursor",
            Level.NOTE,
            f"{called} has a cursor at position {one.position:,}, and the app does not declare it",
            "its events are handled by nobody; a reactor under a new name can go on there",
            f"`eventjet cursor set NEW {one.position}`, or `eventjet cursor drop {name}`",
        )
        return
    before = len(told.found)
    if one.state == FAILED:
        fix = "`eventjet status` shows it again; a worker tries it when it starts"
        told.add("log", Level.FAULT, f"{called}: {one.reason or 'it failed'}", stale, fix)
    elif one.state == RETIRED:
        told.add("checkpoint", Level.FAULT, f"{called} revision {one.revision} was retired", stale, "`eventjet init`")
    elif not is_projection and one.state == NEW:
        told.add("cursor", Level.FAULT, f"{called} has no cursor", stale, "`eventjet init`")
    elif one.state == PAUSED:
        bad = Level.WARNING if one.lag_events else Level.NOTE
        fix = f"`eventjet resume {name}`"
        told.add("paused", bad, f"{called} is paused, {one.lag_events:,} events behind", stale, fix)
    else:
        _tell_worker(told, called, one, stale)
    if one.location:
        told.add(
            "revision",
            Level.WARNING,
            f"{called} revision {one.revision} is not what readers see: its rows are aside{_because(one)}",
            "they see an earlier revision until this one has caught up and taken over",
            f"`eventjet worker`, or `eventjet rebuild {name}`; then `eventjet db promote {name}` if it still stands "
            "aside",
        )
    if one.parked:
        told.add(
            "quarantine",
            Level.WARNING,
            f"{called} has {one.parked:,} parked",
            "they are in no read model, and later events of their aggregates wait behind them",
            f"`eventjet quarantine list {name}`",
        )
    if len(told.found) == before:
        told.ok("work", f"{called} stands at position {one.position:,}, kept by {one.owner}")


def _because(one: WorkStatus) -> str:
    """Why a revision could not take over, where its worker has noted that."""
    return f" ({one.reason.rstrip('.')})" if one.reason and one.owner else ""


def _tell_worker(told: Diagnoses, called: str, one: WorkStatus, stale: str) -> None:
    if one.lost_owner:
        since = "since the database's clock was set back" if one.lost_s is None else f"for {one.lost_s:,.0f} s"
        told.add(
            "lease",
            Level.WARNING,
            f"{called}: its worker {one.lost_owner} has not been seen {since}, and none has taken over",
            stale,
            f"`eventjet worker {one.name}`; a second one beside it takes over within seconds",
        )
    elif one.reason and (one.owner is None or not one.location):
        where = f"at position {one.position:,}, {one.lag_events:,} events behind"
        what = f"{called} waits {where}: {one.reason}"
        fix = f"Do what the reason says; a worker that runs tries again by itself, else `eventjet worker {one.name}`"
        told.add("waits", Level.WARNING, what, stale, fix)
    elif one.owner is None:
        bad = Level.WARNING if one.lag_events else Level.NOTE
        what = f"nobody works on {called}, {one.lag_events:,} events behind"
        told.add("worker", bad, what, stale, f"`eventjet worker {one.name}`")
    elif one.lag_s is not None and one.lag_s > LAG_MAX_S:
        what = f"{called} is {one.lag_events:,} events and {one.lag_s:,.0f} s behind"
        fix = "`eventjet status --watch` shows its pace"
        fix += f"; `eventjet rebuild {one.name}` is faster for many" if one.kind == PROJECTION else ""
        told.add("lag", Level.WARNING, what, stale, fix)
