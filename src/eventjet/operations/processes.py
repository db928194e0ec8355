"""What processes are, do next and wait for, and how they are woken."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic_core import to_json

from eventjet.app import App
from eventjet.calls import called
from eventjet.codec.headers import VERSION, number_of, recorded_at
from eventjet.codec.json import read_json
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_shown
from eventjet.commands.repository import Repositories, open_repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.parked import BLOCKED
from eventjet.domain.personal import argument_hints, masked
from eventjet.domain.process import Call, ProcessInfo, Step, deadlines_of
from eventjet.domain.state import own_copy
from eventjet.errors import DefinitionError, Forbidden, StoreUnavailable, UnexpectedExit, Unreachable, UsageError
from eventjet.jetstream.client import Client
from eventjet.log.timers import JetStreamTimers, TimerSet, timers_due, timers_set
from eventjet.settings import Settings
from eventjet.shown import cut_values
from eventjet.spelling import listed, meant
from eventjet.subscriptions.cursor import PAUSED
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.handlers import wake
from eventjet.subscriptions.process_steps import ProcessRunner

T = TypeVar("T")

EXAMPLES_MAX = 20
"""Processes that are named of those that could not be woken."""


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


@dataclass(frozen=True, slots=True)
class Running:
    """What runs the processes of a name, over a connection."""

    runner: ProcessRunner
    timers: JetStreamTimers
    cursors: Cursors
    is_private: bool
    """Whether the app has personal fields, so that nobody knows what the text of an error shows."""
    initial: Any
    """The state of one without events."""


@asynccontextmanager
async def running(app: App, settings: Settings, name: str) -> AsyncGenerator[Running]:
    """The processes of this name over a connection of their own; raises `UsageError` for a stranger."""
    _class_of(app, name)
    async with open_repositories(app, settings) as (repositories, client):
        repositories.catalog.voids.update(await repositories.store.voids())
        yield running_over(app, repositories, client, name)


def running_over(app: App, repositories: Repositories, client: Client, name: str) -> Running:
    """`running` over a connection that is there; raises `UsageError` for a stranger."""
    cls, info = _class_of(app, name)
    runner = ProcessRunner(repositories, cls, info)
    timers, cursors = JetStreamTimers(client, app.name), Cursors(client, app.name)
    return Running(runner, timers, cursors, app.catalog.is_private, cls())


def _class_of(app: App, name: str) -> tuple[Any, ProcessInfo]:
    found = next(((cls, info) for cls, info in app.processes.items() if info.name == name), None)
    if found is None:
        known = [info.name for info in app.processes.values()]
        raise UsageError(f"The app {app.name!r} has no process {name!r}. {meant(name, known)}It has {listed(known)}.")
    return found


async def deadlines_waiting(
    client: Client, app: App, name: str | None = None, most: int | None = None
) -> list[tuple[str, TimerSet]]:
    """Process and timer of those that are set, the earliest first, and of those that are due and wait for a worker.

    `most` are read of each kind and process, those that were set or fired first; by default all. Raises `UsageError`
    for a process without deadlines.
    """
    names = [info.name for info in app.processes.values() if info.has_deadlines]
    if name is not None and name not in names:
        raise UsageError(f"{name!r} is not a process with deadlines. {meant(name, names)}There are: {listed(names)}.")
    found: list[tuple[str, TimerSet]] = []
    for each in names if name is None else [name]:
        # What fires between the two is in both, rather than in none.
        still_set = await timers_set(client, app.name, each, most)
        due = await timers_due(client, app.name, each, most)
        fired = {(one.process_id, one.at) for one in due}
        found += [(each, one) for one in still_set if (one.process_id, one.at) not in fired]
        found += [(each, one) for one in due]
    return sorted(found, key=lambda one: (one[1].at, one[0], one[1].process_id))


async def process_shown(running: Running, process_id: str) -> ProcessShown:
    """What one process is, does next and waits for. Raises `StoreUnavailable` and `Forbidden`."""
    name = running.runner.name
    found, faults = ProcessShown(name, process_id), list[str]()
    private = running.is_private
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
    found.state = masked(plain(state), type(state))
    step = asked_of("step", own_copy(state).step, faults, private=private)
    found.step = None if step is None else step_shown(step)
    due = asked_of(
        "deadline",
        lambda: [(one.due_at(recorded_at(last)), one.call.name) for one in deadlines_of(state)],
        faults,
        private=private,
    )
    found.deadlines = [{"at": shown_time(when), "decision": decision} for when, decision in sorted(due or [])]
    found.faults = faults
    return found


def asked_of(what: str, ask: Callable[[], T], faults: list[str], *, private: bool) -> T | None:
    """What a function of the application's says; what it raises is noted."""
    try:
        return ask()
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the application's
        error = UnexpectedExit.instead_of(raised)
        faults.append(f"its {what}: {_reason(error, private=private)}")
        return None


async def wake_processes(running: Running, ids: Sequence[str]) -> Woken:
    """Wake these, or all there are. Raises `StoreUnavailable`, `Unreachable` and `Forbidden`."""
    runner, name = running.runner, running.runner.name
    wanted = list(dict.fromkeys(ids)) or await _all_of(runner)
    done, examples = Woken(0, 0, 0, ()), list[dict[str, str]]()
    for process_id in wanted:
        reason = ""
        try:
            if ids and await runner.store.tail(name, process_id) is None:
                reason = "there are no events of it"
            else:
                await called(wake(runner, running.timers, process_id))
        except (StoreUnavailable, Unreachable, Forbidden):
            raise  # no other would fare better
        except Exception as error:  # noqa: BLE001 - of this one alone, and mostly the application's
            reason = _reason(error, private=running.is_private)
        done.woken += not reason
        done.failed += bool(reason)
        if reason and len(examples) < EXAMPLES_MAX:
            examples.append({"id": process_id, "reason": reason})
    done.steps, done.examples = runner.steps, examples
    return done


async def _all_of(runner: ProcessRunner) -> list[str]:
    subjects = {record[2] async for record in runner.store.records()}
    found = {process_id for aggregate, process_id in map(entity_shown, subjects) if aggregate == runner.name}
    return sorted(process_id for process_id in found if process_id is not None)


def step_shown(step: Step[Any, Any]) -> str:
    """`account ada: withdraw("4", transfer="t-1")`."""
    asked = step.asked
    return f"{aggregate_info(asked.aggregate).name} {asked.aggregate_id}: {_call_shown(asked.call)}"


def _call_shown(call: Call) -> str:
    """Each argument as the decision's annotations and its own type let it be shown."""

    def text(hint: Any, value: Any) -> str:
        return json.dumps(cut_values(masked(plain(value), hint, type(value))), ensure_ascii=False)

    kwargs = dict(call.kwargs)
    placed, named = argument_hints(call.decide, call.args, kwargs)
    told = [text(hint, value) for hint, value in zip(placed, call.args, strict=True)]
    told += [f"{name}={text(named[name], value)}" for name, value in kwargs.items()]
    return f"{call.name}({', '.join(told)})"


def plain(value: Any) -> Any:
    """As JSON has it: times and decimals as text; a state is an object."""
    try:
        return read_json(to_json(value, fallback=str, inf_nan_mode="strings", bytes_mode="base64"))
    except ValueError:
        return str(value)


def _reason(error: Exception, *, private: bool) -> str:
    return reason_of(error, private=private)


def shown_time(at: datetime) -> str:
    """`2026-01-31T12:00:00Z`."""
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
