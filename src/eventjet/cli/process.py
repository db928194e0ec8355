"""`eventjet process` and `deadlines`: what processes are, do next and wait for, and how to wake them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, note, print_headed, print_table
from eventjet.shown import cut_values

if TYPE_CHECKING:
    from eventjet.operations.processes import ProcessShown

_HEAD = 10

process = typer.Typer(name="process", help="What a process waits for; wake processes.", no_args_is_help=True)
deadlines = typer.Typer(name="deadlines", help="The timers that will wake processes.", no_args_is_help=True)

ProcessArgument = Annotated[
    str,
    typer.Argument(metavar="PROCESS", help="The name of the process type.", autocompletion=names_of("processes")),
]


@process.command()
@on_app(database=False)
def show(
    at: AppTarget, name: ProcessArgument, process_id: Annotated[str, typer.Argument(metavar="ID", help="Which one.")]
) -> Answer:
    """Show what a process is, what it does next, and until when it waits; exit status 1 when it has no events."""
    from eventjet.operations.processes import process_shown, running

    async def look() -> ProcessShown:
        async with running(at.app(), at.settings, name) as processes:
            return await process_shown(processes, process_id)

    found = asyncio.run(look())
    if not found.version:
        return Answer(found, lambda: note(f"There are no events of {name} {process_id}."), ok=False)
    return Answer(found, lambda: print_headed(_lines(found), _HEAD), ok=not found.faults)


def _lines(found: ProcessShown) -> list[str]:
    whose = f"{found.process} {found.id}"
    lines = [f"process   {whose}", f"version   {found.version}"]
    state: Any = found.state
    fields = cast("dict[str, Any]", state) if isinstance(state, dict) else {"value": state}
    told = [f"{key}: {_text(value)}" for key, value in fields.items()]
    lines += [f"{'state' if n == 0 else '':<9} {line}" for n, line in enumerate(told)]
    lines.append(f"next      {found.step or '–'}")
    lines += [f"deadline  {one['at']}  {one['decision']}" for one in found.deadlines] or ["deadline  –"]
    if found.parked is not None:
        position, reason = found.parked["position"], found.parked["reason"]
        see = f"eventjet quarantine show {found.process} {position}"
        lines.append(f"parked    at position {position}: {reason}; see `{see}`")
    if found.paused:
        lines.append(f"paused    nothing of {found.process} goes on until `eventjet resume {found.process}`")
    return [*lines, *(f"fault     {found.process} {found.id!r}, {fault}" for fault in found.faults)]


@process.command()
@on_app(database=False)
def sync(
    at: AppTarget,
    name: ProcessArgument,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Which ones; default: all there are.")] = None,
) -> Answer:
    """Wake processes: have them take the steps they should have taken, and set their timers.

    Safe at any time, beside workers too: what a process does follows from its state. For after a restore, and for lost
    timers. Those that cannot be woken are named, the others are; then the exit status is 1.
    """
    from eventjet.operations.processes import Woken, running, wake_processes

    async def wake() -> Woken:
        async with running(at.app(), at.settings, name) as processes:
            return await wake_processes(processes, ids or [])

    done = asyncio.run(wake())
    woke = f"woke {done.woken:,}, which took {done.steps:,} steps"
    lines = [f"{woke}; {done.failed:,} could not be woken" if done.failed else woke]
    lines += [f"{name} {one['id']!r}: {one['reason']}" for one in done.examples]
    if done.failed > len(done.examples):
        lines.append(f"and {done.failed - len(done.examples):,} more")
    return Answer(done, "\n".join(lines), ok=not done.failed)


@deadlines.command("list")
@on_app(database=False)
def list_(
    at: AppTarget,
    name: Annotated[
        str | None,
        typer.Argument(metavar="PROCESS", help="Default: all of the app.", autocompletion=names_of("processes")),
    ] = None,
) -> Answer:
    """List the timers that are set, the earliest first, and those that are due and wait for a worker."""
    from eventjet.log.timers import TimerSet
    from eventjet.operations.processes import deadlines_waiting, shown_time

    async def read() -> list[tuple[str, TimerSet]]:
        async with at.client() as client:
            return await deadlines_waiting(client, at.app(), name)

    found = asyncio.run(read())
    rows = [
        {"process": each, "id": timer.process_id, "until": shown_time(timer.at), "due": timer.due}
        for each, timer in found
    ]
    if not rows:
        return Answer([], "No process waits for a deadline.")
    return Answer(rows, lambda: _print_deadlines(rows))


def _print_deadlines(rows: Sequence[dict[str, Any]]) -> None:
    late = "due since {}, no worker has dealt with it"
    print_table(
        ("process", "id", "until"),
        [(row["process"], row["id"], late.format(row["until"]) if row["due"] else row["until"]) for row in rows],
    )


def _text(value: Any) -> str:
    from eventjet.operations.processes import plain

    return json.dumps(cut_values(plain(value)), ensure_ascii=False)
