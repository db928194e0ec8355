"""Processes: the types of the app by stage, the instances of one, and one instance with history and next step."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from eventjet.console.pages import query_number, query_text
from eventjet.console.sources import Sources
from eventjet.console.status_poller import StatusPoller
from eventjet.errors import Refused, UsageError
from eventjet.operations.instances import Instances, age_text, instances_of, remarks_on, span_of, waits_text
from eventjet.operations.processes import Moment, Processes, ProcessView, event_names

_NAME_MAX = 63
_LOOKED_MAX = 10_000
"""The most instances that a page looks at."""
_LISTED_MAX = 200


async def processes(request: Request) -> dict[str, Any]:
    """Show all process types of the app."""
    sources: Sources = request.app.state.sources
    infos = list(sources.app.processes.values())
    poller: StatusPoller = request.app.state.poller
    if infos:
        await poller.refreshed()
    if any(info.has_deadlines for info in infos):
        await poller.deadlines.refresh()
    looks = [sources.attempt("The log", _instances(sources, info.name, limit=1)) for info in infos]
    return {
        "infos": infos,
        "stages": {info.name: result for info, result in zip(infos, await asyncio.gather(*looks), strict=True)},
        "age": age_text,
        "remarks": remarks_on,
        "polled": poller,
        "statuses": {status.name: status for status in poller.statuses},
        "inputs": {
            info.name: event_names(sources.app, {event for listener in info.listeners for event in listener.events})
            for info in infos
        },
    }


async def _instances(sources: Sources, name: str, **options: Any) -> Instances:
    return await instances_of(await sources.client(), sources.app, name, looked_max=_LOOKED_MAX, **options)


async def instances(request: Request) -> dict[str, Any]:
    """Show the instances of one process type: those of a stage, or longer in it than a time."""
    sources: Sources = request.app.state.sources
    name, stage = query_text(request, "name", _NAME_MAX), query_text(request, "stage", 200)
    older, offset = query_text(request, "older", 40), query_number(request, "offset") or 0
    everything = bool(query_text(request, "all", 10))
    info = next((info for info in sources.app.processes.values() if info.name == name), None)
    if info is None:
        raise HTTPException(404, f"The app has no process {name!r}.")
    try:
        older_than = span_of(older) if older else None
    except UsageError as error:
        raise HTTPException(400, str(error)) from None
    look = _instances(
        sources,
        name,
        stage=stage or None,
        older_than=older_than,
        everything=everything,
        limit=_LISTED_MAX,
        offset=offset,
    )
    result = await sources.attempt("The log", look, refusals=UsageError)
    return {
        "name": name,
        "stage": stage,
        "older": older,
        "everything": everything,
        "result": result,
        "types": event_names(sources.app, info.events),
        "next_offset": result.value and offset + result.value.looked_at,
        "age": age_text,
        "waits": waits_text,
        "remarks": remarks_on,
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
