"""Actions: what one will do, asked before it is done; and what was done, by whom and when."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from eventjet.console.access import form_of, visitor_of
from eventjet.console.actions import POSITIONS_MAX, Actions, Wish
from eventjet.console.live import streams_of
from eventjet.console.pages import linker, page, rendered
from eventjet.console.sources import Seen, Sources
from eventjet.operations.actions import AuditEntry, audit_entries, audit_entry
from eventjet.operations.quarantine import outcome_text, outcomes_now, pending_text, quarantine_page

_PAGE = 50
_PAGES_MAX = 10_000
_EVERY_S = 1.0
_JOBS = ("rebuild", "verify")
_VERDICTS = ("retry", "drop")


async def act(request: Request) -> Response:
    """What an action will do, to be confirmed; and the form that has it done."""
    actions: Actions = request.app.state.actions
    if request.method == "POST":
        fields = await form_of(request)
        form = fields.pop("form", "")
        wish = Wish.of(fields.items())
        done = await actions.begin(visitor_of(request), wish, form)
        where = "job" if wish.action in _JOBS else "action"
        return RedirectResponse(linker(request)(where, id=done), 303)
    if not visitor_of(request).may_act:
        raise HTTPException(403, "You may look at this console, and not act in it.")
    wish = Wish.of(request.query_params.multi_items())
    note = ""
    if wish.action in _VERDICTS and "all" in request.query_params and len(wish.names) == 1:
        wish, note = await _all_parked(request, wish)
    action = actions.named(wish)
    meaning = await action.means(actions.desk, wish)
    return page(request, "act.html", action=action, wish=wish, meaning=meaning, note=note, form=secrets.token_hex(16))


async def _all_parked(request: Request, wish: Wish) -> tuple[Wish, str]:
    """The wish about all that is parked now, as far as one may be."""
    sources: Sources = request.app.state.sources
    (name,) = wish.names
    seen = await sources.see("The quarantine", partial(quarantine_page, sources, name, limit=POSITIONS_MAX))
    if seen.value is None:
        raise HTTPException(503, seen.fault)
    own = [one.position for one in seen.value.events if one.revision == seen.value.revision]
    note = f"These are the first {len(own):,}; others are parked, too." if seen.value.is_cut else ""
    return replace(wish, positions=tuple(own)), note


async def actions(request: Request) -> Response:
    """What was done, newest first."""
    sources: Sources = request.app.state.sources
    number = _page_of(request)
    target = request.query_params.get("target", "")[:100]

    async def look() -> list[AuditEntry]:
        skip = (number - 1) * _PAGE
        ask = partial(audit_entries, app=sources.app.name, limit=_PAGE + 1, skip=skip, target=target or None)
        return await sources.ask(ask)

    seen = await sources.see("The database", look)
    found = seen.value or []
    return page(
        request,
        "actions.html",
        fault=seen.fault and f"{seen.fault} {request.app.state.actions.remedy}",
        found=[_Shown(request, one) for one in found[:_PAGE]],
        number=number,
        has_more=len(found) > _PAGE,
        target=target,
    )


async def action(request: Request) -> Response:
    """One action, and what it came to."""
    return page(request, "action.html", **await _found(request))


async def action_live(request: Request) -> Response:
    """Its moving part, while there is something to wait for."""
    streams = streams_of(request)

    async def parts() -> AsyncGenerator[str]:
        last = ""
        while await streams.pause(_EVERY_S):
            now = rendered(request, "action_now.html", **await _found(request))
            if now != last:
                yield now
            last = now

    return streams.response(parts())


class _Shown:
    """A recorded action as pages tell of it."""

    def __init__(self, request: Request, one: AuditEntry) -> None:
        known: Actions = request.app.state.actions
        self.recorded = one
        self.begun = one.request
        self.lines = one.result.splitlines()
        self.is_job = one.request.action in _JOBS
        self.is_running = one.outcome == "begun" and known.is_running(one.request.id)
        self.unrecorded = known.unrecorded.get(one.request.id, "")
        self.is_lost = one.outcome == "begun" and not self.is_running and not self.unrecorded


async def _found(request: Request) -> dict[str, Any]:
    sources: Sources = request.app.state.sources
    (action_id,) = (Wish.of([("job", request.query_params.get("id", ""))]).job,)
    if not action_id:
        raise HTTPException(400, "An action is named by 32 hexadecimal digits.")

    async def look() -> AuditEntry | None:
        return await sources.ask(partial(audit_entry, app=sources.app.name, action_id=action_id))

    seen = await sources.see("The database", look)
    if seen.value is None and not seen.fault:
        raise HTTPException(404, "No such action was recorded.")
    shown = None if seen.value is None else _Shown(request, seen.value)
    lines, is_open, fault = await _verdicts(sources, seen)
    return {"id": action_id, "fault": seen.fault or fault, "one": shown, "lines": lines, "is_open": is_open}


async def _verdicts(sources: Sources, seen: Seen[AuditEntry | None]) -> tuple[list[str], bool, str]:
    """What has become of the verdicts of an action, as the command tells it; whether a worker still has to do it."""
    one = seen.value
    if one is None or one.request.action not in _VERDICTS or one.outcome != "done":
        return [], False, ""
    positions, (name, *_) = one.request.details.get("positions", []), one.request.targets
    found = await sources.see("The quarantine", partial(outcomes_now, sources, name, positions))
    outcomes = found.value or []
    is_open = any(each.is_open for each in outcomes)
    return [*map(outcome_text, outcomes), *([pending_text(name)] if is_open else [])], is_open, found.fault


def _page_of(request: Request) -> int:
    text = request.query_params.get("page", "1")
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= _PAGES_MAX and len(text) < 9):
        raise HTTPException(400, f"A page is a number from 1 to {_PAGES_MAX:,}.")
    return int(text)


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "act": {"endpoint": act, "methods": ["GET", "POST"]},
    "actions": {"endpoint": actions},
    "action": {"endpoint": action},
    "action_live": {"endpoint": action_live},
}
