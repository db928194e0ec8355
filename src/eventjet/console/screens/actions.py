"""Actions and jobs: the confirmation of an action, the record of past ones, and running rebuilds and verifications."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from eventjet.console.access import form_of, visitor_of
from eventjet.console.actions import POSITIONS_MAX, ActionRequest, Actions
from eventjet.console.jobs import KEPT_MAX, RUNNING_MAX
from eventjet.console.live import stream_of
from eventjet.console.pages import linker, page, rendered
from eventjet.console.sources import Seen, Sources
from eventjet.operations.actions import AuditEntry, audit_entries, audit_entry
from eventjet.operations.quarantine import outcome_text, outcomes_now, pending_text, quarantine_page
from eventjet.rebuild.plan import CHOICES

_PAGE = 50
_PAGES_MAX = 10_000
_EVERY_S = 1.0
_JOBS = ("rebuild", "verify")
_VERDICTS = ("retry", "drop")


async def act(request: Request) -> Response:
    """Show what an action will do, to be confirmed, or carry out the action of a confirmed form."""
    actions: Actions = request.app.state.actions
    if request.method == "POST":
        fields = await form_of(request)
        form = fields.pop("form", "")
        action_request = ActionRequest.of(fields.items())
        action_id = await actions.begin(visitor_of(request), action_request, form)
        screen = "job" if action_request.action in _JOBS else "action"
        return RedirectResponse(linker(request)(screen, id=action_id), 303)
    if not visitor_of(request).may_act:
        raise HTTPException(403, "You may look at this console, and not act in it.")
    action_request = ActionRequest.of(request.query_params.multi_items())
    note = ""
    if action_request.action in _VERDICTS and "all" in request.query_params and len(action_request.names) == 1:
        action_request, note = await _all_parked(request, action_request)
    action = actions.named(action_request)
    preview = await action.preview(actions.context, action_request)
    return page(
        request,
        "act.html",
        action=action,
        wanted=action_request,
        preview=preview,
        note=note,
        form=secrets.token_hex(16),
    )


async def _all_parked(request: Request, wanted: ActionRequest) -> tuple[ActionRequest, str]:
    """Return (the request for all events in quarantine now, up to the limit; a note if there are more)."""
    sources: Sources = request.app.state.sources
    (name,) = wanted.names
    seen = await sources.see("The quarantine", partial(quarantine_page, sources, name, limit=POSITIONS_MAX))
    if seen.value is None:
        raise HTTPException(503, seen.fault)
    positions = [event.position for event in seen.value.events if event.revision == seen.value.revision]
    note = f"These are the first {len(positions):,}; others are parked, too." if seen.value.is_cut else ""
    return replace(wanted, positions=tuple(positions)), note


async def actions(request: Request) -> Response:
    """Show the recorded actions, newest first."""
    sources: Sources = request.app.state.sources
    number = _page_of(request)
    target = request.query_params.get("target", "")[:100]

    async def look() -> list[AuditEntry]:
        skip = (number - 1) * _PAGE
        ask = partial(audit_entries, app=sources.app.name, limit=_PAGE + 1, skip=skip, target=target or None)
        return await sources.ask(ask)

    seen = await sources.see("The database", look)
    entries = seen.value or []
    return page(
        request,
        "actions.html",
        fault=seen.fault and f"{seen.fault} {request.app.state.actions.remedy}",
        found=[_Shown(request, entry) for entry in entries[:_PAGE]],
        number=number,
        has_more=len(entries) > _PAGE,
        target=target,
    )


async def action(request: Request) -> Response:
    """Show one action and its result."""
    return page(request, "action.html", **await _found(request))


async def action_live(request: Request) -> Response:
    """Stream the changing part of the page of an action."""
    streams = stream_of(request)

    async def parts() -> AsyncGenerator[str]:
        last = ""
        while await streams.pause(_EVERY_S):
            now = rendered(request, "action_now.html", **await _found(request))
            if now != last:
                yield now
            last = now

    return streams.response(parts())


class _Shown:
    """A recorded action with the values that pages show."""

    def __init__(self, request: Request, one: AuditEntry) -> None:
        actions: Actions = request.app.state.actions
        self.recorded = one
        self.begun = one.record
        self.lines = one.result.splitlines()
        self.is_job = one.record.action in _JOBS
        self.is_running = one.outcome == "begun" and actions.is_running(one.record.id)
        self.unrecorded = actions.unrecorded.get(one.record.id, "")
        self.is_lost = one.outcome == "begun" and not self.is_running and not self.unrecorded


async def _found(request: Request) -> dict[str, Any]:
    sources: Sources = request.app.state.sources
    (action_id,) = (ActionRequest.of([("job", request.query_params.get("id", ""))]).job,)
    if not action_id:
        raise HTTPException(400, "An action is named by 32 hexadecimal digits.")

    async def look() -> AuditEntry | None:
        return await sources.ask(partial(audit_entry, app=sources.app.name, action_id=action_id))

    seen = await sources.see("The database", look)
    if seen.value is None and not seen.fault:
        raise HTTPException(404, "No such action was recorded.")
    entry_shown = None if seen.value is None else _Shown(request, seen.value)
    lines, is_open, fault = await _verdicts(sources, seen)
    return {"id": action_id, "fault": seen.fault or fault, "one": entry_shown, "lines": lines, "is_open": is_open}


async def _verdicts(sources: Sources, seen: Seen[AuditEntry | None]) -> tuple[list[str], bool, str]:
    """Return what became of the events that an action resolved.

    The result is (lines as the command prints them, whether a worker still has to act, fault).
    """
    entry = seen.value
    if entry is None or entry.record.action not in _VERDICTS or entry.outcome != "done":
        return [], False, ""
    positions, (name, *_) = entry.record.details.get("positions", []), entry.record.targets
    seen_outcomes = await sources.see("The quarantine", partial(outcomes_now, sources, name, positions))
    outcomes = seen_outcomes.value or []
    is_open = any(outcome.is_open for outcome in outcomes)
    return [*map(outcome_text, outcomes), *([pending_text(name)] if is_open else [])], is_open, seen_outcomes.fault


def _page_of(request: Request) -> int:
    text = request.query_params.get("page", "1")
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= _PAGES_MAX and len(text) < 9):
        raise HTTPException(400, f"A page is a number from 1 to {_PAGES_MAX:,}.")
    return int(text)


async def jobs(request: Request) -> Response:
    """Show the jobs of this console, and the form that starts a job."""
    actions: Actions = request.app.state.actions
    chosen = ActionRequest.of(
        (name, value) for name, value in request.query_params.multi_items() if name == "name"
    ).names
    return page(
        request,
        "jobs.html",
        jobs=actions.jobs.all(),
        projections=list(request.app.state.sources.app.projections.values()),
        chosen=chosen,
        engines=CHOICES,
        running_max=RUNNING_MAX,
        kept_max=KEPT_MAX,
    )


async def job(request: Request) -> Response:
    """Show one job, or the recorded action of a job that this console no longer knows."""
    job_id, bulk_job = _job_of(request)
    if bulk_job is None:
        return RedirectResponse(linker(request)("action", id=job_id), 303)
    return page(request, "job.html", job=bulk_job)


async def job_live(request: Request) -> Response:
    """Stream the changing part of the page of a job, once a second."""
    streams = stream_of(request)
    _, bulk_job = _job_of(request)
    if bulk_job is None:
        raise HTTPException(404, "This console does not run such a job.")

    async def parts() -> AsyncGenerator[str]:
        last = ""
        while await streams.pause(_EVERY_S):
            now = rendered(request, "job_now.html", job=bulk_job)
            if now != last:
                yield now
            last = now

    return streams.response(parts())


def _job_of(request: Request) -> tuple[str, Any]:
    job_id = ActionRequest.of([("job", request.query_params.get("id", ""))]).job
    if not job_id:
        raise HTTPException(400, "A job is named by 32 hexadecimal digits.")
    return job_id, request.app.state.actions.jobs.get(job_id)
