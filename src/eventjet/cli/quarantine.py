"""The commands `eventjet quarantine …`: list, show, retry and drop the events that could not be handled."""

from __future__ import annotations

import asyncio
import json as jsonlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from eventjet.cli.output import Answer, Block, Fields, Lines, Table, confirm
from eventjet.cli.target import AppTarget, PersonalOption, YesOption, argument, on_app, option, switch
from eventjet.errors import UsageError
from eventjet.runtime import run_async
from eventjet.text import cut, cut_values, utc_text

if TYPE_CHECKING:
    from eventjet.operations.quarantine import Quarantine, QuarantinedEvent
    from eventjet.sql.quarantine import Listed

T = TypeVar("T")

_POLL_S = 0.2
_BODY_MAX = 10_000
"""Characters of an event's stored body that are shown."""
_RESOLUTIONS = {"retry": "to be tried again"}

commands = typer.Typer(
    name="quarantine", help="Show, retry and drop events that could not be handled.", no_args_is_help=True
)

NameArgument = Annotated[str, argument("NAME", "Whose quarantine.", "work")]
TimeoutOption = Annotated[float, option("--timeout", "SECONDS", "How long to wait for a worker.", min=0, max=3600)]


@commands.command("list")
@on_app()
def list_(
    at: AppTarget,
    name: Annotated[str | None, argument("NAME", "Default: all of the app.", "work")] = None,
    everything: Annotated[bool, switch("--all", "Also those that were retried or dropped.")] = False,
) -> Answer:
    """List quarantined events, with the number of events that each blocks."""
    from eventjet.operations.quarantine import CommandConnections, Quarantine, names_with_quarantine

    async def read() -> tuple[list[Listed], dict[str, int]]:
        events: list[Listed] = []
        revisions: dict[str, int] = {}
        async with CommandConnections(at.app(), at.settings) as connections:
            for chosen in [name] if name else names_with_quarantine(at.app()):
                quarantine = Quarantine(connections, chosen)
                batch, _ = await quarantine.listed(resolved=everything)
                events += batch
                revisions |= {event.projection: quarantine.revision for event in batch}
        return events, revisions

    events, revisions = run_async(read())
    return Answer([_value(event) for event in events], list_blocks(events, revisions, everything))


@commands.command()
@on_app()
def show(
    at: AppTarget,
    name: NameArgument,
    position: Annotated[int, argument("POSITION", "Of the event.")],
    personal: PersonalOption = False,
) -> Answer:
    """Show one event of the quarantine: its reason, the traceback, and what is stored of it."""
    event = _run(at, name, lambda quarantine: quarantine.event(position, personal=personal))
    if event is None:
        raise UsageError(
            f"The event at position {position} is not in the quarantine of {name!r}. "
            f"Look at `eventjet quarantine list {name} --all`."
        )
    value = _value(event.shown.event) | {
        "event_type": event.type,
        "traceback": event.shown.traceback,
        "payload": event.body,
        "missing": event.missing or None,
        "blocked_by": event.shown.blocked_by,
    }
    return Answer(value, event_blocks(event))


@commands.command()
@on_app()
def retry(
    at: AppTarget,
    name: NameArgument,
    positions: Annotated[list[int] | None, argument("POSITION", "Quarantined events.")] = None,
    everything: Annotated[bool, switch("--all", "All quarantined events.")] = False,
    timeout_s: TimeoutOption = 10.0,
) -> Answer:
    """Have a worker try quarantined events again, and those they block.

    Exit status 1 when one fails again, or when that is not known in time; with --timeout 0 nothing is waited for.
    """
    if bool(positions) == everything:
        raise UsageError("Name the positions of the events to try again, or give --all for every quarantined one.")
    chosen = None if everything else positions

    def run(quarantine: Quarantine) -> Coroutine[Any, Any, Answer]:
        return _outcome(quarantine, lambda: quarantine.retry(chosen), timeout_s, must_end=timeout_s > 0)

    return _run(at, name, run)


@commands.command()
@on_app()
def drop(
    at: AppTarget,
    name: NameArgument,
    positions: Annotated[list[int], argument("POSITION", "Quarantined events.")],
    yes: YesOption = False,
    timeout_s: TimeoutOption = 10.0,
) -> Answer:
    """Give quarantined events up for good: no engine will take them, and a worker goes on with those they blocked."""

    def run(quarantine: Quarantine) -> Coroutine[Any, Any, Answer]:
        question = f"Never take position {', '.join(map(str, positions))} in {name}? {quarantine.drop_effect}"
        confirm(question, yes=yes, otherwise="Nothing was dropped.")
        return _outcome(quarantine, lambda: quarantine.drop(positions), timeout_s, must_end=False)

    return _run(at, name, run)


