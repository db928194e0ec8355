"""Actions and jobs: the confirmation of an action, the record of past ones, and running rebuilds and verifications."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from eventjet.console.access import check_may_act, form_of, visitor_of
from eventjet.console.actions import ACTION_ID, POSITIONS_MAX, ActionRequest, Actions
from eventjet.console.jobs import ENDED_MAX, RUNNING_MAX, Job
from eventjet.console.live import LiveResponse
from eventjet.console.pages import linker, query_number, query_text
from eventjet.console.sources import Sources
from eventjet.operations.actions import AuditEntry, audit_entries, audit_entry
from eventjet.operations.quarantine import ENTRIES_MAX, Quarantine, outcome_text, pending_text
from eventjet.rebuild.plan import CHOICES

_PAGE = 50
_PAGES_MAX = 10_000
_EVERY_S = 1.0
_JOBS = ("rebuild", "verify")
_DECISIONS = ("retry", "drop")


async def act(request: Request) -> dict[str, Any] | Response:
    """Show what an action will do, to be confirmed, or carry out the action of a confirmed form."""
    actions: Actions = request.app.state.actions
    if request.method == "POST":
        fields = await form_of(request)
        form = fields.pop("form", "")
        action_request = ActionRequest.of(fields.items())
        action_id = await actions.begin(visitor_of(request), action_request, form)
        screen = "job" if action_request.action in _JOBS else "action"
        return RedirectResponse(linker(request)(screen, id=action_id), 303)
    check_may_act(request)
    action_request, note = ActionRequest.of(request.query_params.multi_items()), ""
    if action_request.action in _DECISIONS and "all" in request.query_params and len(action_request.names) == 1:
        action_request, note = await _with_all_positions(request, action_request)
    action = actions.named(action_request)
    preview = await action.preview(actions, action_request)
    return {
        "action": action,
        "request": action_request,
        "preview": preview,
        "note": note,
        "form": secrets.token_hex(16),
    }


async def _with_all_positions(request: Request, action_request: ActionRequest) -> tuple[ActionRequest, str]:
    """Return (the request for all quarantined events, or those that match `text`, up to the limit; a note)."""
    sources: Sources = request.app.state.sources
    quarantine = Quarantine(sources, action_request.names[0])
    text = query_text(request, "text", 200)
    result = await sources.attempt("The quarantine", quarantine.listed(limit=POSITIONS_MAX, text=text))
    if result.value is None:
        raise HTTPException(503, result.fault)
    events, is_cut = result.value
    positions = tuple(event.position for event in events if event.revision == quarantine.revision)
    if not positions:
        raise HTTPException(404, _nothing_to_decide(quarantine, text, has_others=bool(events), is_cut=is_cut))
    which = "the first" if is_cut else "all"
    note = f"These are {which} {len(positions):,}" + (f" that have {text!r} in them" if text else "")
    note += "; more are quarantined, and can be decided about afterwards." if is_cut else "."
    return replace(action_request, positions=positions), note


def _nothing_to_decide(quarantine: Quarantine, text: str, *, has_others: bool, is_cut: bool) -> str:
    """Return why a decision about all events, or about those that match `text`, is about none."""
    if has_others:
        return "They are all of another revision, which is retried and dropped with its own code."
    if is_cut:
        condition = f"has {text!r} in it" if text else "is open"
        return (
            f"None of the first {ENTRIES_MAX:,} quarantined events {condition}, and this page looks at no more. Decide "
            f"about some of them first, or use `eventjet quarantine list {quarantine.name}`."
        )
    reason = f"Nothing that is quarantined has {text!r} in it" if text else "Nothing of it is quarantined any more"
    return f"{reason}. Go back and look again."


async def actions(request: Request) -> dict[str, Any]:
    """Show the recorded actions, newest first."""
    sources: Sources = request.app.state.sources
    number = query_number(request, "page", least=1, most=_PAGES_MAX) or 1
    target = query_text(request, "target", 100)
    skip = (number - 1) * _PAGE
    ask = partial(audit_entries, app=sources.app.name, limit=_PAGE + 1, skip=skip, target=target or None)
    result = await sources.attempt("The database", sources.ask(ask))
    entries = result.value or []
    return {
        "fault": result.fault and f"{result.fault} {request.app.state.actions.remedy}",
        "entries": [_entry(request, entry) for entry in entries[:_PAGE]],
        "number": number,
        "has_more": len(entries) > _PAGE,
        "target": target,
    }


def _entry(request: Request, entry: AuditEntry) -> dict[str, Any]:
    """Return a recorded action with the values that pages show."""
    actions: Actions = request.app.state.actions
    is_running = entry.outcome == "begun" and actions.is_running(entry.record.id)
    unrecorded = actions.unrecorded.get(entry.record.id, "")
    return {
        "entry": entry,
        "record": entry.record,
        "lines": entry.result.splitlines(),
        "is_job": entry.record.action in _JOBS,
        "is_running": is_running,
        "unrecorded": unrecorded,
        "is_lost": entry.outcome == "begun" and not is_running and not unrecorded,
    }


async def action(request: Request) -> dict[str, Any]:
    """Show one action and its result, with what became of the events that it decided about."""
    sources: Sources = request.app.state.sources
    action_id = _id_of(request)
    ask = partial(audit_entry, app=sources.app.name, action_id=action_id)
    result = await sources.attempt("The database", sources.ask(ask))
    entry, fault = result.value, result.fault
    if entry is None and not fault:
        raise HTTPException(404, "No such action was recorded.")
    lines, is_open = list[str](), False
    if entry is not None and entry.record.action in _DECISIONS and entry.outcome == "done":
        positions, (name, *_) = entry.record.details.get("positions", []), entry.record.targets
        outcomes = await sources.attempt("The quarantine", Quarantine(sources, name).outcomes(positions))
        fault, lines = fault or outcomes.fault, [*map(outcome_text, outcomes.value or ())]
        is_open = any(outcome.is_open for outcome in outcomes.value or ())
        lines += [pending_text(name)] if is_open else []
    shown = None if entry is None else _entry(request, entry)
    return {"id": action_id, "fault": fault, "shown": shown, "lines": lines, "is_open": is_open}


async def action_live(request: Request) -> Response:
    """Stream the changing part of the page of an action."""
    return LiveResponse(request, "action_now.html", partial(action, request), _EVERY_S)


async def jobs(request: Request) -> dict[str, Any]:
    """Show the jobs of this console, and the form that starts a job."""
    actions: Actions = request.app.state.actions
    names = [(name, value) for name, value in request.query_params.multi_items() if name == "name"]
    return {
        "jobs": actions.jobs.all(),
        "projections": list(request.app.state.sources.app.projections.values()),
        "chosen": ActionRequest.of(names).names,
        "engines": CHOICES,
        "running_max": RUNNING_MAX,
        "ended_max": ENDED_MAX,
    }


async def job(request: Request) -> dict[str, Any] | Response:
    """Show one job, or the recorded action of a job that this console no longer has."""
    job = _job_of(request)
    return RedirectResponse(linker(request)("action", id=_id_of(request)), 303) if job is None else {"job": job}


async def job_live(request: Request) -> Response:
    """Stream the changing part of the page of a job, once a second."""
    job = _job_of(request)
    if job is None:
        raise HTTPException(404, "This console does not run such a job.")

    async def values() -> dict[str, Any]:
        return {"job": job}

    return LiveResponse(request, "job_now.html", values, _EVERY_S)


def _id_of(request: Request) -> str:
    action_id = query_text(request, "id", 100)
    if not ACTION_ID.fullmatch(action_id):
        raise HTTPException(400, "An action, or its job, is named by 32 hexadecimal digits.")
    return action_id


def _job_of(request: Request) -> Job | None:
    return request.app.state.actions.jobs.get(_id_of(request))
