"""The state, history, next step and deadlines of processes, and how operators wake them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from eventjet.app import App
from eventjet.codec.headers import VERSION, RawRecord, metadata_of, number_of, recorded_at
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_shown, subject_of
from eventjet.commands.repository import Repositories, open_repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import evolved
from eventjet.domain.personal import argument_hints, masked
from eventjet.domain.position import PAUSED
from eventjet.domain.process import Call, ProcessInfo, Step, deadlines_of
from eventjet.domain.quarantined import BLOCKED
from eventjet.domain.state import own_copy
from eventjet.errors import (
    CodecError,
    DefinitionError,
    Forbidden,
    StoreUnavailable,
    UnexpectedExit,
    Unreachable,
    UsageError,
)
from eventjet.jet import Jet
from eventjet.jetstream.api import message_at
from eventjet.jetstream.client import Client
from eventjet.log.timers import JetStreamTimers, TimerSet, timers_due, timers_set
from eventjet.operations.events import event_view, plain_json
from eventjet.operations.log import page_of_log
from eventjet.runtime import called
from eventjet.settings import Settings
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.handlers import wake
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.text import cut_values, listed, meant

T = TypeVar("T")

EXAMPLES_MAX = 20
"""Processes that could not be woken and are named, at most."""


@dataclass(slots=True)
class ProcessView:
    """The status of one process, as far as its own functions say."""

    process: str
    id: str
    version: int = 0
    """Version of its last event; 0 where it has no events."""
    state: Any = None
    step: str | None = None
    """Its next step as text, as `step_text` has it; None where it waits."""
    deadlines: Sequence[dict[str, str]] = ()
    """`at` and `decision` of each deadline, earliest first."""
    parked: dict[str, Any] | None = None
    """`position` and `reason` of the quarantined event that blocks it; None where nothing does."""
    paused: bool = False
    """Whether all processes of its type are paused."""
    faults: Sequence[str] = ()
    """Errors that its own functions raised, in words."""


@dataclass(slots=True)
class Woken:
    """The result of waking processes."""

    woken: int
    steps: int
    failed: int
    examples: Sequence[dict[str, str]]
    """`id` and `reason` of the first processes that failed."""


@dataclass(frozen=True, slots=True)
class Running:
    """The runner, timers and cursors of one process type, over one connection."""

    runner: ProcessRunner
    timers: JetStreamTimers
    cursors: Cursors
    is_private: bool
    """Whether the app has personal fields, so that the text of an error may show them."""
    initial: Any
    """The state of a process without events."""


@asynccontextmanager
async def running(app: App, settings: Settings, name: str) -> AsyncGenerator[Running]:
    """Open a connection for the processes of this name. Raises `UsageError` for a name that the app lacks."""
    _class_of(app, name)
    async with open_repositories(app, settings) as (repositories, client):
        repositories.catalog.skipped.update(await repositories.store.skip_markers())
        yield running_over(app, repositories, client, name)


def running_over(app: App, repositories: Repositories, client: Client, name: str) -> Running:
    """Return the same as `running`, over an open connection. Raises `UsageError` for a name that the app lacks."""
    cls, info = _class_of(app, name)
    runner = ProcessRunner(repositories, cls, info)
    timers, cursors = JetStreamTimers(client, app.name), Cursors(client, app.name)
    return Running(runner, timers, cursors, app.catalog.is_private, cls())


def _class_of(app: App, name: str) -> tuple[Any, ProcessInfo]:
    declared = next(((cls, info) for cls, info in app.processes.items() if info.name == name), None)
    if declared is None:
        names = [info.name for info in app.processes.values()]
        raise UsageError(f"The app {app.name!r} has no process {name!r}. {meant(name, names)}It has {listed(names)}.")
    return declared


async def deadlines_waiting(
    client: Client, app: App, name: str | None = None, limit: int | None = None
) -> list[tuple[str, TimerSet]]:
    """Return (process, timer) of the timers that are set or are due and wait for a worker, earliest first.

    At most `limit` of either kind are read for each process, those that were set or fired first; by default all. Raises
    `UsageError` for a process without deadlines.
    """
    names = [info.name for info in app.processes.values() if info.has_deadlines]
    if name is not None and name not in names:
        raise UsageError(f"{name!r} is not a process with deadlines. {meant(name, names)}There are: {listed(names)}.")
    waiting: list[tuple[str, TimerSet]] = []
    for process in names if name is None else [name]:
        # Read in this order, a timer that fires in between is in both lists, rather than in none.
        still_set = await timers_set(client, app.name, process, limit)
        due = await timers_due(client, app.name, process, limit)
        fired = {(timer.process_id, timer.at) for timer in due}
        waiting += [(process, timer) for timer in still_set if (timer.process_id, timer.at) not in fired]
        waiting += [(process, timer) for timer in due]
    return sorted(waiting, key=lambda entry: (entry[1].at, entry[0], entry[1].process_id))


async def process_view(running: Running, process_id: str) -> ProcessView:
    """Return the state, next step and deadlines of one process. Raises `StoreUnavailable` and `Forbidden`."""
    name = running.runner.name
    view, faults = ProcessView(name, process_id), list[str]()
    private = running.is_private
    runner = running.runner
    last = await runner.store.tail(name, process_id)
    if last is None:
        return view
    view.version = number_of(last[3], VERSION) or 0
    stored_cursor = await running.cursors.find(name)
    view.paused = stored_cursor is not None and stored_cursor.cursor.state == PAUSED
    waiting = [entry.parked for entry in await running.cursors.parked(name) if entry.key == (name, process_id)]
    head = next((event for event in waiting if event.resolution != BLOCKED), None)
    view.parked = None if head is None else {"position": head.position, "reason": head.reason}
    try:
        state = (await runner.state(process_id)).state
    except DefinitionError as error:  # of the application's `evolve`
        view.faults = [f"its state: {fault}" for fault in error.faults]
        return view
    view.state = masked(plain_json(state), type(state))
    step = answer_of("step", own_copy(state).step, faults, private=private)
    view.step = None if step is None else step_text(step)
    due = answer_of(
        "deadline",
        lambda: [(deadline.due_at(recorded_at(last)), deadline.call.name) for deadline in deadlines_of(state)],
        faults,
        private=private,
    )
    view.deadlines = [{"at": time_text(when), "decision": decision} for when, decision in sorted(due or [])]
    view.faults = faults
    return view


def answer_of(what: str, ask: Callable[[], T], faults: list[str], *, private: bool) -> T | None:
    """Call a function of the application; where it raises, add the error to `faults` and return None."""
    try:
        return ask()
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the application's
        error = UnexpectedExit.instead_of(raised)
        faults.append(f"its {what}: {reason_of(error, private=private)}")
        return None


async def wake_processes(running: Running, ids: Sequence[str]) -> Woken:
    """Wake these processes, or all of them without ids. Raises `StoreUnavailable`, `Unreachable` and `Forbidden`."""
    runner, name = running.runner, running.runner.name
    process_ids = list(dict.fromkeys(ids)) or await _all_ids(runner)
    done, examples = Woken(0, 0, 0, ()), list[dict[str, str]]()
    for process_id in process_ids:
        reason = ""
        try:
            if ids and await runner.store.tail(name, process_id) is None:
                reason = "there are no events of it"
            else:
                await called(wake(runner, running.timers, process_id))
        except (StoreUnavailable, Unreachable, Forbidden):
            raise  # every other process would fail likewise
        except Exception as error:  # noqa: BLE001 - of this one alone, and mostly the application's
            reason = reason_of(error, private=running.is_private)
        done.woken += not reason
        done.failed += bool(reason)
        if reason and len(examples) < EXAMPLES_MAX:
            examples.append({"id": process_id, "reason": reason})
    done.steps, done.examples = runner.steps, examples
    return done


async def _all_ids(runner: ProcessRunner) -> list[str]:
    subjects = {record[2] async for record in runner.store.records()}
    process_ids = {process_id for aggregate, process_id in map(entity_shown, subjects) if aggregate == runner.name}
    return sorted(process_id for process_id in process_ids if process_id is not None)


def step_text(step: Step[Any, Any]) -> str:
    """Return a step as text, such as `account ada: withdraw("4", transfer="t-1")`."""
    command = step.asked
    return f"{aggregate_info(command.aggregate).name} {command.aggregate_id}: {_call_text(command.call)}"


def _call_text(call: Call) -> str:
    """Return a call as text; arguments are masked by the decision's annotations and their own types."""

    def text(hint: Any, value: Any) -> str:
        return json.dumps(cut_values(masked(plain_json(value), hint, type(value))), ensure_ascii=False)

    kwargs = dict(call.kwargs)
    placed, named = argument_hints(call.decide, call.args, kwargs)
    arguments = [text(hint, value) for hint, value in zip(placed, call.args, strict=True)]
    arguments += [f"{name}={text(named[name], value)}" for name, value in kwargs.items()]
    return f"{call.name}({', '.join(arguments)})"


