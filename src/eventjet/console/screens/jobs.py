"""Rebuilds and verifications: begun, watched, cancelled, and what the last ones found."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from eventjet.console.actions import Actions, Wish
from eventjet.console.jobs import KEPT_MAX, RUNNING_MAX
from eventjet.console.live import streams_of
from eventjet.console.pages import linker, page, rendered
from eventjet.rebuild.plan import CHOICES

_EVERY_S = 1.0


async def jobs(request: Request) -> Response:
    """Those of this console, and the form that begins one."""
    known: Actions = request.app.state.actions
    chosen = Wish.of((name, value) for name, value in request.query_params.multi_items() if name == "name").names
    return page(
        request,
        "jobs.html",
        jobs=known.jobs.all(),
        projections=list(request.app.state.sources.app.projections.values()),
        chosen=chosen,
        engines=CHOICES,
        running_max=RUNNING_MAX,
        kept_max=KEPT_MAX,
    )


async def job(request: Request) -> Response:
    """One of them; where this console does not have it any more, what is recorded of it."""
    job_id, found = _found(request)
    if found is None:
        return RedirectResponse(linker(request)("action", id=job_id), 303)
    return page(request, "job.html", job=found)


async def job_live(request: Request) -> Response:
    """Its moving part, once a second."""
    streams = streams_of(request)
    _, found = _found(request)
    if found is None:
        raise HTTPException(404, "This console does not run such a job.")

    async def parts() -> AsyncGenerator[str]:
        last = ""
        while await streams.pause(_EVERY_S):
            now = rendered(request, "job_now.html", job=found)
            if now != last:
                yield now
            last = now

    return streams.response(parts())


def _found(request: Request) -> tuple[str, Any]:
    job_id = Wish.of([("job", request.query_params.get("id", ""))]).job
    if not job_id:
        raise HTTPException(400, "A job is named by 32 hexadecimal digits.")
    return job_id, request.app.state.actions.jobs.get(job_id)


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "jobs": {"endpoint": jobs},
    "job": {"endpoint": job},
    "job_live": {"endpoint": job_live},
}
