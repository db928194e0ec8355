"""One aggregate: its head, its history in pages, and its state at any version, beside the one before or another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.codec.headers import RawRecord, stored_at
from eventjet.codec.subjects import entity_key, is_name
from eventjet.commands.timeline import PAGE_MAX, Head, head_of, page_of, record_of
from eventjet.console.asked import ID_MAX, number_asked, text_asked
from eventjet.console.pages import page
from eventjet.console.sources import ANSWER_S, OpenLog, Seen, Sources
from eventjet.domain.identity import decode_id
from eventjet.errors import Refused
from eventjet.operations.differences import Beside
from eventjet.operations.events import headed, headers_of, logged, shown
from eventjet.operations.time_travel import EVENTS_MAX, Folded, SnapshotShown, TimeTravel, difference

_UNASKED_MAX = 2_000
"""Events that are folded for a page that nobody asked a version of."""


@dataclass(frozen=True, slots=True)
class StateSeen:
    """What an aggregate was before and after an event, or at two versions."""

    version: int
    other: int
    """The version it is compared with; the one before where nothing else was asked for."""
    comparison: Beside | None
    faults: list[str]
    goes_on: bool


async def aggregate(request: Request) -> Response:
    """The page."""
    kind, aggregate_id = _named(request)
    sources: Sources = request.app.state.sources
    version, other, upto = _versions(request)
    begun = time.monotonic()
    head = await sources.see("The server", lambda: _head(sources, kind, aggregate_id))
    values: dict[str, Any] = {"kind": kind, "id": aggregate_id, "token": entity_key(kind, aggregate_id)}
    if head.fault or head.value is None:
        return page(request, "aggregate_none.html", 502 if head.fault else 404, **values, fault=head.fault)
    log, ends = head.value
    left = max(ANSWER_S - (time.monotonic() - begun), 0.2)
    upto = min(upto or ends.version, ends.version)
    rows, snapshot, state = await asyncio.gather(
        sources.see("The server", lambda: _rows(log, kind, aggregate_id, upto, ends), left),
        sources.see("The server", lambda: _snapshot(log, kind, aggregate_id), left),
        _state(sources, log, (kind, aggregate_id), (version, other), ends, left),
    )
    values |= {
        "head": ends,
        "first_at": stored_at(ends.first),
        "last_at": stored_at(ends.last),
        "rows": rows,
        "upto": upto,
        "newer": min(upto + PAGE_MAX, ends.version) if upto < ends.version else None,
        "older": upto - PAGE_MAX if upto > PAGE_MAX else None,
        "snapshot": snapshot,
        "asked": version,
    }
    return page(request, "aggregate.html", **values, **state)


async def aggregate_state(request: Request) -> Response:
    """Its state at a version alone: what moving the slider asks for."""
    kind, aggregate_id = _named(request)
    sources: Sources = request.app.state.sources
    version, other, _ = _versions(request)
    begun = time.monotonic()
    head = await sources.see("The server", lambda: _head(sources, kind, aggregate_id))
    values: dict[str, Any] = {"kind": kind, "id": aggregate_id, "token": entity_key(kind, aggregate_id)}
    if head.fault or head.value is None:
        return page(request, "fault_part.html", fault=head.fault or "It has no events any more.")
    log, ends = head.value
    left = max(ANSWER_S - (time.monotonic() - begun), 0.2)
    state = await _state(sources, log, (kind, aggregate_id), (version or ends.version, other), ends, left)
    return page(request, "aggregate_state.html", **values, head=ends, asked=version, **state)


def _named(request: Request) -> tuple[str, str]:
    """Type and id that are asked for; raises `HTTPException` 400 for what cannot be one.

    Forms send the token of an id: what a browser does to the ends of lines would make another id of some.
    """
    token = text_asked(request, "token")
    kind, _, told = token.partition(".") if token else (text_asked(request, "type", ID_MAX), "", "")
    if not is_name(kind):
        raise HTTPException(400, "Say which aggregate: `type` is its name and `id` is which one.")
    try:
        aggregate_id = decode_id(told) if token else text_asked(request, "id", ID_MAX)
        entity_key(kind, aggregate_id)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    except ValueError:
        raise HTTPException(400, "`token` is no encoded id.") from None
    return kind, aggregate_id


def _versions(request: Request) -> tuple[int | None, int | None, int | None]:
    return (
        number_asked(request, "version", least=1),
        number_asked(request, "with"),
        number_asked(request, "upto", least=1),
    )


async def _head(sources: Sources, kind: str, aggregate_id: str) -> tuple[OpenLog, Head] | None:
    log = await sources.log()
    head = await head_of(log.repositories.store, kind, aggregate_id)
    return None if head is None else (log, head)


async def _rows(log: OpenLog, kind: str, aggregate_id: str, upto: int, head: Head) -> list[dict[str, Any]]:
    voids = await log.jet.voids()
    found = await page_of(log.repositories.store, kind, aggregate_id, upto, head)
    return [headed(record, voids) | {"logged_at": logged(record)} for record in found]


async def _snapshot(log: OpenLog, kind: str, aggregate_id: str) -> SnapshotShown | None:
    return await log.travel.snapshot(kind, aggregate_id) if log.travel.knows(kind) else None


async def _state(
    sources: Sources,
    log: OpenLog,
    of: tuple[str, str],
    asked: tuple[int | None, int | None],
    head: Head,
    left: float,
) -> dict[str, Any]:
    """What the part of the page about the state shows: the event, and both states, or why not."""
    version = min(asked[0] or head.version, head.version)
    values: dict[str, Any] = {"version": version, "state": None, "event": None, "headers": (), "folds": False}
    if not version:
        return values
    if log.travel.knows(of[0]):
        other = version - 1 if asked[1] is None else min(asked[1], head.version)
        most = EVENTS_MAX if asked[0] is not None else _UNASKED_MAX
        state, event = await asyncio.gather(
            sources.see("The server", lambda: _compared(log.travel, of, version, other, most), left),
            sources.see("The server", lambda: record_of(log.repositories.store, *of, version, head), left),
        )
        values |= {"state": state, "folds": True, "folds_max": EVENTS_MAX, "snapshots": log.travel.snapshots(of[0])}
    else:
        event = await sources.see("The server", lambda: record_of(log.repositories.store, *of, version, head), left)
    return values | _event(log, event)


def _event(log: OpenLog, seen: Seen[RawRecord | None]) -> dict[str, Any]:
    if seen.value is None:
        return {"event": None, "headers": ()}
    return {"event": shown(log.jet, seen.value), "headers": headers_of(seen.value)}


async def _compared(travel: TimeTravel, of: tuple[str, str], version: int, other: int, most: int) -> StateSeen:
    low, high = sorted((version, other))
    first = await travel.at(*of, low, most)
    # What one look did not reach, the other would not either.
    second = await travel.at(*of, high, most) if first.is_there else first
    faults = list(dict.fromkeys(one.fault for one in (first, second) if one.fault))
    comparison = difference(*_sides(first, second, other <= version)) if first.is_there and second.is_there else None
    if comparison is None and first.is_there:  # the state before is known, and what came then raised
        comparison = difference(first.held, first.held)
    return StateSeen(version, other, comparison, faults, first.goes_on or second.goes_on)


def _sides(first: Folded, second: Folded, in_order: bool) -> tuple[Any, Any]:
    return (first.held, second.held) if in_order else (second.held, first.held)


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "aggregate": {"endpoint": aggregate},
    "aggregate_state": {"endpoint": aggregate_state},
}
