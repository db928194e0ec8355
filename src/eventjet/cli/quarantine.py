"""`eventjet quarantine`: what projections, reactors and processes could not take, and what is to become of it."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.history import PersonalOption
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import ANSWER_IS_NO, Answer, note, print_headed, print_table, say
from eventjet.errors import UsageError
from eventjet.shown import cut, cut_values, printable

if TYPE_CHECKING:
    from eventjet.operations.quarantines import Quarantine, StoredEvent
    from eventjet.sql.quarantine import Listed, Shown

_HEAD = 12
_POLL_S = 0.2
_BODY_MAX = 10_000
"""Characters of what is stored of an event."""
_RESOLUTIONS = {"retry": "to be tried again"}

commands = typer.Typer(
    name="quarantine", help="Show, retry and drop events that could not be taken.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Whose quarantine.", autocompletion=names_of("work"))]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0, max=3600, help="How long to wait for a worker.")
]


@commands.command("list")
@on_app()
def list_(
    at: AppTarget,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Default: all of the app.", autocompletion=names_of("work")),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
) -> Answer:
    """List parked events, with the number of events that each blocks."""
    chosen = at.work([name] if name else [])
    every = [*(one.name for one in chosen.projections), *(one.declared_as for one in chosen.followers)]
    asked = [name] if name else dict.fromkeys(every)
    events = [event for each in asked for event in _quarantine(at, each).listed(resolved=everything)]
    declared = {one.name: one.revision for one in (*chosen.projections, *chosen.followers)}
    return Answer([_as_json(event) for event in events], lambda: _print(events, declared, everything))


@commands.command()
@on_app()
def show(
    at: AppTarget,
    name: NameArgument,
    position: Annotated[int, typer.Argument(metavar="POSITION", help="Of the event.")],
    personal: PersonalOption = False,
) -> Answer:
    """Show one event of the quarantine: its reason, the traceback, and what is stored of it."""
    from eventjet.operations.events import stored_json

    quarantine = _quarantine(at, name)
    found = quarantine.shown(position)
    if found is None:
        raise UsageError(
            f"The event at position {position} is not in the quarantine of {name!r}. "
            f"Look at `eventjet quarantine list {name} --all`."
        )
    stored = quarantine.stored(found)
    body = None if stored.body is None else stored_json(stored.body)
    if body is not None and not personal:
        body = at.app().catalog.masked(stored.type, stored.schema, body)
    whole = {
        "event_type": stored.type,
        "traceback": found.traceback,
        "payload": body,
        "missing": stored.missing or None,
        "blocked_by": found.blocked_by,
    }
    return Answer(_as_json(found.event) | whole, lambda: _print_one(found, stored, body))


@commands.command()
@on_app()
def retry(
    at: AppTarget,
    name: NameArgument,
    positions: Annotated[list[int] | None, typer.Argument(metavar="POSITION", help="Parked events.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All parked events.")] = False,
    timeout_s: TimeoutOption = 10.0,
) -> Answer:
    """Have a worker try parked events again, and those they block.

    Exit status 1 when one fails again, or when that is not known in time; with --timeout 0 nothing is waited for.
    """
    if bool(positions) == everything:
        raise UsageError("Name the positions of the events to try again, or give --all for every parked one.")
    chosen = _quarantine(at, name).retry(None if everything else positions)
    return _outcome_of(at, name, chosen, timeout_s, waited=timeout_s > 0)


@commands.command()
@on_app()
def drop(
    at: AppTarget,
    name: NameArgument,
    positions: Annotated[list[int], typer.Argument(metavar="POSITION", help="Parked events.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    timeout_s: TimeoutOption = 10.0,
) -> Answer:
    """Give parked events up for good: no engine will take them, and a worker goes on with those they blocked."""
    quarantine = _quarantine(at, name)
    if not yes:
        listed = ", ".join(map(str, positions))
        question = f"Never take position {listed} in {name}? {quarantine.what_dropping_means}"
        if not typer.confirm(question, err=True):
            note("Nothing was dropped.")
            raise typer.Exit(ANSWER_IS_NO)
    return _outcome_of(at, name, quarantine.drop(positions), timeout_s, waited=False)


def _quarantine(at: AppTarget, name: str) -> Quarantine:
    from eventjet.operations.quarantines import quarantine_of

    return quarantine_of(at.app(), at.settings, name)


def _outcome_of(at: AppTarget, name: str, chosen: Sequence[int], timeout_s: float, *, waited: bool) -> Answer:
    """What became of the verdicts, as soon as no worker has anything to do about them.

    Where that was `waited` for, and is not known in time, the answer is no.
    """
    from eventjet.operations.quarantines import not_yet, told

    deadline = time.monotonic() + timeout_s
    while True:
        found = _quarantine(at, name).outcomes(chosen)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not any(outcome.is_open for outcome in found):
            break
        time.sleep(min(_POLL_S, left_s))
    lines = [told(outcome) for outcome in found] or ["Nothing is parked."]
    is_open = any(outcome.is_open for outcome in found)
    if is_open and timeout_s > 0:
        lines.append(
            f"Not over within {timeout_s:g} s: a worker may still be at its tries; see `eventjet quarantine list "
            f"{name}`. Where none runs, or it is paused, the next one that works on it carries it out."
        )
    elif is_open:
        lines.append(not_yet(name))
    failed = any(outcome.next_resolution == "parked" for outcome in found)
    return Answer(found, "\n".join(lines), ok=not failed and not (is_open and waited))


def _print(events: Sequence[Listed], declared: Mapping[str, int], everything: bool) -> None:
    if not events:
        say("Nothing was ever parked." if everything else "Nothing is parked.")
        return
    columns = ("name", "position", "aggregate", "type", "blocked", "reason")
    rows = [_row(event, declared[event.projection], everything) for event in events]
    print_table((*columns, "resolution") if everything else columns, rows)
    if any(event.revision != declared[event.projection] for event in events):
        say("A revision that the app does not declare is shown, retried and dropped with its own code.")


def _row(one: Listed, declared: int, everything: bool) -> tuple[object, ...]:
    whose = f"{one.aggregate} {one.aggregate_id}"
    name = one.projection if one.revision == declared else f"{one.projection}:{one.revision}"
    reason = f"to be tried again; it failed with {cut(one.reason)}" if one.resolution == "retry" else cut(one.reason)
    row = (name, one.position, whose, one.event_type or "?", one.blocked, reason)
    return (*row, one.resolution) if everything else row


def _print_one(found: Shown, stored: StoredEvent, body: Any) -> None:
    event = found.event
    resolved = "" if event.resolved_at is None else f", resolved {_time(event.resolved_at)}"
    resolution = _RESOLUTIONS.get(event.resolution, event.resolution)
    lines = [
        f"position    {event.position} of {event.projection} revision {event.revision}",
        f"event       {stored.type or '?'} {event.event_id}".rstrip(),
        f"aggregate   {event.aggregate} {event.aggregate_id}",
        f"resolution  {resolution}, parked {_time(event.parked_at)}{resolved}",
    ]
    if found.blocked_by is not None:
        lines.append(f"blocked by  the parked event at position {found.blocked_by}")
    if event.blocked:
        lines.append(f"blocks      {event.blocked}")
    if event.reason:
        lines.append(f"reason      {cut(event.reason)}")
    if stored.missing:
        lines.append(f"missing     {stored.missing}")
    print_headed(lines, _HEAD)
    if body is not None:
        text = body if isinstance(body, str) else jsonlib.dumps(cut_values(body), ensure_ascii=False)
        print_headed(["", cut(text, _BODY_MAX)], 0)
    if found.traceback:
        # Its lines are whole, as Python prints them.
        print("", *map(printable, found.traceback.rstrip().splitlines()), sep="\n")


def _as_json(event: Listed) -> dict[str, Any]:
    resolved_at = None if event.resolved_at is None else _time(event.resolved_at)
    return asdict(event) | {"parked_at": _time(event.parked_at), "resolved_at": resolved_at}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
