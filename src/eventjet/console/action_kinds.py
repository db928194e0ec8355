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
    every, fault = await _all_statuses(context)
    app = context.sources.app
    chosen = chosen_of(app, wanted.names)
    pairs = {(one.name, wanted.revision or one.revision) for one in chosen.projections}
    followers = {one.name for one in chosen.followers}
    found = [
        one
        for one in every
        if (one.kind == PROJECTION and (one.name, one.revision) in pairs)
        or (one.kind != PROJECTION and one.name in followers)
    ]
    return found, fault


async def _all_statuses(context: ActionContext) -> tuple[list[WorkStatus], str]:
    """Return (all statuses as of now, why they are not known).

    Those of the poller may be a second old, from before an action.
    """
    sources = context.sources
    seen = await sources.see("The server or the database", partial(status, sources.app, sources.settings))
    return seen.value or [], seen.fault


def _facts(found: Sequence[WorkStatus]) -> list[tuple[str, str]]:
    return [(_label(one), _state_line(one)) for one in found]


def _label(one: WorkStatus) -> str:
    return f"{one.name} revision {one.revision}" if one.kind == PROJECTION else f"{one.kind} {one.name}"


def _state_line(one: WorkStatus) -> str:
    works = f"the worker {one.owner} works on it" if one.owner else "no worker works on it"
    return f"{one.state} at position {one.position:,}, {counted(one.lag_events, 'event')} behind; {works}"


async def _preview_pause(context: ActionContext, wanted: ActionRequest) -> Preview:
    found, fault = await _statuses(context, wanted)
    names = " ".join(wanted.names)
    says: list[str] = []
    if any(one.kind == PROJECTION for one in found):
        says.append("The worker stops before its next commit and stands by.")
        says.append("Readers go on seeing the rows as they are then, and none that is newer.")
        says.append("A rebuild may go on; what it swaps in stays paused.")
    if any(one.kind != PROJECTION for one in found):
        says.append("The worker stops before its next event. Nothing is lost; what events lead to happens later.")
    says.append(f"It stays so until somebody resumes it, here or with `eventjet resume {names}`.")
    paused = bool(found) and all(one.state == "paused" for one in found)
    return Preview(says, _facts(found), "It is paused already." if paused else "", fault)


async def _preview_resume(context: ActionContext, wanted: ActionRequest) -> Preview:
    found, fault = await _statuses(context, wanted)
    behind = sum(one.lag_events for one in found)
    says = [
        f"It goes on from where it stopped, {counted(behind, 'event')} behind the log.",
        "A worker that stands by takes it at its next look; where none runs, the next one that is started does.",
    ]
    paused = not found or any(one.state == "paused" for one in found)
    return Preview(says, _facts(found), "" if paused else "It is not paused.", fault)


async def _pause(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    app, settings = context.sources.app, context.sources.settings
    done = await actions.pause(app, settings, wanted.names, wanted.revision)
    return "\n".join(actions.paused_text(app, one) for one in done)


async def _resume(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    app, settings = context.sources.app, context.sources.settings
    done = await actions.resume(app, settings, wanted.names, wanted.revision)
    return "\n".join(actions.resumed_text(app, one) for one in done)


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
    parked = {one.position: one for one in seen.value.events if one.revision == seen.value.revision}
    chosen = [parked[position] for position in wanted.positions if position in parked]
    behind = sum(one.blocked for one in chosen)
    gone = [position for position in wanted.positions if position not in parked]
    facts = [("events", _positions(wanted.positions)), ("events that wait behind them", f"{behind:,}")]
    facts += [(f"position {one.position}", cut(one.reason, 200)) for one in chosen[:_NAMED_MAX] if one.reason]
    refusal = ""
    if gone and not seen.value.is_cut:
        refusal = f"Not parked any more: {_positions(gone)}. Go back and choose again."
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
    done = await asyncio.to_thread(decide, quarantine)
    return f"The verdict on {_positions(done)} is given."


def _positions(positions: Sequence[int]) -> str:
    named = ", ".join(f"{one:,}" for one in positions[:_NAMED_MAX])
    more = f" and {len(positions) - _NAMED_MAX:,} more" if len(positions) > _NAMED_MAX else ""
    return f"position{'' if len(positions) == 1 else 's'} {named}{more}"


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
    told = list(preview_lines(seen.value))[:-1]
    facts = [("plan", line) for line in told if not line.startswith("Refused: ")]
    return Preview(says, facts, "\n".join(seen.value.refusals))


async def _preview_verify(_context: ActionContext, wanted: ActionRequest) -> Preview:
    each = ", one after the other" if len(wanted.names) > 1 else ""
    return Preview(
        [
            f"The read model is compared with the log, row by row{each}: for that it is made again aside.",
            "The live one is only read, and nothing is changed. Workers, commands and readers go on.",
        ]
    )


async def _job(kind: Kind, context: ActionContext, wanted: ActionRequest, begun: ActionRecord) -> str:
    job = BulkJob(begun.id, kind, wanted.names, wanted.engine, wanted.from_archive, begun.actor)
    return await context.jobs.run(job)


async def _preview_promote(context: ActionContext, wanted: ActionRequest) -> Preview:
    (resolved,) = projections_of(context.sources.app, wanted.names)
    every, fault = await _all_statuses(context)
    each = [one for one in every if one.name == resolved.name and one.kind == PROJECTION]
    holder = next((one for one in each if not one.location and one.revision != resolved.revision), None)
    own = next((one for one in each if one.revision == resolved.revision), None)
    tables = ", ".join(table.name for table in resolved.tables)
    says = [f"Revision {resolved.revision}, which this app declares, gets {tables}: readers see its rows from then on."]
    if holder is not None:
        says.append(
            f"The tables of revision {holder.revision} go aside and are kept; promoting that one brings it back."
        )
    says.append("It is refused while it lacks events that readers see already.")
    facts = [(_label(one), f"{_state_line(one)}; {'aside' if one.location else 'what readers see'}") for one in each]
    refusal = ""
    if own is not None and own.state != "new" and not own.location:
        refusal = f"Revision {resolved.revision} is what readers see already."
    return Preview(says, facts, refusal, fault)


async def _promote(context: ActionContext, wanted: ActionRequest, _begun: ActionRecord) -> str:
    (resolved,) = projections_of(context.sources.app, wanted.names)
    done = await asyncio.to_thread(actions.promote, context.sources.settings, resolved)
    return actions.promoted_text(resolved, done)


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
    one.name: one
    for one in (
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