def _run(at: AppTarget, name: str, work: Callable[[Quarantine], Coroutine[Any, Any, T]]) -> T:
    """Run work on the quarantine of this name, over connections of its own."""
    from eventjet.operations.quarantine import CommandConnections, Quarantine

    async def run() -> T:
        async with CommandConnections(at.app(), at.settings) as connections:
            return await work(Quarantine(connections, name))

    return run_async(run())


async def _outcome(
    quarantine: Quarantine, decide: Callable[[], Awaitable[list[int]]], timeout_s: float, *, must_end: bool
) -> Answer:
    """Decide, wait up to `timeout_s` for workers, and return the outcomes; with `must_end` being late is a no."""
    from eventjet.operations.quarantine import outcome_text, pending_text

    positions, deadline = await decide(), time.monotonic() + timeout_s
    while True:
        outcomes = await quarantine.outcomes(positions)
        is_open = any(outcome.is_open for outcome in outcomes)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not is_open:
            break
        await asyncio.sleep(min(_POLL_S, remaining_s))
    lines = [outcome_text(outcome) for outcome in outcomes] or ["Nothing is quarantined."]
    if is_open and timeout_s > 0:
        lines.append(
            f"Not over within {timeout_s:g} s: a worker may still be at its tries; see `eventjet quarantine list "
            f"{quarantine.name}`. Where none runs, or it is paused, the next one that works on it carries it out."
        )
    elif is_open:
        lines.append(pending_text(quarantine.name))
    failed = any(outcome.next_resolution == "quarantined" for outcome in outcomes)
    return Answer(outcomes, lines, ok=not failed and not (is_open and must_end))


def list_blocks(events: Sequence[Listed], declared_revisions: Mapping[str, int], everything: bool) -> Iterator[Block]:
    """Yield the blocks of a list of quarantined events; `declared_revisions` has the app's revision of each name."""
    if not events:
        yield "Nothing was ever quarantined." if everything else "Nothing is quarantined."
        return
    columns = ("name", "position", "aggregate", "type", "blocked", "reason")
    rows = [_row(event, declared_revisions[event.projection]) for event in events]
    if everything:
        columns = (*columns, "resolution")
        rows = [
            (*row, _RESOLUTIONS.get(event.resolution, event.resolution))
            for row, event in zip(rows, events, strict=True)
        ]
    yield Table(columns, rows)
    if any(event.revision != declared_revisions[event.projection] for event in events):
        yield "A revision that the app does not declare is shown, retried and dropped with its own code."


def _row(event: Listed, declared_revision: int) -> tuple[object, ...]:
    name = event.projection if event.revision == declared_revision else f"{event.projection}:{event.revision}"
    reason = cut(event.reason)
    reason = f"to be tried again; it failed with {reason}" if event.resolution == "retry" else reason
    aggregate = f"{event.aggregate} {event.aggregate_id}"
    return (name, event.position, aggregate, event.event_type or "?", event.blocked, reason)


def event_blocks(quarantined: QuarantinedEvent) -> Iterator[Block]:
    """Yield the blocks that show one quarantined event."""
    shown, body = quarantined.shown, quarantined.body
    event = shown.event
    resolved = "" if event.resolved_at is None else f", resolved {_time(event.resolved_at)}"
    resolution = _RESOLUTIONS.get(event.resolution, event.resolution)
    blocked_by = f"the quarantined event at position {shown.blocked_by}" if shown.blocked_by is not None else ""
    fields = {
        "position": f"{event.position} of {event.projection} revision {event.revision}",
        "event": f"{quarantined.type or '?'} {event.event_id}".rstrip(),
        "aggregate": f"{event.aggregate} {event.aggregate_id}",
        "resolution": f"{resolution}, quarantined {_time(event.quarantined_at)}{resolved}",
        "blocked by": blocked_by,
        "blocks": str(event.blocked or ""),
        "reason": cut(event.reason),
        "missing": quarantined.missing,
    }
    yield Fields([(label, text) for label, text in fields.items() if text])
    if body is not None:
        text = body if isinstance(body, str) else jsonlib.dumps(cut_values(body), ensure_ascii=False)
        yield Fields([("", ""), ("", cut(text, _BODY_MAX))])
    if shown.traceback:
        yield Lines(["", *shown.traceback.rstrip().splitlines()])


def _value(event: Listed) -> dict[str, Any]:
    resolved_at = None if event.resolved_at is None else _time(event.resolved_at)
    return asdict(event) | {"quarantined_at": _time(event.quarantined_at), "resolved_at": resolved_at}


def _time(seconds: float) -> str:
    return utc_text(datetime.fromtimestamp(seconds, UTC), "seconds")
