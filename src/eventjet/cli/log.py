"""The commands `eventjet history`, `tail` and `skip`, for one aggregate, the log, and records that nobody can read."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Mapping
from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.output import Answer, Lines, Note, columns_of, confirm, filled, note, print_json, terminal_width
from eventjet.cli.target import (
    AggregateArgument,
    AppTarget,
    PersonalOption,
    YesOption,
    argument,
    on_app,
    option,
    switch,
)
from eventjet.domain.unique import CLAIMS
from eventjet.errors import Refused, UndecodableEvent, UnknownEvent, UsageError
from eventjet.errors.store import unknown_aggregate_remedy
from eventjet.projections.app_ref import aggregate_of
from eventjet.runtime import run_async
from eventjet.text import cut, cut_values, printable

if TYPE_CHECKING:
    from eventjet.codec.headers import RawRecord

_LAST = 10
_INDENT = " " * 9
_DATA_MAX = 2_000
"""Characters of an event's data that a listing shows."""


@on_app()
def history(
    at: AppTarget,
    aggregate: AggregateArgument,
    aggregate_id: Annotated[str, argument("ID", "Which one.")],
    after: Annotated[int, option("--after", "VERSION", "Only what came after this version.", min=0)] = 0,
    limit: Annotated[int | None, option("--limit", "N", "So many events at the most.", min=1)] = None,
    newest_first: Annotated[bool, switch("--newest-first", "Begin with the last event.")] = False,
    personal: PersonalOption = False,
) -> Answer:
    """Show what happened to one aggregate; exit status 1 when it has no events."""
    from eventjet.commands.history import Bounds, History
    from eventjet.operations.events import event_view

    async def read() -> list[dict[str, Any]]:
        if aggregate != CLAIMS:
            aggregate_of(at.app(), aggregate)
        async with at.jet() as jet:
            skipped = await jet.skipped()
            bounds = Bounds(after=after, limit=limit, newest_first=newest_first)
            records = await History(jet.store, aggregate, aggregate_id).records(bounds)
            return [event_view(jet, record, skipped, personal=personal) for record in records]

    events = run_async(read())
    if not events:
        since = f" after version {after}" if after else ""
        return Answer([], Note(f"There are no events of {aggregate} {aggregate_id}{since}."), ok=False)
    return Answer(events, Lines([row for event in events for row in line(event, with_aggregate=False).splitlines()]))


@on_app()
def tail(
    at: AppTarget,
    json: Annotated[bool, switch("--json", "One JSON object a line, for programs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is recorded from now on.")] = False,
    start: Annotated[
        int | None, option("--from", "POSITION", f"Begin at this position; else with the last {_LAST} events.", min=1)
    ] = None,
    until: Annotated[
        int | None, option("--until", "POSITION", "End after this position, with --follow too.", min=1)
    ] = None,
    limit: Annotated[
        int | None, option("--limit", "N", "End after so many events; without --from, the last ones.", min=1)
    ] = None,
    personal: PersonalOption = False,
) -> None:
    """Show the log's events in order: the last ones, or from a position on."""
    from eventjet.operations.events import event_view

    if start is not None and until is not None and start > until:
        raise UsageError(f"--from {start} is behind --until {until}, so there is nothing between them. Swap them.")

    async def read() -> None:
        async with at.app().connect(at.settings) as jet:
            reader = await jet.reader()
            log = await reader.state()  # raises where `eventjet init` has not run
            skipped = await jet.skipped()
            end = log.last if until is None else min(until, log.last)
            first = start if start is not None else max(log.first, end - (limit or _LAST) + 1)
            printed = 0
            async with aclosing(reader.records(start=first, until=until, follow=follow)) as records:
                async for record in records:
                    event = event_view(jet, record, skipped, personal=personal)
                    if json:
                        print_json(event, indent=None)
                    else:
                        print(line(event, with_aggregate=True), flush=True)
                    printed += 1
                    if printed == limit:
                        return
            if not printed:
                note(f"There is nothing to show: the log ends at position {log.last}.")

    run_async(read())


