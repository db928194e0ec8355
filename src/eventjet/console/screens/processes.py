"""Processes: the types of the app with their deadlines, and one process with its history and its next step."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from eventjet.console.pages import query_text
from eventjet.console.sources import Sources
from eventjet.console.status_poller import StatusPoller
from eventjet.domain.process import ProcessInfo
from eventjet.errors import Refused
from eventjet.operations.processes import Moment, Processes, ProcessView

_NAME_MAX = 63


async def processes(request: Request) -> dict[str, Any]:
    """Show all process types of the app."""
    sources: Sources = request.app.state.sources
    infos = list(sources.app.processes.values())
    poller: StatusPoller = request.app.state.poller
    if infos:
        await poller.refreshed()
    if any(info.has_deadlines for info in infos):
        await poller.deadlines.refresh()
    return {
        "infos": infos,
        "polled": poller,
        "statuses": {status.name: status for status in poller.statuses},
        "inputs": {info.name: _inputs(sources, info) for info in infos},
    }


async def process(request: Request) -> dict[str, Any]:
    """Show one process."""
    sources: Sources = request.app.state.sources
    name, process_id = query_text(request, "name", _NAME_MAX), query_text(request, "id", 500)
    if all(info.name != name for info in sources.app.processes.values()):
        raise HTTPException(404, f"The app has no process {name!r}.")
    if not process_id:
        raise HTTPException(400, "Which one? The address needs the id of a process.")

    async def now() -> ProcessView:
        log = await sources.log()
        await log.jet.skipped()
        return await Processes(sources.app, log.repositories, log.client, name).view(process_id)

    async def history() -> tuple[list[Moment], bool]:
        log = await sources.log()
        return await Processes(sources.app, log.repositories, log.client, name).history(log.jet, process_id)

    view, moments = await asyncio.gather(
        sources.attempt("The server", now(), refusals=Refused), sources.attempt("The log", history(), refusals=Refused)
    )
    return {"name": name, "process_id": process_id, "view": view, "history": moments}


def _inputs(sources: Sources, info: ProcessInfo) -> list[str]:
    """Return the stored names of the events that the process's listeners take."""
    event_types = {event for listener in info.listeners for event in listener.events}
    return sorted(kind.info.name for kind in sources.app.catalog.kinds() if kind.event_type in event_types)
