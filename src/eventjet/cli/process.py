"""`eventjet process`, `deadlines` and `cursor`: what processes wait for, and how far those that follow the log are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import ANSWER_IS_NO, Answer, counted, note, print_table, say
from eventjet.errors import UsageError

if TYPE_CHECKING:
    from eventjet.reactions.following import Declaration
    from eventjet.reactions.steps import ProcessRunner
    from eventjet.store.timers import JetStreamTimers

process = typer.Typer(help="What a process waits for; wake processes.", no_args_is_help=True)
deadlines = typer.Typer(help="The timers that will wake processes.", no_args_is_help=True)
cursor = typer.Typer(help="How far reactors and processes have come.", no_args_is_help=True)

ProcessArgument = Annotated[str, typer.Argument(metavar="PROCESS", help="The name of the process type.")]


@process.command()
@on_app(database=False)
def show(
    at: AppTarget, name: ProcessArgument, process_id: Annotated[str, typer.Argument(metavar="ID", help="Which one.")]
) -> Answer:
    """Show what a process is, what it does next, and until when it waits; exit status 1 when it has no events."""
    value = asyncio.run(_show(at, name, process_id))
    lines = [f"{key:<9} {'–' if each is None else each}" for key, each in value.items()]
    return Answer(value, "\n".join(lines), ok=bool(value["version"]))


async def _show(at: AppTarget, name: str, process_id: str) -> dict[str, Any]:
    async with _running(at, name) as (runner, _):
        held = await runner.state(process_id)
        step = held.state.step()
        found = await runner.next_deadline(process_id, held)
        return {
            "process": f"{name} {process_id}",
            "version": held.version,
            "position": held.position,
            "state": repr(held.state),
            "next": None if step is None else str(step.asked),
            "deadline": None if found is None else str(found.deadline.call),
            "until": None if found is None else _time(found.at),
        }


@process.command()
@on_app(database=False)
def sync(
    at: AppTarget,
    name: ProcessArgument,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Which ones; default: all there are.")
    ] = None,
) -> Answer:
    """Wake processes: have them take the steps they should have taken, and set their timers.

    Safe at any time, beside workers too: what a process does follows from its state. For after a restore, and for lost
    timers.
    """
    woken = asyncio.run(_sync(at, name, ids or []))
    steps = sum(woken.values())
    return Answer({"woken": len(woken), "steps": steps}, f"woke {len(woken):,}, which took {steps:,} steps")


async def _sync(at: AppTarget, name: str, ids: list[str]) -> dict[str, int]:
    from eventjet.codec.subjects import entity_shown
    from eventjet.workers.followed import wake

    async with _running(at, name) as (runner, timers):
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            subjects = {record[2] async for record in runner.store.records()}
            found = {process_id for aggregate, process_id in map(entity_shown, subjects) if aggregate == name}
            wanted = sorted(process_id for process_id in found if process_id is not None)
        woken: dict[str, int] = {}
        for process_id in wanted:
            before = runner.steps
            await wake(runner, timers, process_id)
            woken[process_id] = runner.steps - before
        return woken


@deadlines.command("list")
@on_app(database=False)
def list_(at: AppTarget, name: Annotated[str | None, typer.Argument(metavar="[PROCESS]")] = None) -> Answer:
    """List the timers that are set, the earliest first."""
    from eventjet.store.timers import timers_set

    names = [info.name for info in at.app().processes.values() if info.has_deadlines]
    if name is not None and name not in names:
        raise UsageError(f"{name!r} is not a process with deadlines. There are: {', '.join(names) or 'none'}.")

    async def read() -> list[dict[str, Any]]:
        async with at.client() as client:
            wanted = names if name is None else [name]
            timers = [(each, timer) for each in wanted for timer in await timers_set(client, at.app().name, each)]
        rows = [{"process": each, "id": timer.process_id, "until": _time(timer.at)} for each, timer in timers]
        return sorted(rows, key=lambda row: str(row["until"]))

    rows = asyncio.run(read())
    if not rows:
        return Answer([], "No process waits for a deadline.")
    return Answer(rows, lambda: print_table(("process", "id", "until"), [tuple(row.values()) for row in rows]))


@cursor.command("set")
@on_app(database=False)
def set_(
    at: AppTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a reactor or a process.")],
    position: Annotated[int, typer.Argument(metavar="POSITION", min=0, help="The last that counts as done.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> Answer:
    """Put a cursor at a position of the log: after a restore, or to have effects again, or to leave some out."""
    declared = at.work([name]).followers
    if not declared:
        raise UsageError(f"{name!r} is a projection, and has a checkpoint. Rebuild it instead.")
    before, _ = asyncio.run(_set(at, declared, position, write=False))
    told = "it has no cursor yet"
    if before is not None:
        more = "be handled again" if position < before else "be left out"
        told = f"it stands at {before:,}, so what lies between will {more}"
    if not yes and not typer.confirm(f"Put {name} at position {position:,}? Now {told}.", err=True):
        note("Nothing was changed.")
        raise typer.Exit(ANSWER_IS_NO)
    _, lost = asyncio.run(_set(at, declared, position, write=True))
    if lost:
        say(f"{counted(len(lost), 'parked event')} of a log that is gone: given up (`quarantine list {name} --all`).")
    if declared[0].kind == "process":
        say(f"Run `eventjet process sync {name}`, too: it wakes the processes that are there.")
    return Answer(
        {"name": name, "position": position, "before": before, "dropped": lost},
        f"{name} goes on after position {position:,}",
    )


async def _set(
    at: AppTarget, declared: Sequence[Declaration], position: int, *, write: bool
) -> tuple[int | None, list[int]]:
    """Where it stood, and what was parked of another log."""
    from eventjet.cursors.kv import Cursors
    from eventjet.reactions.beginning import cursor_at, put, records_of, where
    from eventjet.repository.repositories import open_repositories

    async with open_repositories(at.app(), at.settings) as (repositories, client):
        wanted = await cursor_at(repositories.store, client, declared[0], position)
        cursors = Cursors(client, at.app().name)
        before = await where(cursors, declared)
        record_at = records_of(repositories.store, client, declared[0])
        return before, await put(cursors, declared, wanted, record_at) if write else []


@asynccontextmanager
async def _running(at: AppTarget, name: str) -> AsyncGenerator[tuple[ProcessRunner, JetStreamTimers]]:
    """What runs the processes of a name, over a connection of its own; raises `UsageError` for a stranger."""
    from eventjet.reactions.steps import ProcessRunner
    from eventjet.repository.repositories import open_repositories
    from eventjet.store.timers import JetStreamTimers

    app = at.app()
    found = next(((cls, info) for cls, info in app.processes.items() if info.name == name), None)
    if found is None:
        known = ", ".join(info.name for info in app.processes.values()) or "none"
        raise UsageError(f"The app {app.name!r} has no process {name!r}. It has {known}.")
    async with open_repositories(app, at.settings) as (repositories, client):
        repositories.catalog.voids.update(await repositories.store.voids())
        yield ProcessRunner(repositories, *found), JetStreamTimers(client, app.name)


def _time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
