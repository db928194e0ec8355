"""Aggregates: the search by id, one aggregate's history in pages, and its state at any version."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from eventjet.codec.headers import stored_at
from eventjet.codec.subjects import entity_key, is_name
from eventjet.commands.history import Bounds, Head, History
from eventjet.console.pages import ID_MAX, page, query_number, query_text
from eventjet.console.sources import ANSWER_S, OpenLog, Result, Sources
from eventjet.domain.identity import decode_id
from eventjet.errors import Refused
from eventjet.operations.aggregates import (
    FOLDED_MAX,
    AggregateMatch,
    SnapshotInfo,
    changed_last,
    difference,
    ids_beginning,
    looked_up,
)
from eventjet.operations.events import event_view, header_view, headers_of, import_time
from eventjet.text import cut, printable

PAGE_MAX = 50
"""Versions of one page of a history."""
_DEFAULT_FOLDED_MAX = 2_000
"""The most events that are folded for a page without a requested version."""


async def aggregates(request: Request) -> dict[str, Any] | Response:
    """Show the results of a search for a `type`, or without a type the aggregates that changed last."""
    sources: Sources = request.app.state.sources
    kind, prefix = query_text(request, "type", ID_MAX), query_text(request, "id", ID_MAX)
    after = query_text(request, "after", ID_MAX)
    values: dict[str, Any] = {
        "types": sorted(info.name for info in sources.app.aggregates.values()),
        "kind": kind,
        "prefix": prefix,
        "after": after,
        "problem": "",
        "matches": [],
        "index": None,
        "fault": "",
        "last": None,
    }
    if kind and not is_name(kind):
        problem = f"{printable(cut(kind, 60))!r} is not the name of an aggregate."
        return page(request, "aggregates.html", 400, **values | {"problem": problem})
    if kind:
        return values | await _search(sources, kind, prefix, after)

    async def last() -> list[AggregateMatch]:
        return await changed_last((await sources.log()).repositories.store)

    problem = "Choose a type as well: ids of different types may be the same." if prefix else ""
    return values | {"problem": problem, "last": await sources.attempt("The server", last())}


async def _search(sources: Sources, kind: str, prefix: str, after: str) -> dict[str, Any]:
    """Return the aggregate of this id and those whose ids begin with it; the log is asked about the latter last."""

    async def with_ids(ids: list[str]) -> list[AggregateMatch]:
        return await looked_up((await sources.log()).repositories.store, kind, ids)

    by_index = sources.ask(lambda connection: ids_beginning(sources.app, connection, kind, prefix, after))
    exact, index = await asyncio.gather(
        sources.attempt("The server", with_ids([prefix] if prefix and not after else []), ANSWER_S / 2),
        sources.attempt("The database", by_index, ANSWER_S / 2),
    )
    by_prefix: Result[list[AggregateMatch]] = Result([])
    ids = [aggregate_id for aggregate_id in (index.value.ids if index.value else ()) if aggregate_id != prefix]
    if ids and not exact.fault:
        by_prefix = await sources.attempt("The server", with_ids(ids), ANSWER_S / 2)
    matches = [*(exact.value or ()), *(by_prefix.value or ())]
    return {"matches": matches, "index": index, "fault": exact.fault or by_prefix.fault}


async def aggregate(request: Request) -> dict[str, Any] | Response:
    """Show the history of an aggregate and its state at a version."""
    values, remaining_s, head = await _head(request)
    if head.value is None:
        return page(request, "aggregate_none.html", 502 if head.fault else 404, **values, fault=head.fault)
    sources: Sources = request.app.state.sources
    kind, aggregate_id = values["kind"], values["id"]
    log, ends = head.value
    upto = min(values["requested_upto"] or ends.version, ends.version)

    async def rows() -> list[dict[str, Any]]:
        skipped = await log.jet.skipped()
        bounds = Bounds(version=upto, newest_first=True, limit=PAGE_MAX)
        records = await History(log.repositories.store, kind, aggregate_id).records(bounds, ends)
        return [header_view(record, skipped) | {"logged_at": import_time(record)} for record in records]

    async def snapshot() -> SnapshotInfo | None:
        return await log.travel.snapshot(kind, aggregate_id) if log.travel.knows(kind) else None

    rows_result, snapshot_result, state = await asyncio.gather(
        sources.attempt("The server", rows(), remaining_s),
        sources.attempt("The server", snapshot(), remaining_s),
        _state(sources, log, values, ends, remaining_s),
    )
    return {
        **values,
        **state,
        "head": ends,
        "first_at": stored_at(ends.first),
        "last_at": stored_at(ends.last),
        "rows": rows_result,
        "snapshot": snapshot_result,
        "upto": upto,
        "newer": min(upto + PAGE_MAX, ends.version) if upto < ends.version else None,
        "older": upto - PAGE_MAX if upto > PAGE_MAX else None,
    }


async def aggregate_state(request: Request) -> dict[str, Any] | Response:
    """Show only the state of an aggregate at a version, for a move of the slider."""
    values, remaining_s, head = await _head(request)
    if head.value is None:
        return page(request, "fault_part.html", fault=head.fault or "It has no events any more.")
    log, ends = head.value
    values["requested_version"] = values["requested_version"] or ends.version
    state = await _state(request.app.state.sources, log, values, ends, remaining_s)
    return {**values, **state, "head": ends}


async def _head(request: Request) -> tuple[dict[str, Any], float, Result[tuple[OpenLog, Head] | None]]:
    """Return (values that every page of an aggregate has, the seconds that its parts may take, both ends of it).

    Raises `HTTPException` 400 for an invalid type or id. Forms send the encoded id as `token`, since browsers change
    the ends of lines, which would change some ids.
    """
    sources: Sources = request.app.state.sources
    token = query_text(request, "token")
    kind, _, encoded_id = token.partition(".") if token else (query_text(request, "type", ID_MAX), "", "")
    if not is_name(kind):
        raise HTTPException(400, "Say which aggregate: `type` is its name and `id` is which one.")
    try:
        aggregate_id = decode_id(encoded_id) if token else query_text(request, "id", ID_MAX)
        token = entity_key(kind, aggregate_id)
    except Refused as error:
        raise HTTPException(400, str(error)) from None
    except ValueError:
        raise HTTPException(400, "`token` is no encoded id.") from None
    values = {
        "kind": kind,
        "id": aggregate_id,
        "token": token,
        "requested_version": query_number(request, "version", least=1),
        "requested_other": query_number(request, "with"),
        "requested_upto": query_number(request, "upto", least=1),
    }
    started = time.monotonic()

    async def look() -> tuple[OpenLog, Head] | None:
        log = await sources.log()
        head = await History(log.repositories.store, kind, aggregate_id).head()
        return None if head is None else (log, head)

    result = await sources.attempt("The server", look())
    return values, max(ANSWER_S - (time.monotonic() - started), 0.2), result


async def _state(
    sources: Sources, log: OpenLog, query: dict[str, Any], head: Head, remaining_s: float
) -> dict[str, Any]:
    """Return what the page shows of the state: the event and both states, or why they are not known."""
    entity, travel = (query["kind"], query["id"]), log.travel
    requested_version, requested_other = query["requested_version"], query["requested_other"]
    version = min(requested_version or head.version, head.version)
    values: dict[str, Any] = {"version": version, "state": None, "event": None, "headers": (), "folds": False}
    if not version:
        return values
    record_look = sources.attempt(
        "The server", History(log.repositories.store, *entity).record(version, head.last), remaining_s
    )
    if travel.knows(entity[0]):
        other = version - 1 if requested_other is None else min(requested_other, head.version)
        folded_max = FOLDED_MAX if requested_version is not None else _DEFAULT_FOLDED_MAX
        state_look = sources.attempt("The server", _compared(log, entity, version, other, folded_max), remaining_s)
        state, record = await asyncio.gather(state_look, record_look)
        values |= {"state": state, "folds": True, "folds_max": FOLDED_MAX, "snapshots": travel.snapshots(entity[0])}
    else:
        record = await record_look
    if record.value is not None:
        values |= {"event": event_view(log.jet, record.value), "headers": headers_of(record.value)}
    return values


async def _compared(log: OpenLog, entity: tuple[str, str], version: int, other: int, most: int) -> dict[str, Any]:
    """Return the comparison of the states at two versions, and why it is not complete."""
    low, high = sorted((version, other))
    first = await log.travel.at(*entity, low, most)
    is_first_reached = first.folded.version == low
    # A version that the first look did not reach, the second would not reach either.
    second = await log.travel.at(*entity, high, most) if is_first_reached else first
    comparison = None
    if is_first_reached:
        # Where folding further failed, the earlier state is shown alone.
        sides = [first.folded, second.folded if second.folded.version == high else first.folded]
        comparison = difference(*(sides if other <= version else reversed(sides)))
    return {
        "other": other,
        "comparison": comparison,
        "faults": list(dict.fromkeys(reached.fault for reached in (first, second) if reached.fault)),
        "goes_on": first.goes_on or second.goes_on,
    }
