"""`eventjet quarantine`: what projections could not take, and what is to become of it."""

from __future__ import annotations

import asyncio
import json as jsonlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from eventjet.cli.failure import ANSWER_IS_NO, printable
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import note, print_json, print_table, say
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.quarantine.resolutions import Listed, Outcome, Shown

T = TypeVar("T")

_POLL_S = 0.2

commands = typer.Typer(help="Show, retry and drop events that a projection could not take.", no_args_is_help=True)

ProjectionArgument = Annotated[str, typer.Argument(metavar="PROJECTION", help="Whose quarantine.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0, max=3600, help="How long to wait for a worker.")
]


@dataclass(frozen=True, slots=True)
class _Quarantine:
    """One projection's, in its database."""

    at: AppTarget
    name: str
    revision: int

    def read(self, look: Callable[[Any], T]) -> T:
        return asyncio.run(_run(self.at, look, read_only=True))

    def change(self, change: Callable[[Any], T]) -> T:
        return asyncio.run(_run(self.at, change, read_only=False))


@commands.command("list")
@on_app()
def list_(
    at: AppTarget,
    projection: Annotated[str | None, typer.Argument(metavar="PROJECTION", help="Default: all of the app.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
    json: JsonOption = False,
) -> None:
    """List parked events, with the number of events that each blocks."""
    from eventjet.quarantine.resolutions import listed

    names = at.chosen([projection] if projection else [])
    found = asyncio.run(_run(at, lambda connection: listed(connection, names, resolved=everything), read_only=True))
    if json:
        print_json([_as_json(one) for one in found])
    elif not found:
        say("Nothing is parked." if not everything else "Nothing was ever parked.")
    else:
        columns = ("projection", "position", "aggregate", "type", "blocked", "reason")
        declared = {name: resolved.revision for name, resolved in at.app().projections.items()}
        rows = [_row(one, declared[one.projection], everything) for one in found]
        print_table((*columns, "resolution") if everything else columns, rows)
        if any(one.revision != declared[one.projection] for one in found):
            say("A revision that the app does not declare is shown, retried and dropped with its own code.")


@commands.command()
@on_app()
def show(
    at: AppTarget,
    projection: ProjectionArgument,
    position: Annotated[int, typer.Argument(help="Of the event.")],
    json: JsonOption = False,
) -> None:
    """Show one event of the quarantine: its reason, the traceback, and what is stored of it."""
    from eventjet.quarantine.resolutions import shown

    of = _quarantine(at, projection)
    found = of.read(lambda connection: shown(connection, of.name, of.revision, position))
    if found is None:
        raise UsageError(
            f"The event at position {position} is not in the quarantine of {projection!r}. "
            f"Look at `eventjet quarantine list {projection} --all`."
        )
    if json:
        told = {"traceback": found.traceback, "payload": _payload(found.payload), "blocked_by": found.blocked_by}
        print_json(_as_json(found.event) | told)
        return
    for line in _lines(found):
        print(line)


@commands.command()
@on_app()
def retry(
    at: AppTarget,
    projection: ProjectionArgument,
    positions: Annotated[list[int] | None, typer.Argument(metavar="[POSITION]...", help="Parked events.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All parked events.")] = False,
    timeout_s: TimeoutOption = 10.0,
    json: JsonOption = False,
) -> None:
    """Have a worker try parked events again, and those they block; exit status 1 when one fails again."""
    from eventjet.quarantine import resolutions

    if bool(positions) == everything:
        raise UsageError("Name the positions of the events to try again, or give --all for every parked one.")
    of = _quarantine(at, projection)
    chosen = of.change(lambda sync: resolutions.retry(sync, of.name, of.revision, None if everything else positions))
    _tell(_awaited(of, chosen, timeout_s), of, json=json)


@commands.command()
@on_app()
def drop(
    at: AppTarget,
    projection: ProjectionArgument,
    positions: Annotated[list[int], typer.Argument(metavar="POSITION...", help="Parked events.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    timeout_s: TimeoutOption = 10.0,
    json: JsonOption = False,
) -> None:
    """Give parked events up for good: no engine will take them, and a worker goes on with those they blocked."""
    from eventjet.quarantine import resolutions

    of = _quarantine(at, projection)
    listed = ", ".join(map(str, positions))
    if not yes:
        question = f"Never show position {listed} in {projection}? A rebuild will leave it out too."
        if not typer.confirm(question, err=True):
            note("Nothing was dropped.")
            raise typer.Exit(ANSWER_IS_NO)
    chosen = of.change(lambda sync: resolutions.drop(sync, of.name, of.revision, positions))
    _tell(_awaited(of, chosen, timeout_s), of, json=json)


def _quarantine(at: AppTarget, name: str) -> _Quarantine:
    at.chosen([name])
    return _Quarantine(at, name, at.app().projections[name].revision)


async def _run(at: AppTarget, work: Callable[[Any], T], *, read_only: bool) -> T:
    from eventjet.sql.database import READ_ONLY, Database

    where = Database(at.settings.database)
    engine = where.engine("eventjet quarantine")
    try:
        async with where.reaching(), engine.connect() as connection:
            await connection.execution_options(**{READ_ONLY: read_only})
            async with connection.begin():
                return await connection.run_sync(work)
    finally:
        await engine.dispose()


def _awaited(of: _Quarantine, chosen: Sequence[int], timeout_s: float) -> list[Outcome]:
    """What became of the verdicts, as soon as no worker has anything to do about them."""
    from eventjet.quarantine.resolutions import outcomes

    deadline = time.monotonic() + timeout_s
    while True:
        found = of.read(lambda connection: outcomes(connection, of.name, of.revision, chosen))
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not any(one.is_open for one in found):
            return found
        time.sleep(min(_POLL_S, left_s))


def _tell(found: Sequence[Outcome], of: _Quarantine, *, json: bool) -> None:
    if json:
        print_json([asdict(one) for one in found])
    elif not found:
        say("Nothing is parked.")
    else:
        for one in found:
            say(_told(one))
        if any(one.is_open for one in found):
            say(
                f"No worker has carried it out yet. One of {of.name} will: as soon as it runs, or gets to it, and not "
                "while the projection is paused."
            )
    if any(one.next_resolution == "parked" for one in found):
        raise typer.Exit(ANSWER_IS_NO)


def _told(one: Outcome) -> str:
    if one.resolution == "parked":
        return f"{one.position}: failed again: {one.reason}"
    if one.resolution == "retry":
        return f"{one.position}: to be tried again"
    done = {"retried": "taken", "dropped": "dropped"}.get(one.resolution, one.resolution)
    if one.next is None:
        return f"{one.position}: {done}, and it blocks nothing any more"
    if one.next_resolution == "retry":
        return f"{one.position}: {done}; position {one.next}, which it blocked, is to be tried"
    return f"{one.position}: {done}; position {one.next}, which it blocked, failed: {one.next_reason}"


def _row(one: Listed, declared: int, everything: bool) -> tuple[object, ...]:
    whose = f"{one.aggregate} {one.aggregate_id}"
    name = one.projection if one.revision == declared else f"{one.projection}:{one.revision}"
    row = (name, one.position, whose, one.event_type or "?", one.blocked, one.reason)
    return (*row, one.resolution) if everything else row


def _lines(found: Shown) -> list[str]:
    one = found.event
    resolved = "" if one.resolved_at is None else f", resolved {_time(one.resolved_at)}"
    lines = [
        f"position    {one.position} of {one.projection} revision {one.revision}",
        f"event       {one.event_type or '?'} {one.event_id}".rstrip(),
        f"aggregate   {one.aggregate} {one.aggregate_id}",
        f"resolution  {one.resolution}, parked {_time(one.parked_at)}{resolved}",
    ]
    if found.blocked_by is not None:
        lines.append(f"blocked by  the parked event at position {found.blocked_by}")
    if one.blocked:
        lines.append(f"blocks      {one.blocked}")
    if one.reason:
        lines.append(f"reason      {one.reason}")
    lines = [printable(line) for line in lines]
    if found.payload is not None:
        body = _payload(found.payload)
        text = body if isinstance(body, str) else jsonlib.dumps(body, ensure_ascii=False)
        lines += ["", printable(text)]
    if found.traceback:
        lines += ["", *map(printable, found.traceback.rstrip().splitlines())]
    return lines


def _as_json(one: Listed) -> dict[str, Any]:
    times = {"parked_at": _time(one.parked_at), "resolved_at": one.resolved_at and _time(one.resolved_at)}
    return asdict(one) | times


def _payload(payload: bytes | None) -> Any:
    """The JSON that is stored, else text."""
    if payload is None:
        return None
    try:
        return jsonlib.loads(payload)
    except ValueError:
        return payload.decode("utf-8", "backslashreplace")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
