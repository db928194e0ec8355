"""One event: what is in it, what led to it, what it led to, and which rows it touched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.codec.headers import CORRELATION, TRACEPARENT, RawRecord, metadata_of
from eventjet.console.asked import number_asked
from eventjet.console.pages import page
from eventjet.console.sources import ANSWER_S, OpenLog, Sources
from eventjet.errors import CodecError
from eventjet.operations.causes import (
    NEAR,
    CauseFound,
    Effects,
    Node,
    RowsTouched,
    cause_of,
    effects_of,
    neighbours,
    rows_touched,
)
from eventjet.operations.events import headed, headers_of, logged, shown

_LEVELS_MAX = 12
"""Of the tree, as deep as it is drawn; what is below is beside its cause."""


async def event(request: Request) -> Response:
    """The page."""
    position = number_asked(request, "position", least=1)
    after = number_asked(request, "after") or 0
    if position is None:
        raise HTTPException(400, "Say which event: `position` is its place in the log.")
    sources: Sources = request.app.state.sources
    begun = time.monotonic()
    seen = await sources.see("The server", lambda: _at(sources, position))
    if seen.fault or seen.value is None:
        return page(request, "event_none.html", 502, position=position, fault=seen.fault, last=None)
    log, record, last = seen.value
    if record is None:
        return page(request, "event_none.html", 404, position=position, fault="", last=last)
    left = max(ANSWER_S - (time.monotonic() - begun), 0.2)
    store = log.repositories.store
    command_id, metadata = metadata_of(record[3])
    batch, cause, effects, rows = await asyncio.gather(
        sources.see("The server", lambda: neighbours(store, record), left),
        sources.see("The server", lambda: _cause(log, record, metadata.causation), left),
        sources.see("The server", lambda: effects_of(store, record, after), left),
        sources.see("The app", lambda: _rows(sources, log, record), left),
    )
    told = shown(log.jet, record, log.repositories.catalog.voids)
    trace = (metadata.traceparent or "").split("-")
    return page(
        request,
        "event.html",
        event=told | {"logged_at": logged(record)},
        headers=headers_of(record),
        command_id=command_id,
        metadata=metadata,
        trace=trace[1] if len(trace) >= 4 else "",
        names=(CORRELATION, TRACEPARENT),
        last=last,
        near=NEAR,
        batch=batch,
        batch_told=[_line(log, one) for one in batch.value or ()],
        cause=cause,
        cause_told=_line(log, cause.value.record) if cause.value is not None and cause.value.record else None,
        effects=effects,
        tree=_tree(log, effects.value),
        rows=rows,
        correlated=_correlated(sources, metadata.correlation),
    )


async def _at(sources: Sources, position: int) -> tuple[OpenLog, RawRecord | None, int]:
    log = await sources.log()
    store = log.repositories.store
    record, state, _ = await asyncio.gather(store.at(position), store.state(), log.jet.voids())
    return log, record, state.last


async def _cause(log: OpenLog, record: RawRecord, cause: str | None) -> CauseFound | None:
    return None if not cause else await cause_of(log.repositories.store, record, cause)


async def _rows(sources: Sources, log: OpenLog, record: RawRecord) -> list[RowsTouched]:
    try:
        recorded = log.jet.decode(record)
    except CodecError:
        return []  # the page says why it cannot be read
    # In a thread: it is the application's code, and pages are served meanwhile.
    return [] if recorded is None else await asyncio.to_thread(rows_touched, sources.app, recorded)


def _line(log: OpenLog, record: RawRecord) -> dict[str, Any]:
    return headed(record, log.repositories.catalog.voids)


def _tree(log: OpenLog, effects: Effects | None) -> list[dict[str, Any]]:
    def drawn(nodes: Sequence[Node], level: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for node in nodes:
            inner = drawn(node.effects, level + 1)
            line = _line(log, node.record)
            if level < _LEVELS_MAX:
                found.append(line | {"effects": inner})
            else:
                found += [line | {"effects": []}, *inner]
        return found

    return drawn(effects.nodes, 1) if effects is not None else []


def _correlated(sources: Sources, correlation: str | None) -> tuple[str, str] | None:
    """The process that a conversation is of, where its name says so."""
    name, _, process_id = (correlation or "").partition(":")
    known = {info.name for info in sources.app.processes.values()}
    return (name, process_id) if process_id and name in known else None


ROUTES: Mapping[str, Mapping[str, Any]] = {"event": {"endpoint": event}}
