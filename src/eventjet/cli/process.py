"""`eventjet process` and `deadlines`: what processes are, do next and wait for, and how to wake them."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, note, print_headed, print_table
from eventjet.errors import DefinitionError, Forbidden, StoreUnavailable, Unreachable, UsageError
from eventjet.shown import cut_values
from eventjet.spelling import listed, meant

if TYPE_CHECKING:
    from eventjet.cursors.kv import Cursors
    from eventjet.domain.process import Call, Step
    from eventjet.reactions.steps import ProcessRunner
    from eventjet.store.timers import JetStreamTimers

T = TypeVar("T")

_HEAD = 10
EXAMPLES_MAX = 20
"""Processes that are named of those that could not be woken."""

process = typer.Typer(name="process", help="What a process waits for; wake processes.", no_args_is_help=True)
deadlines = typer.Typer(name="deadlines", help="The timers that will wake processes.", no_args_is_help=True)

ProcessArgument = Annotated[
    str,
    typer.Argument(metavar="PROCESS", help="The name of the process type.", autocompletion=names_of("processes")),
]


@dataclass(slots=True)
class ProcessShown:
    """One process, as far as its own functions tell."""

    process: str
    id: str
    version: int = 0
    """0 where it has no events."""
    state: Any = None
    step: str | None = None
    """What it does next."""
    deadlines: Sequence[dict[str, str]] = ()
    """`at` and `decision` of each, the earliest first."""
    parked: dict[str, Any] | None = None
    """`position` and `reason` of what its next waking waits for."""
    paused: bool = False
    """Whether nothing of its type goes on."""
    faults: Sequence[str] = ()
    """What its own functions raised."""


@dataclass(slots=True)
class Woken:
    """What came of waking processes."""

    woken: int
    steps: int
    failed: int
    examples: Sequence[dict[str, str]]
    """`id` and `reason` of the first that failed."""


@process.command()
@on_app(database=False)
def show(
    at: AppTarget, name: ProcessArgument, process_id: Annotated[str, typer.Argument(metavar="ID", help="Which one.")]
) -> Answer:
    """Show what a process is, what it does next, and until when it waits; exit status 1 when it has no events."""
    found = asyncio.run(_show(at, name, process_id))
    if not found.version:
        return Answer(found, lambda: note(f"There are no events of {name} {process_id}."), ok=False)
    return Answer(found, lambda: print_headed(_lines(found), _HEAD), ok=not found.faults)


async def _show(at: AppTarget, name: str, process_id: str) -> ProcessShown:
    from eventjet.codec.envelope import VERSION, number_of, recorded_at
    from eventjet.cursors.cursor import PAUSED
    from eventjet.domain.parked import BLOCKED
    from eventjet.domain.personal import masked
    from eventjet.domain.process import deadlines_of

    found, faults = ProcessShown(name, process_id), list[str]()
    private = at.app().catalog.is_private
    async with _running(at, name) as running:
        runner = running.runner
        last = await runner.store.tail(name, process_id)
        if last is None:
            return found
        found.version = number_of(last[3], VERSION) or 0
        held = await running.cursors.find(name)
        found.paused = held is not None and held.cursor.state == PAUSED
        waiting = [entry.parked for entry in await running.cursors.parked(name) if entry.key == (name, process_id)]
        head = next((one for one in waiting if one.resolution != BLOCKED), None)
        found.parked = None if head is None else {"position": head.position, "reason": head.reason}
        try:
            state = (await runner.state(process_id)).state
        except DefinitionError as error:  # of the application's `evolve`
            found.faults = [f"its state: {fault}" for fault in error.faults]
            return found
    found.state = masked(_plain(state), type(state))
    step = _asked("step", state.step, faults, private=private)
    found.step = None if step is None else _step_shown(step)
    due = _asked(
        "deadline",
        lambda: [(one.due_at(recorded_at(last)), one.call.name) for one in deadlines_of(state)],
        faults,
        private=private,
    )
    found.deadlines = [{"at": _time(when), "decision": decision} for when, decision in sorted(due or [])]
    found.faults = faults
    return found


def _asked(what: str, ask: Callable[[], T], faults: list[str], *, private: bool) -> T | None:
    """What a function of the application's says; what it raises is noted."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the application's
        faults.append(f"its {what}: {_reason(error, private=private)}")
        return None


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
    done = asyncio.run(_sync(at, name, ids or []))
    woke = f"woke {done.woken:,}, which took {done.steps:,} steps"
    lines = [f"{woke}; {done.failed:,} could not be woken" if done.failed else woke]
    lines += [f"{name} {one['id']!r}: {one['reason']}" for one in done.examples]
    if done.failed > len(done.examples):
        lines.append(f"and {done.failed - len(done.examples):,} more")
    return Answer(done, "\n".join(lines), ok=not done.failed)


