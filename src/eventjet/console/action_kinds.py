"""The kinds of actions: the preview of each in plain words, and the operation that carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from eventjet.console.actions import POSITIONS_MAX, Action, ActionRequest, Actions, Preview
from eventjet.console.jobs import Job, Kind
from eventjet.errors import UsageError
from eventjet.operations import actions as operations
from eventjet.operations.actions import ActionRecord
from eventjet.operations.quarantine import Quarantine
from eventjet.operations.reports import preview_lines
from eventjet.projections.app_ref import projections_of
from eventjet.rebuild import EngineOptions, preview
from eventjet.rebuild.job import STOP_TIMEOUT_S
from eventjet.subscriptions.status import status
from eventjet.subscriptions.supervisor import chosen_of
from eventjet.subscriptions.work_status import PROJECTION, WorkStatus
from eventjet.text import counted, cut

_NAMED_MAX = 20
"""The most positions that a text lists."""
_NOT_RUNNING = "It does not run in this console: it has ended, or another console runs it."


async def _statuses(actions: Actions) -> tuple[list[WorkStatus], str]:
    """Return (all statuses as of now, why they are not known); those of the poller may be from before an action."""
    sources = actions.sources
    result = await sources.attempt("The server or the database", status(sources.app, sources.settings))
    return result.value or [], result.fault


def _label(work: WorkStatus) -> str:
    return f"{work.name} revision {work.revision}" if work.kind == PROJECTION else f"{work.kind} {work.name}"


def _state_text(work: WorkStatus) -> str:
    worker = f"the worker {work.owner} works on it" if work.owner else "no worker works on it"
    return f"{work.condition.word} at position {work.position:,}, {counted(work.lag_events, 'event')} behind; {worker}"


async def _preview_pause(actions: Actions, request: ActionRequest, *, resume: bool) -> Preview:
    all_statuses, fault = await _statuses(actions)
    chosen = chosen_of(actions.sources.app, request.names)
    names = {(PROJECTION, resolved.name, request.revision or resolved.revision) for resolved in chosen.projections}
    names |= {("", follower.name, 0) for follower in chosen.followers}
    statuses = [
        work
        for work in all_statuses
        if ((PROJECTION, work.name, work.revision) if work.kind == PROJECTION else ("", work.name, 0)) in names
    ]
    facts = [(_label(work), _state_text(work)) for work in statuses]
    paused = [work.state == "paused" for work in statuses]
    if resume:
        behind = sum(work.lag_events for work in statuses)
        effects = [
            f"It goes on from where it stopped, {counted(behind, 'event')} behind the log.",
            "A worker that stands by takes it at its next look; where none runs, the next one that is started does.",
        ]
        return Preview(effects, facts, "It is not paused." if statuses and not any(paused) else "", fault)
    effects = list[str]()
    if any(work.kind == PROJECTION for work in statuses):
        effects.append("The worker stops before its next commit and stands by.")
        effects.append("Readers go on seeing the rows as they are then, and none that is newer.")
        effects.append("A rebuild may go on; what it swaps in stays paused.")
    if any(work.kind != PROJECTION for work in statuses):
        effects.append("The worker stops before its next event. Nothing is lost; what events lead to happens later.")
    resume_command = f"eventjet resume {' '.join(request.names)}"
    effects.append(f"It stays so until somebody resumes it, here or with `{resume_command}`.")
    return Preview(effects, facts, "It is paused already." if statuses and all(paused) else "", fault)


async def _pause(actions: Actions, request: ActionRequest, _record: ActionRecord, *, resume: bool) -> str:
    app, settings = actions.sources.app, actions.sources.settings
    change = operations.resume if resume else operations.pause
    changes = await change(app, settings, request.names, request.revision)
    return "\n".join(operations.change_text(app, change, resumed=resume) for change in changes)


async def _preview_decision(actions: Actions, request: ActionRequest, *, drop: bool) -> Preview:
    quarantine = Quarantine(actions.sources, request.names[0])
    result = await actions.sources.attempt("The quarantine", quarantine.listed(limit=POSITIONS_MAX))
    events, is_cut = result.value or ((), True)
    quarantined = {event.position: event for event in events if event.revision == quarantine.revision}
    chosen = [quarantined[position] for position in request.positions if position in quarantined]
    missing = [position for position in request.positions if position not in quarantined]
    behind = sum(event.blocked for event in chosen)
    if drop:
        followers = "1 event that waits" if behind == 1 else f"{behind:,} events that wait"
        effects = [
            f"These events are given up for good: they are never taken. {quarantine.drop_effect}",
            f"{followers} behind them {'goes' if behind == 1 else 'go'} on.",
            "This cannot be taken back. The events stay in the log.",
        ]
    else:
        effects = [
            "A worker tries these events again, and then those that wait behind them.",
            "One that fails again is quarantined again, with its new reason.",
            f"{counted(behind, 'event')} wait behind them." if behind != 1 else "1 event waits behind them.",
        ]
    facts = [("events", _positions(request.positions))]
    if result.value is not None:
        facts.append(("events that wait behind them", f"{behind:,}"))
    facts += [(f"position {event.position}", cut(event.reason, 200)) for event in chosen[:_NAMED_MAX] if event.reason]
    refusal = ""
    if missing and not is_cut:
        refusal = f"Not quarantined any more: {_positions(missing)}. Go back and choose again."
    return Preview(effects, facts, refusal, result.fault)


async def _decide(actions: Actions, request: ActionRequest, _record: ActionRecord, *, drop: bool) -> str:
    quarantine = Quarantine(actions.sources, request.names[0])
    positions = await (quarantine.drop if drop else quarantine.retry)(request.positions)
    return f"{'Dropped' if drop else 'To be tried again'}: {_positions(positions)}."


def _positions(positions: Sequence[int]) -> str:
    listed = ", ".join(f"{position:,}" for position in positions[:_NAMED_MAX])
    rest = f" and {len(positions) - _NAMED_MAX:,} more" if len(positions) > _NAMED_MAX else ""
    return f"position{'' if len(positions) == 1 else 's'} {listed}{rest}"


async def _preview_rebuild(actions: Actions, request: ActionRequest) -> Preview:
    """Preview a rebuild with the plan that `eventjet rebuild --dry-run` shows."""
    app, settings, engine = actions.sources.app, actions.sources.settings, EngineOptions(request.engine)
    look = preview(app, request.names, settings, engine=engine, from_archive=request.from_archive or None)
    result = await actions.sources.attempt("The plan", look)
    effects = [
        "The read model is made again from the log beside the live one, while workers, commands and readers go on.",
        "Then it is swapped in, complete.",
        "Cancelled, or after a fault anywhere, the live one stays as it is.",
    ]
    if result.value is None:
        return Preview(effects, fault=result.fault)
    lines = list(preview_lines(result.value))[:-1]
    facts = [("plan", line) for line in lines if not line.startswith("Refused: ")]
    return Preview(effects, facts, "\n".join(result.value.refusals))


async def _preview_verify(_actions: Actions, request: ActionRequest) -> Preview:
    in_turn = ", one after the other" if len(request.names) > 1 else ""
    return Preview(
        [
            f"The read model is compared with the log, row by row{in_turn}: for that a second table is made.",
            "The live one is only read, and nothing is changed. Workers, commands and readers go on.",
        ]
    )


async def _run_job(actions: Actions, request: ActionRequest, record: ActionRecord, *, kind: Kind) -> str:
    return await actions.jobs.run(
        Job(record.id, kind, request.names, request.engine, request.from_archive, record.actor)
    )


async def _preview_promote(actions: Actions, request: ActionRequest) -> Preview:
    (resolved,) = projections_of(actions.sources.app, request.names)
    all_statuses, fault = await _statuses(actions)
    statuses = [work for work in all_statuses if work.name == resolved.name and work.kind == PROJECTION]
    live = next((work for work in statuses if not work.location and work.revision != resolved.revision), None)
    declared = next((work for work in statuses if work.revision == resolved.revision), None)
    tables = ", ".join(table.name for table in resolved.tables)
    effects = [
        f"Revision {resolved.revision}, which this app declares, gets {tables}: readers see its rows from then on."
    ]
    if live is not None:
        effects.append(
            f"The tables of revision {live.revision} become inactive and are kept; promoting that one brings it back."
        )
    effects.append("It is refused while it lacks events that readers see already.")
    facts = [
        (_label(work), f"{_state_text(work)}; {'inactive' if work.location else 'what readers see'}")
        for work in statuses
    ]
    refusal = ""
    if declared is not None and declared.state != "new" and not declared.location:
        refusal = f"Revision {resolved.revision} is what readers see already."
    return Preview(effects, facts, refusal, fault)


async def _promote(actions: Actions, request: ActionRequest, _record: ActionRecord) -> str:
    (resolved,) = projections_of(actions.sources.app, request.names)
    promoted = await asyncio.to_thread(operations.promote, actions.sources.settings, resolved)
    return operations.promoted_text(resolved, promoted)


async def _preview_cancel(actions: Actions, request: ActionRequest) -> Preview:
    job = actions.jobs.get(request.job)
    effects = [
        f"It stops within {STOP_TIMEOUT_S:g} s, and what it has begun is cleared away. No live read model is changed."
    ]
    if job is None or not job.is_running:
        return Preview(effects, refusal=_NOT_RUNNING)
    return Preview(effects, [("job", f"{job.kind} of {', '.join(job.names)}, begun by {job.actor or 'nobody named'}")])


async def _cancel(actions: Actions, request: ActionRequest, _record: ActionRecord) -> str:
    job = actions.jobs.get(request.job)
    if job is None or not job.is_running or not actions.cancel(request.job):
        raise UsageError(_NOT_RUNNING)
    return f"The {job.kind} of {', '.join(job.names)} is stopping."


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("pause", "Pause", "work", partial(_preview_pause, resume=False), partial(_pause, resume=False)),
        Action("resume", "Resume", "work", partial(_preview_pause, resume=True), partial(_pause, resume=True)),
        Action("retry", "Retry", "quarantine", partial(_preview_decision, drop=False), partial(_decide, drop=False)),
        Action("drop", "Drop", "quarantine", partial(_preview_decision, drop=True), partial(_decide, drop=True), True),
        Action("rebuild", "Rebuild", "projections", _preview_rebuild, partial(_run_job, kind="rebuild")),
        Action("verify", "Verify", "projections", _preview_verify, partial(_run_job, kind="verify")),
        Action("promote", "Promote", "projection", _preview_promote, _promote),
        Action("cancel", "Cancel", "job", _preview_cancel, _cancel, is_harm=True),
    )
}
"""The kinds of actions by name."""
