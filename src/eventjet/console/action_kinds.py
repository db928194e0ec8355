"""The kinds of actions: the preview of each in plain words, and the operation that carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from eventjet.archive.reading import folder_of
from eventjet.console.actions import POSITIONS_MAX, Action, ActionContext, ActionRequest, Preview
from eventjet.console.jobs import BulkJob, Kind
from eventjet.errors import UsageError
from eventjet.operations import actions
from eventjet.operations.actions import ActionRecord
from eventjet.operations.quarantine import Quarantine, quarantine_page
from eventjet.operations.reports import preview_lines
from eventjet.projections.app_ref import projections_of
from eventjet.rebuild import EngineOptions, preview
from eventjet.rebuild.job import STOP_TIMEOUT_S
from eventjet.subscriptions.status import PROJECTION, WorkStatus, status
from eventjet.subscriptions.supervisor import chosen_of
from eventjet.text import counted, cut

_NAMED_MAX = 20
"""The most positions that a text lists."""


def _check_work(context: ActionContext, wanted: ActionRequest) -> None:
    if not wanted.names:
        raise UsageError("Name what to act on.")
    chosen = chosen_of(context.sources.app, wanted.names)
    if wanted.revision is not None and (len(chosen.projections) != 1 or chosen.followers):
        raise UsageError("A revision is about one projection. Name one.")


def _check_verdict(context: ActionContext, wanted: ActionRequest) -> None:
    _check_work(context, wanted)
    if len(wanted.names) != 1:
        raise UsageError("A verdict is about one quarantine. Name one.")
    if not wanted.positions:
        raise UsageError("Choose the events that the verdict is about.")


def _check_job(context: ActionContext, wanted: ActionRequest) -> None:
    if not wanted.names:
        raise UsageError("Choose at least one projection.")
    projections_of(context.sources.app, wanted.names)
    if wanted.from_archive:
        folder_of(wanted.from_archive)


def _check_promotion(context: ActionContext, wanted: ActionRequest) -> None:
    if len(wanted.names) != 1:
        raise UsageError("One projection is promoted at a time. Name one.")
    projections_of(context.sources.app, wanted.names)


def _check_cancel(_context: ActionContext, wanted: ActionRequest) -> None:
    if not wanted.job:
        raise UsageError("Name the job to cancel.")


async def _statuses(context: ActionContext, wanted: ActionRequest) -> tuple[list[WorkStatus], str]:
    """Return (statuses of the requested names, why they are not known)."""
    all_statuses, fault = await _all_statuses(context)
    app = context.sources.app
    chosen = chosen_of(app, wanted.names)
    pairs = {(projection.name, wanted.revision or projection.revision) for projection in chosen.projections}
    followers = {follower.name for follower in chosen.followers}
    statuses = [
        work
        for work in all_statuses
        if (work.kind == PROJECTION and (work.name, work.revision) in pairs)
        or (work.kind != PROJECTION and work.name in followers)
    ]
    return statuses, fault


async def _all_statuses(context: ActionContext) -> tuple[list[WorkStatus], str]:
    """Return (all statuses as of now, why they are not known).

    Those of the poller may be a second old, from before an action.
    """
    sources = context.sources
    seen = await sources.see("The server or the database", partial(status, sources.app, sources.settings))
    return seen.value or [], seen.fault


def _facts(found: Sequence[WorkStatus]) -> list[tuple[str, str]]:
    return [(_label(work), _state_line(work)) for work in found]


def _label(one: WorkStatus) -> str:
    return f"{one.name} revision {one.revision}" if one.kind == PROJECTION else f"{one.kind} {one.name}"


def _state_line(one: WorkStatus) -> str:
    works = f"the worker {one.owner} works on it" if one.owner else "no worker works on it"
    return f"{one.state} at position {one.position:,}, {counted(one.lag_events, 'event')} behind; {works}"


async def _preview_pause(context: ActionContext, wanted: ActionRequest) -> Preview:
    statuses, fault = await _statuses(context, wanted)
    names = " ".join(wanted.names)
    says: list[str] = []
    if any(work.kind == PROJECTION for work in statuses):
        says.append("The worker stops before its next commit and stands by.")
        says.append("Readers go on seeing the rows as they are then, and none that is newer.")
        says.append("A rebuild may go on; what it swaps in stays paused.")
    if any(work.kind != PROJECTION for work in statuses):
        says.append("The worker stops before its next event. Nothing is lost; what events lead to happens later.")
    says.append(f"It stays so until somebody resumes it, here or with `eventjet resume {names}`.")
    paused = bool(statuses) and all(work.state == "paused" for work in statuses)
    return Preview(says, _facts(statuses), "It is paused already." if paused else "", fault)


async def _preview_resume(context: ActionContext, wanted: ActionRequest) -> Preview:
    statuses, fault = await _statuses(context, wanted)
    behind = sum(work.lag_events for work in statuses)
    says = [
        f"It goes on from where it stopped, {counted(behind, 'event')} behind the log.",
        "A worker that stands by takes it at its next look; where none runs, the next one that is started does.",
    ]
    paused = not statuses or any(work.state == "paused" for work in statuses)
    return Preview(says, _facts(statuses), "" if paused else "It is not paused.", fault)


async def _pause(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    app, settings = context.sources.app, context.sources.settings
    changes = await actions.pause(app, settings, wanted.names, wanted.revision)
    return "\n".join(actions.paused_text(app, change) for change in changes)


async def _resume(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    app, settings = context.sources.app, context.sources.settings
    changes = await actions.resume(app, settings, wanted.names, wanted.revision)
    return "\n".join(actions.resumed_text(app, change) for change in changes)


async def _preview_verdict(
    context: ActionContext, wanted: ActionRequest, says: Callable[[Quarantine, int], list[str]]
) -> Preview:
    (name,) = wanted.names
    seen = await context.sources.see(
        "The quarantine", partial(quarantine_page, context.sources, name, limit=POSITIONS_MAX, after=0)
    )
    quarantine = Quarantine(context.sources.app, context.sources.settings, name)
    if seen.value is None:
        return Preview(says(quarantine, 0), [("events", _positions(wanted.positions))], fault=seen.fault)
    quarantined = {event.position: event for event in seen.value.events if event.revision == seen.value.revision}
    chosen = [quarantined[position] for position in wanted.positions if position in quarantined]
    behind = sum(event.blocked for event in chosen)
    missing = [position for position in wanted.positions if position not in quarantined]
    facts = [("events", _positions(wanted.positions)), ("events that wait behind them", f"{behind:,}")]
    facts += [(f"position {event.position}", cut(event.reason, 200)) for event in chosen[:_NAMED_MAX] if event.reason]
    refusal = ""
    if missing and not seen.value.is_cut:
        refusal = f"Not parked any more: {_positions(missing)}. Go back and choose again."
    return Preview(says(quarantine, behind), facts, refusal)


def _retry_says(_quarantine: Quarantine, behind: int) -> list[str]:
    return [
        "A worker tries these events again, and then those that wait behind them.",
        "One that fails again is parked again, with its new reason.",
        f"{counted(behind, 'event')} wait behind them." if behind != 1 else "1 event waits behind them.",
    ]


def _drop_says(quarantine: Quarantine, behind: int) -> list[str]:
    goes = "1 event that waits behind them goes" if behind == 1 else f"{behind:,} events that wait behind them go"
    return [
        f"These events are given up for good: they are never taken. {quarantine.drop_effect}",
        f"{goes} on.",
        "This cannot be taken back. The events stay in the log.",
    ]


async def _retry(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    return await _decided(context, wanted, lambda quarantine: quarantine.retry(wanted.positions))


async def _drop(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    return await _decided(context, wanted, lambda quarantine: quarantine.drop(wanted.positions))


async def _decided(context: ActionContext, wanted: ActionRequest, decide: Callable[[Quarantine], list[int]]) -> str:
    (name,) = wanted.names
    quarantine = Quarantine(context.sources.app, context.sources.settings, name)
    decided = await asyncio.to_thread(decide, quarantine)
    return f"The verdict on {_positions(decided)} is given."


def _positions(positions: Sequence[int]) -> str:
    listed = ", ".join(f"{position:,}" for position in positions[:_NAMED_MAX])
    rest = f" and {len(positions) - _NAMED_MAX:,} more" if len(positions) > _NAMED_MAX else ""
    return f"position{'' if len(positions) == 1 else 's'} {listed}{rest}"


async def _preview_rebuild(context: ActionContext, wanted: ActionRequest) -> Preview:
    """Preview a rebuild with the plan that `eventjet rebuild --dry-run` shows."""
    sources = context.sources
    look = partial(
        preview,
        sources.app,
        wanted.names,
        sources.settings,
        engine=EngineOptions(wanted.engine),
        from_archive=wanted.from_archive or None,
    )
    seen = await sources.see("The plan", look)
    says = [
        "The read model is made again from the log beside the live one, while workers, commands and readers go on.",
        "Then it is swapped in, complete.",
        "Cancelled, or after a fault anywhere, the live one stays as it is.",
    ]
    if seen.value is None:
        return Preview(says, fault=seen.fault)
    lines = list(preview_lines(seen.value))[:-1]
    facts = [("plan", line) for line in lines if not line.startswith("Refused: ")]
    return Preview(says, facts, "\n".join(seen.value.refusals))


async def _preview_verify(_context: ActionContext, wanted: ActionRequest) -> Preview:
    in_turn = ", one after the other" if len(wanted.names) > 1 else ""
    return Preview(
        [
            f"The read model is compared with the log, row by row{in_turn}: for that it is made again aside.",
            "The live one is only read, and nothing is changed. Workers, commands and readers go on.",
        ]
    )


async def _job(kind: Kind, context: ActionContext, wanted: ActionRequest, begun: ActionRecord) -> str:
    job = BulkJob(begun.id, kind, wanted.names, wanted.engine, wanted.from_archive, begun.actor)
    return await context.jobs.run(job)


async def _preview_promote(context: ActionContext, wanted: ActionRequest) -> Preview:
    (resolved,) = projections_of(context.sources.app, wanted.names)
    all_statuses, fault = await _all_statuses(context)
    statuses = [work for work in all_statuses if work.name == resolved.name and work.kind == PROJECTION]
    holder = next((work for work in statuses if not work.location and work.revision != resolved.revision), None)
    declared = next((work for work in statuses if work.revision == resolved.revision), None)
    tables = ", ".join(table.name for table in resolved.tables)
    says = [f"Revision {resolved.revision}, which this app declares, gets {tables}: readers see its rows from then on."]
    if holder is not None:
        says.append(
            f"The tables of revision {holder.revision} go aside and are kept; promoting that one brings it back."
        )
    says.append("It is refused while it lacks events that readers see already.")
    facts = [
        (_label(work), f"{_state_line(work)}; {'aside' if work.location else 'what readers see'}") for work in statuses
    ]
    refusal = ""
    if declared is not None and declared.state != "new" and not declared.location:
        refusal = f"Revision {resolved.revision} is what readers see already."
    return Preview(says, facts, refusal, fault)


async def _promote(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    (resolved,) = projections_of(context.sources.app, wanted.names)
    promoted = await asyncio.to_thread(actions.promote, context.sources.settings, resolved)
    return actions.promoted_text(resolved, promoted)


async def _preview_cancel(context: ActionContext, wanted: ActionRequest) -> Preview:
    job = context.jobs.get(wanted.job)
    says = [
        f"It stops within {STOP_TIMEOUT_S:g} s, and what it has begun is cleared away. No live read model is changed."
    ]
    if job is None or not job.is_running:
        return Preview(says, refusal=_NOT_RUNNING)
    return Preview(says, [("job", f"{job.kind} of {', '.join(job.names)}, begun by {job.actor or 'nobody named'}")])


_NOT_RUNNING = "It does not run in this console: it has ended, or another console runs it."


async def _cancel(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    job = context.jobs.get(wanted.job)
    if job is None or not job.is_running or not context.cancel(wanted.job):
        raise UsageError(_NOT_RUNNING)
    return f"The {job.kind} of {', '.join(job.names)} was told to stop."


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("pause", "Pause", _check_work, _preview_pause, _pause),
        Action("resume", "Resume", _check_work, _preview_resume, _resume),
        Action("retry", "Retry", _check_verdict, partial(_preview_verdict, says=_retry_says), _retry),
        Action("drop", "Drop", _check_verdict, partial(_preview_verdict, says=_drop_says), _drop, is_harm=True),
        Action("rebuild", "Rebuild", _check_job, _preview_rebuild, partial(_job, "rebuild")),
        Action("verify", "Verify", _check_job, _preview_verify, partial(_job, "verify")),
        Action("promote", "Promote", _check_promotion, _preview_promote, _promote),
        Action("cancel", "Cancel", _check_cancel, _preview_cancel, _cancel, is_harm=True),
    )
}
"""The kinds of actions by name."""