def time_text(at: datetime) -> str:
    """Return a time in UTC such as `2026-01-31T12:00:00Z`."""
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


HISTORY_MAX = 200
"""Events of one process that are shown, from its first on: a longer process probably never ends."""
OTHERS_MAX = 20
"""Events of another aggregate that are shown for one step."""

HEARD, STEP, DUE, ASKED = "heard", "step", "deadline", "asked"


@dataclass(slots=True)
class Moment:
    """One event of a process, with what caused it and what followed."""

    event: dict[str, Any]
    """The event as `operations.events.event_view` returns it."""
    kind: str
    """The cause: `heard` for another event, `step` for its own step, `deadline` for a deadline that fired, or `asked`
    for a decision that somebody requested."""
    cause: int | None = None
    """Position of the event that the process heard."""
    heard: dict[str, Any] | None = None
    """The event at `cause`; None where there is none, or it is missing from the log."""
    sent: str | None = None
    """The command that its step sent, as the process's functions compute it now."""
    others: Sequence[dict[str, Any]] = ()
    """The events that the other aggregate recorded in the same save."""
    deadlines: Sequence[dict[str, str]] = ()
    """`at` and `decision` of each deadline after this event, earliest first; the timer is set for the earliest."""
    faults: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The events of one process, oldest first."""

    moments: Sequence[Moment]
    more: bool
    """Whether there are later events that are not listed."""


async def process_history(jet: Jet, client: Client, running: Running, process_id: str) -> History:
    """Return the history of one process, from its first event on.

    Raises `StoreUnavailable`, `Forbidden` and `Refused`.
    """
    runner = running.runner
    await jet.skipped()
    subject = subject_of(jet.name, runner.name, process_id)
    records, remaining = await page_of_log(client, jet.name, 1, subject, HISTORY_MAX)
    moments = [_moment(jet, runner.name, process_id, record) for record in records]
    for record, moment in zip(records, moments, strict=True):
        if moment.kind == STEP:
            moment.others = await _other_events(jet, client, record)
        elif moment.cause is not None:
            cause_record = await client.ask(message_at(jet.name, moment.cause))
            moment.heard = None if cause_record is None else event_view(jet, cause_record)
    _add_steps_and_deadlines(jet, running, records, moments)
    return History(moments, remaining > 0)


def _moment(jet: Jet, name: str, process_id: str, record: RawRecord) -> Moment:
    event = event_view(jet, record)
    command = str(event.get("command_id") or "")
    heard_prefix, step_prefix = f"{name}.heard.", f"{name}/{process_id}/"
    if (
        command.startswith(heard_prefix)
        and command[len(heard_prefix) :].isdecimal()
        and len(command) < len(heard_prefix) + 20
    ):
        return Moment(event, HEARD, cause=int(command[len(heard_prefix) :]))
    if command.startswith(step_prefix) and command.endswith("/due"):
        return Moment(event, DUE)
    return Moment(event, STEP if command.startswith(step_prefix) else ASKED)


async def _other_events(jet: Jet, client: Client, record: RawRecord) -> list[dict[str, Any]]:
    """Return the other aggregate's events of a step; the same command stored them right before the process's own."""
    events: list[dict[str, Any]] = []
    command, position = _command_of(record), record[0] - 1
    while position > 0 and len(events) < OTHERS_MAX:
        previous = await client.ask(message_at(jet.name, position))
        if previous is None or _command_of(previous) != command:
            break
        if previous[2] != record[2]:
            events.append(event_view(jet, previous))
        position -= 1
    return events[::-1]


def _command_of(record: RawRecord) -> str | None:
    try:
        return metadata_of(record[3])[0]
    except ValueError:
        return None


def _add_steps_and_deadlines(
    jet: Jet, running: Running, records: Sequence[RawRecord], moments: Sequence[Moment]
) -> None:
    """Add to each moment the command of its step and its deadlines, as far as the process's functions can be called."""
    state: Any = running.initial
    private = running.is_private
    command: str | None = None
    for record, moment in zip(records, moments, strict=True):
        faults: list[str] = []
        if moment.kind == STEP:
            moment.sent = command
        try:
            recorded = jet.decode(record)
            state = state if recorded is None else evolved(own_copy(state), recorded.data)
            at = recorded_at(record)
        except (CodecError, DefinitionError) as error:
            moment.faults = [*getattr(error, "faults", [str(error)]), "What comes after it is not folded any more."]
            return
        step = answer_of("step", own_copy(state).step, faults, private=private)
        command = None if step is None else step_text(step)
        if step is None:
            due = answer_of(
                "deadline",
                lambda now=state, when=at: sorted(
                    (deadline.due_at(when), deadline.call.name) for deadline in deadlines_of(now)
                ),
                faults,
                private=private,
            )
            moment.deadlines = [{"at": time_text(when), "decision": decision} for when, decision in due or []]
        moment.faults = faults
