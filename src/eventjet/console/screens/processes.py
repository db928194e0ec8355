"""Processes: the types of the app with their deadlines, and one process with its history and its next step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.pages import page, query_text
from eventjet.console.sources import Seen, Sources
from eventjet.domain.process import ProcessInfo
from eventjet.errors import Refused
from eventjet.log.timers import TimerSet
from eventjet.operations.processes import (
    HISTORY_MAX,
    History,
    ProcessView,
    deadlines_waiting,
    process_history,
    process_view,
    running_over,
)

_NAME_MAX = 63
_TIMERS_MAX = 100
"""The most timers that are read for each process type and kind, for its counts."""
_NEXT_MAX = 20


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The timers of one process type."""

    still_set: int
    due: int
    is_cut: bool
    """Whether there may be more timers."""
    first: tuple[TimerSet, ...]
    """The earliest of the timers that were read."""


async def processes(request: Request) -> Response:
    """Show all process types of the app."""
    sources: Sources = request.app.state.sources
    infos = list(sources.app.processes.values())
    if not infos:
        return page(request, "processes.html", infos=[], polled=None, statuses={}, waiting={}, hears={})
    timed = [info.name for info in infos if info.has_deadlines]
    polled, *seen = await asyncio.gather(
        request.app.state.poller.polled(), *(sources.see("The server", _look(sources, name)) for name in timed)
    )
    return page(
        request,
        "processes.html",
        infos=infos,
        polled=polled,
        statuses={status.name: status for status in polled.statuses},
        waiting=dict(zip(timed, seen, strict=True)),
        hears={info.name: _heard(sources, info) for info in infos},
    )


async def process(request: Request) -> Response:
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
        try:
            return await process_view(running_over(sources.app, log.repositories, log.client, name), process_id)
        except Refused as error:
            raise HTTPException(400, str(error)) from None

    async def history() -> History:
        log = await sources.log()
        running = running_over(sources.app, log.repositories, log.client, name)
        try:
            return await process_history(log.jet, log.client, running, process_id)
        except Refused as error:
            raise HTTPException(400, str(error)) from None

    answers: tuple[Seen[ProcessView], Seen[History]] = await asyncio.gather(
        sources.see("The server", now), sources.see("The log", history)
    )
    seen_process, seen_history = answers
    values = {"name": name, "process_id": process_id, "found": seen_process, "told": seen_history, "most": HISTORY_MAX}
    return page(request, "process.html", **values)


def _look(sources: Sources, name: str) -> Any:
    async def look() -> _Waiting:
        log = await sources.log()
        timers = [timer for _, timer in await deadlines_waiting(log.client, sources.app, name, _TIMERS_MAX)]
        due = [timer for timer in timers if timer.due]
        is_cut = max(len(due), len(timers) - len(due)) >= _TIMERS_MAX
        return _Waiting(len(timers) - len(due), len(due), is_cut, tuple(timers[:_NEXT_MAX]))

    return look


def _heard(sources: Sources, info: ProcessInfo) -> list[str]:
    """Return the stored names of the events that the process's listeners take."""
    event_types = {event for listener in info.listeners for event in listener.events}
    return sorted(kind.info.name for kind in sources.app.catalog.kinds() if kind.event_type in event_types)