def line(event: Mapping[str, Any], *, with_aggregate: bool) -> str:
    """Return an event as one line, or more on a narrow terminal; `with_aggregate` adds the aggregate and its id."""
    when = datetime.fromisoformat(event["recorded_at"]).strftime("%Y-%m-%d %H:%M:%SZ")
    owner = f"{event['aggregate']} {event['aggregate_id']}  " if with_aggregate else ""
    version = "v?" if event["version"] is None else f"v{event['version']}"
    schema = "" if event["schema"] in (None, 1) else f" (schema {event['schema']})"
    data = event["data"]
    if not isinstance(data, str):
        data = jsonlib.dumps(cut_values(data), ensure_ascii=False, separators=(",", ":"))
    head = printable(f"{event['position']:>7}  {when}  {owner}{version}  {event['type']}{schema}")
    skipped = f"  skipped: {event['skipped']}" if "skipped" in event else ""
    body = printable(cut(data, _DATA_MAX) + (f"  unreadable: {event['fault']}" if "fault" in event else skipped))
    width = terminal_width()
    if columns_of(f"{head}  {body}") <= width:
        return f"{head}  {body}"
    lines = [filled(head, width, indent=_INDENT), filled(body, width, indent=_INDENT, first=_INDENT)]
    return "\n".join(filter(None, lines))


@on_app(database=False)
def skip(
    at: AppTarget,
    position: Annotated[int, argument("POSITION", "Of the record that cannot be decoded.", min=1)],
    reason: Annotated[str, option("--reason", "TEXT", "Why; it is kept in the log.")],
    yes: YesOption = False,
) -> Answer:
    """Have every load, worker, rebuild and verification skip a record that cannot be decoded, for good."""
    from eventjet.codec.headers import skipped_by
    from eventjet.jetstream.api import message_at
    from eventjet.log.skip_markers import record_skip_marker
    from eventjet.operations.events import event_view

    async def mark() -> bool:
        """Record the skip marker; return whether it is new."""
        async with at.jet() as jet:
            assert jet.client is not None
            skipped = await jet.skipped()
            record = await jet.client.ask(message_at(jet.name, position))
            if record is None:
                raise UsageError(f"The log has nothing at position {position}. `eventjet tail` shows what it has.")
            if position in skipped:
                return False
            if skipped_by(record[2]) is not None:
                raise UsageError(f"The record at position {position} has another one skipped, and stays.")
            fault = await asyncio.to_thread(_check_unreadable, at, skipped, record)
            if fault.refused_by_class:
                note(
                    "It has the form of an event that a release of this app recorded. A release that can read it has "
                    "made decisions and rows from it, which the next load and rebuild there are without."
                )
            if not yes:
                note(line(event_view(jet, record), with_aggregate=True))
            confirm("Have everybody pass over this for good?", yes=yes, otherwise="Nothing was recorded.")
            return await record_skip_marker(jet.client, jet.name, position, reason)

    is_new = run_async(mark())
    value = {"position": position, "skipped": True, "recorded": is_new}
    if not is_new:
        return Answer(value, f"Position {position} was skipped already.")
    return Answer(
        value,
        f"Position {position} is skipped. Start the workers of projections that it stopped once more, and where it is "
        f"quarantined, `eventjet quarantine retry PROJECTION {position}` frees what waits behind it.",
    )


def _check_unreadable(at: AppTarget, skipped: Mapping[int, str], record: RawRecord) -> UndecodableEvent:
    """Return why a record cannot be decoded; raises `Refused` if it can be, or is not declared here. Blocks."""
    from eventjet.codec.headers import TYPE, header
    from eventjet.codec.records import chained
    from eventjet.codec.subjects import is_name
    from eventjet.log.predecessors import PredecessorReader
    from eventjet.nats.endpoint import Endpoint

    app = at.app()
    title = f"The skip marker of position {record[0]}"
    aggregate = record[2].decode("utf-8", "replace").split(".")[1]
    is_event = header(record[3], TYPE) is not None and is_name(aggregate)
    if is_event and aggregate not in app.catalog.aggregates:
        fault = f"this application does not declare its aggregate {aggregate!r}, so the event may be sound"
        raise Refused(title, fault, unknown_aggregate_remedy(aggregate))
    try:
        with PredecessorReader(Endpoint.of(at.settings), app.name) as predecessors:
            chained(app.catalog.of_log(skipped), None, predecessors)(record)
    except UndecodableEvent as error:
        return error
    except UnknownEvent as error:
        fault = str(error).split(". ")[0]
        raise Refused(title, fault, "A deploy that declares it reads it; that is no garbage.") from None
    raise Refused(title, "it is an event that can be read", "Record another event that puts right what it says.")
