"""Read models: all of them, and one with its revisions, its tables by key and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.asked import number_asked, text_asked
from eventjet.console.pages import page
from eventjet.console.pulse import Beat, Pulse
from eventjet.console.sources import Sources
from eventjet.errors import UsageError
from eventjet.operations.rows import why_not_told
from eventjet.operations.tables import TablesSeen, tables_seen
from eventjet.subscriptions.status import PROJECTION, WorkStatus

_NAME_MAX = 63
_REVISION_MAX = 2**31 - 1
_SHOWN_MAX = 500
"""Rows of the list."""


async def models(request: Request) -> Response:
    """Every projection that is declared, or has a checkpoint."""
    beat = await request.app.state.pulse.beat()
    found = [one for one in beat.statuses if one.kind == PROJECTION]
    return page(request, "models.html", beat=beat, models=found[:_SHOWN_MAX], more=len(found) - _SHOWN_MAX)


async def model(request: Request) -> Response:
    """One of them, at one revision."""
    sources: Sources = request.app.state.sources
    name = text_asked(request, "name", _NAME_MAX)
    table, after = text_asked(request, "table", 200), text_asked(request, "after")
    start = text_asked(request, "start")
    revision = number_asked(request, "revision")
    pulse: Pulse = request.app.state.pulse
    declared = sources.app.projections.get(name)
    if revision is None:
        revision = declared.revision if declared is not None else _newest(_of_name(await pulse.beat(), name))
    if revision > _REVISION_MAX:
        raise HTTPException(400, f"No revision has the number {revision:,}.")

    async def look() -> TablesSeen:
        try:
            return await sources.ask(
                lambda one: tables_seen(one, sources.app, name, revision, table=table, after=after, start=start)
            )
        except UsageError as error:
            raise HTTPException(400, str(error)) from None

    beat, seen = await asyncio.gather(pulse.beat(), sources.see("The database", look))
    revisions = _of_name(beat, name)
    if declared is None and not revisions and not beat.fault:
        raise HTTPException(404, f"The app has no read model {name!r}.")
    return page(
        request,
        "model.html",
        name=name,
        revision=revision,
        declared=declared,
        is_declared=declared is not None and declared.revision == revision,
        events=[] if declared is None else sorted(_wire(sources, one) for one in declared.events),
        beat=beat,
        revisions=revisions,
        here=_of(revisions, revision),
        seen=seen,
        start=start,
        after=after,
        not_told=why_not_told(sources.app, name),
    )


def _of_name(beat: Beat, name: str) -> list[WorkStatus]:
    return [one for one in beat.statuses if one.kind == PROJECTION and one.name == name]


def _newest(revisions: list[WorkStatus]) -> int:
    return max((one.revision for one in revisions), default=1)


def _of(revisions: list[WorkStatus], revision: int) -> WorkStatus | None:
    return next((one for one in revisions if one.revision == revision), None)


def _wire(sources: Sources, event: type) -> str:
    return next((one.info.name for one in sources.app.catalog.kinds() if one.event_type is event), event.__name__)


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "models": {"endpoint": models},
    "model": {"endpoint": model},
}
