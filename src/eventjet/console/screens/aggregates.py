"""Aggregates: the search by id, one aggregate's history in pages, and its state at any version."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.codec.headers import RawRecord, stored_at
from eventjet.codec.subjects import entity_key, is_name
from eventjet.commands.history import Bounds, Head, History
from eventjet.console.pages import ID_MAX, page, query_number, query_text
from eventjet.console.sources import ANSWER_S, OpenLog, Seen, Sources
from eventjet.domain.identity import decode_id
from eventjet.errors import Refused
from eventjet.operations.aggregates import (
    FOLDED_MAX,
    AggregateMatch,
    Folded,
    IdMatches,
    SnapshotInfo,
    StateDifference,
    TimeTravel,
    changed_last,
    difference,
    ids_beginning,
    looked_up,
)
from eventjet.operations.events import event_view, header_view, headers_of, import_time
from eventjet.text import cut, printable


async def aggregates(request: Request) -> Response:
    """Show the results of a search for a `type`, or without a type the aggregates that changed last."""
    sources: Sources = request.app.state.sources
    kind, id_or_prefix = query_text(request, "type", ID_MAX), query_text(request, "id", ID_MAX)
    after = query_text(request, "after", ID_MAX)
    types = sorted(info.name for info in sources.app.aggregates.values())
    values: dict[str, Any] = {"types": types, "kind": kind, "wanted": id_or_prefix, "after": after, "problem": ""}
    if kind and not is_name(kind):
        return page(
            request, "aggregates.html", 400, **values | _none(f"{_told(kind)} is not the name of an aggregate.")
        )
    if kind:
        return page(request, "aggregates.html", **values | await _searched(sources, kind, id_or_prefix, after))
    last = await sources.see("The server", lambda: _last(sources))
    problem = "Choose a type as well: ids of different types may be the same." if id_or_prefix else ""
    return page(request, "aggregates.html", **values | _none(problem) | {"last": last})


async def _last(sources: Sources) -> list[AggregateMatch]:
    return await changed_last((await sources.log()).repositories.store)


async def _searched(sources: Sources, kind: str, wanted: str, after: str) -> dict[str, Any]:
    """Return the aggregate of this id and those whose ids begin with it; the log is asked about the latter last."""

    async def by_index() -> IdMatches:
        return await sources.ask(lambda connection: ids_beginning(sources.app, connection, kind, wanted, after))

    exact, index = await asyncio.gather(
        sources.see(
            "The server",
            lambda: _looked_up(sources, kind, [wanted] if wanted and not after else []),
            ANSWER_S / 2,
        ),
        sources.see("The database", by_index, ANSWER_S / 2),
    )
    by_prefix: Seen[list[AggregateMatch]] = Seen([])
    ids = (
        [aggregate_id for aggregate_id in index.value.ids if aggregate_id != wanted] if index.value is not None else []
    )
    if ids and not exact.fault:
        by_prefix = await sources.see("The server", lambda: _looked_up(sources, kind, ids), ANSWER_S / 2)
    matches = [*(exact.value or ()), *(by_prefix.value or ())]
    return {"found": matches, "index": index, "fault_told": exact.fault or by_prefix.fault, "problem": "", "last": None}


async def _looked_up(sources: Sources, kind: str, ids: list[str]) -> list[AggregateMatch]:
    return await looked_up((await sources.log()).repositories.store, kind, ids)


def _none(problem: str) -> dict[str, Any]:
    return {"found": [], "index": None, "fault_told": "", "problem": problem, "last": None}


def _told(kind: str) -> str:
    return repr(printable(cut(kind, 60)))


PAGE_MAX = 50
"""Versions of one page of a history."""
_UNASKED_MAX = 2_000
"""The most events that are folded for a page without a requested version."""


@dataclass(frozen=True, slots=True)
class StateSeen:
    """The state of an aggregate before and after an event, or at two versions."""

    version: int
    other: int
    """The version to compare with; by default the previous version."""
    comparison: StateDifference | None
    faults: list[str]
    goes_on: bool
    """Whether another look would fold further, since only its bound ended this look."""


async def aggregate(request: Request) -> Response:
    """Show the history of an aggregate and its state at a version."""
    kind, aggregate_id = _named(request)
    sources: Sources = request.app.state.sources
    version, other_version, upto = _versions(request)
    started = time.monotonic()
    head = await sources.see("The server", lambda: _head(sources, kind, aggregate_id))
    values: dict[str, Any] = {"kind": kind, "id": aggregate_id, "token": entity_key(kind, aggregate_id)}
    if head.fault or head.value is None:
        return page(request, "aggregate_none.html", 502 if head.fault else 404, **values, fault=head.fault)
    log, ends = head.value
    remaining_s = max(ANSWER_S - (time.monotonic() - started), 0.2)
    upto = min(upto or ends.version, ends.version)
    rows, snapshot, state = await asyncio.gather(
        sources.see("The server", lambda: _history_rows(log, kind, aggregate_id, upto, ends), remaining_s),
        sources.see("The server", lambda: _snapshot(log, kind, aggregate_id), remaining_s),
        _state(sources, log, (kind, aggregate_id), (version, other_version), ends, remaining_s),
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
    """Show only the state of an aggregate at a version, for a move of the slider."""
    kind, aggregate_id = _named(request)
    sources: Sources = request.app.state.sources
    version, other_version, _ = _versions(request)
    started = time.monotonic()
    head = await sources.see("The server", lambda: _head(sources, kind, aggregate_id))
    values: dict[str, Any] = {"kind": kind, "id": aggregate_id, "token": entity_key(kind, aggregate_id)}
    if head.fault or head.value is None:
        return page(request, "fault_part.html", fault=head.fault or "It has no events any more.")
    log, ends = head.value
    remaining_s = max(ANSWER_S - (time.monotonic() - started), 0.2)
    state = await _state(
        sources, log, (kind, aggregate_id), (version or ends.version, other_version), ends, remaining_s
    )
    return page(request, "aggregate_state.html", **values, head=ends, asked=version, **state)


def _named(request: Request) -> tuple[str, str]:
    """Return the requested (type, id); raises `HTTPException` 400 for invalid ones.

    Forms send the encoded id as `token`, since browsers change the ends of lines, which would change some ids.
    """
    token = query_text(request, "token")
    kind, _, encoded_id = token.partition(".") if token else (query_text(request, "type", ID_MAX), "", "")
    if not is_name(kind):
        raise HTTPException(400, "Say which aggregate: `type` is its name and `id` is which one.")
    try:
        aggregate_id = decode_id(encoded_id) if token else query_text(request, "id", ID_MAX)
        entity_key(kind, aggregate_id)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    except ValueError:
        raise HTTPException(400, "`token` is no encoded id.") from None
    return kind, aggregate_id


def _versions(request: Request) -> tuple[int | None, int | None, int | None]:
    return (
        query_number(request, "version", least=1),
        query_number(request, "with"),
        query_number(request, "upto", least=1),
    )


async def _head(sources: Sources, kind: str, aggregate_id: str) -> tuple[OpenLog, Head] | None:
    log = await sources.log()
    head = await History(log.repositories.store, kind, aggregate_id).head()
    return None if head is None else (log, head)


async def _history_rows(log: OpenLog, kind: str, aggregate_id: str, upto: int, head: Head) -> list[dict[str, Any]]:
    skipped = await log.jet.skipped()
    bounds = Bounds(version=upto, newest_first=True, limit=PAGE_MAX)
    records = await History(log.repositories.store, kind, aggregate_id).records(bounds, head)
    return [header_view(record, skipped) | {"logged_at": import_time(record)} for record in records]


async def _snapshot(log: OpenLog, kind: str, aggregate_id: str) -> SnapshotInfo | None:
    return await log.travel.snapshot(kind, aggregate_id) if log.travel.knows(kind) else None


async def _state(
    sources: Sources,
    log: OpenLog,
    of: tuple[str, str],
    asked: tuple[int | None, int | None],
    head: Head,
    left: float,
) -> dict[str, Any]:
    """Return what the page shows of the state: the event and both states, or why they are not known."""
    version = min(asked[0] or head.version, head.version)
    values: dict[str, Any] = {"version": version, "state": None, "event": None, "headers": (), "folds": False}
    if not version:
        return values
    history = History(log.repositories.store, *of)
    if log.travel.knows(of[0]):
        other_version = version - 1 if asked[1] is None else min(asked[1], head.version)
        folded_max = FOLDED_MAX if asked[0] is not None else _UNASKED_MAX
        state, event = await asyncio.gather(
            sources.see("The server", lambda: _compared(log.travel, of, version, other_version, folded_max), left),
            sources.see("The server", lambda: history.record(version, head.last), left),
        )
        values |= {"state": state, "folds": True, "folds_max": FOLDED_MAX, "snapshots": log.travel.snapshots(of[0])}
    else:
        event = await sources.see("The server", lambda: history.record(version, head.last), left)
    return values | _event(log, event)


def _event(log: OpenLog, seen: Seen[RawRecord | None]) -> dict[str, Any]:
    if seen.value is None:
        return {"event": None, "headers": ()}
    return {"event": event_view(log.jet, seen.value), "headers": headers_of(seen.value)}


async def _compared(travel: TimeTravel, of: tuple[str, str], version: int, other: int, most: int) -> StateSeen:
    low, high = sorted((version, other))
    first = await travel.at(*of, low, most)
    # A version that the first look did not reach, the second would not reach either.
    second = await travel.at(*of, high, most) if first.is_there else first
    faults = list(dict.fromkeys(folded.fault for folded in (first, second) if folded.fault))
    comparison = difference(*_sides(first, second, other <= version)) if first.is_there and second.is_there else None
    if comparison is None and first.is_there:  # the earlier state is known, and folding further failed
        comparison = difference(first.held, first.held)
    return StateSeen(version, other, comparison, faults, first.goes_on or second.goes_on)


def _sides(first: Folded, second: Folded, in_order: bool) -> tuple[Any, Any]:
    return (first.held, second.held) if in_order else (second.held, first.held)