async def _sync(at: AppTarget, name: str, ids: list[str]) -> Woken:
    from eventjet.workers.followed import wake

    async with _running(at, name) as running:
        runner = running.runner
        wanted = list(dict.fromkeys(ids)) or await _all_of(runner)
        done, examples = Woken(0, 0, 0, ()), list[dict[str, str]]()
        for process_id in wanted:
            reason = ""
            try:
                if ids and await runner.store.tail(name, process_id) is None:
                    reason = "there are no events of it"
                else:
                    await wake(runner, running.timers, process_id)
            except (StoreUnavailable, Unreachable, Forbidden):
                raise  # no other would fare better
            except Exception as error:  # noqa: BLE001 - of this one alone, and mostly the application's
                reason = _reason(error, private=at.app().catalog.is_private)
            done.woken += not reason
            done.failed += bool(reason)
            if reason and len(examples) < EXAMPLES_MAX:
                examples.append({"id": process_id, "reason": reason})
        done.steps, done.examples = runner.steps, examples
        return done


async def _all_of(runner: ProcessRunner) -> list[str]:
    from eventjet.codec.subjects import entity_shown

    subjects = {record[2] async for record in runner.store.records()}
    found = {process_id for aggregate, process_id in map(entity_shown, subjects) if aggregate == runner.name}
    return sorted(process_id for process_id in found if process_id is not None)


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
    from eventjet.store.timers import TimerSet, timers_due, timers_set

    names = [info.name for info in at.app().processes.values() if info.has_deadlines]
    if name is not None and name not in names:
        raise UsageError(f"{name!r} is not a process with deadlines. {meant(name, names)}There are: {listed(names)}.")

    async def read() -> list[tuple[str, TimerSet]]:
        async with at.client() as client:
            found: list[tuple[str, TimerSet]] = []
            for each in names if name is None else [name]:
                # What fires between the two is in both, rather than in none.
                still_set = await timers_set(client, at.app().name, each)
                due = await timers_due(client, at.app().name, each)
                fired = {(one.process_id, one.at) for one in due}
                found += [(each, one) for one in still_set if (one.process_id, one.at) not in fired]
                found += [(each, one) for one in due]
        return sorted(found, key=lambda one: (one[1].at, one[0], one[1].process_id))

    found = asyncio.run(read())
    rows = [
        {"process": each, "id": timer.process_id, "until": _time(timer.at), "due": timer.due} for each, timer in found
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


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs the processes of a name, over a connection of its own."""

    runner: ProcessRunner
    timers: JetStreamTimers
    cursors: Cursors


@asynccontextmanager
async def _running(at: AppTarget, name: str) -> AsyncGenerator[_Running]:
    """Raises `UsageError` for a stranger."""
    from eventjet.cursors.kv import Cursors
    from eventjet.reactions.steps import ProcessRunner
    from eventjet.repository.repositories import open_repositories
    from eventjet.store.timers import JetStreamTimers

    app = at.app()
    found = next(((cls, info) for cls, info in app.processes.items() if info.name == name), None)
    if found is None:
        known = [info.name for info in app.processes.values()]
        raise UsageError(f"The app {app.name!r} has no process {name!r}. {meant(name, known)}It has {listed(known)}.")
    async with open_repositories(app, at.settings) as (repositories, client):
        repositories.catalog.voids.update(await repositories.store.voids())
        runner = ProcessRunner(repositories, *found)
        yield _Running(runner, JetStreamTimers(client, app.name), Cursors(client, app.name))


def _step_shown(step: Step[Any, Any]) -> str:
    """`account ada: withdraw("4", transfer="t-1")`."""
    from eventjet.domain.aggregate import aggregate_info

    asked = step.asked
    return f"{aggregate_info(asked.aggregate).name} {asked.aggregate_id}: {_call_shown(asked.call)}"


def _call_shown(call: Call) -> str:
    """Each argument as the decision's annotations and its own type let it be shown."""
    from eventjet.domain.personal import masked, parameter_hint

    def text(name: str, value: Any) -> str:
        told = masked(_plain(value), parameter_hint(call.decide, name), type(value))
        return json.dumps(cut_values(told), ensure_ascii=False)

    names = list(inspect.signature(call.decide).parameters)[1:]
    told = [text(names[index] if index < len(names) else "", value) for index, value in enumerate(call.args)]
    told += [f"{name}={text(name, value)}" for name, value in call.kwargs]
    return f"{call.name}({', '.join(told)})"


def _text(value: Any) -> str:
    return json.dumps(cut_values(_plain(value)), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """As JSON has it: times and decimals as text; a state is an object."""
    from pydantic_core import to_json

    try:
        return json.loads(to_json(value, fallback=str, inf_nan_mode="strings", bytes_mode="base64"))
    except (ValueError, RecursionError):
        return str(value)


def _reason(error: Exception, *, private: bool) -> str:
    from eventjet.codec.reasons import reason_of

    return reason_of(error, private=private)


def _time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
