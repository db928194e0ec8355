"""The state, history, next step and deadlines of processes, and how operators wake them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar

from eventjet.app import App
from eventjet.codec.headers import VERSION, RawRecord, metadata_of, number_of, recorded_at
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_shown, subject_of, timer_stream
from eventjet.commands.repository import Repositories, open_repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import evolved
from eventjet.domain.personal import argument_hints, masked
from eventjet.domain.position import PAUSED
from eventjet.domain.process import Call, ProcessInfo, Step, deadlines_of, step_of
from eventjet.domain.quarantined import BLOCKED
from eventjet.domain.state import own_copy
from eventjet.errors import (
    CodecError,
    DefinitionError,
    Forbidden,
    LogUnusable,
    StoreUnavailable,
    UnexpectedExit,
    Unreachable,
    UsageError,
)
from eventjet.jet import Jet
from eventjet.jetstream.api import message_at
from eventjet.jetstream.client import Client
from eventjet.log.timers import JetStreamTimers, TimerSet, timers_due, timers_set
from eventjet.log.topology import finding_stream
from eventjet.operations.events import event_view, plain_json
from eventjet.operations.log import page_of_log
from eventjet.runtime import called
from eventjet.settings import Settings
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.handlers import wake
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.text import cut_values, listed, suggestion, utc_text

T = TypeVar("T")

EXAMPLES_MAX = 20
"""Processes that could not be woken and are named, at most."""
HISTORY_MAX = 200
"""Events of one process that are shown, from its first on: a longer process probably never ends."""
_OTHERS_MAX = 20
"""Events of another aggregate that are shown for one step."""
_TIMERS_MAX = 100
"""Timers of each kind that `deadlines_by_process` reads for a process type."""
_FIRST_MAX = 20


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
    quarantined: dict[str, Any] | None = None
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


@dataclass(slots=True)
class Moment:
    """One event of a process, with what caused it and what followed."""

    event: dict[str, Any]
    """The event as `operations.events.event_view` returns it."""
    kind: Literal["input", "step", "deadline", "request"]
    """The cause: another event, its own step, a deadline that fired, or a decision that somebody requested."""
    cause: int | None = None
    """Position of the event that was its input."""
    input: dict[str, Any] | None = None
    """The event at `cause`; None where there is none, or it is missing from the log."""
    command: str | None = None
    """The command that its step sent, as the process's functions compute it now."""
    others: Sequence[dict[str, Any]] = ()
    """The events that the other aggregate recorded in the same save."""
    deadlines: Sequence[dict[str, str]] = ()
    """`at` and `decision` of each deadline after this event, earliest first; the timer is set for the earliest."""
    faults: Sequence[str] = ()


@asynccontextmanager
async def open_processes(app: App, settings: Settings, name: str) -> AsyncGenerator[Processes]:
    """Open a connection for the processes of this name. Raises `UsageError` for a name that the app lacks."""
    process_class(app, name)
    async with open_repositories(app, settings) as (repositories, client):
        repositories.catalog.skipped.update(await repositories.store.skip_markers())
        yield Processes(app, repositories, client, name)


class Processes:
    """The processes of one type, over an open connection."""

    def __init__(self, app: App, repositories: Repositories, client: Client, name: str) -> None:
        """Choose the type of this name. Raises `UsageError` for a name that the app lacks."""
        cls, info = process_class(app, name)
        self.name = name
        self._runner = ProcessRunner(repositories, cls, info)
        self._client = client
        self._timers, self._cursors = JetStreamTimers(client, app.name), Cursors(client, app.name)
        self._initial: Any = cls()
        self._is_private = app.catalog.is_private

    async def view(self, process_id: str) -> ProcessView:
        """Return the state, next step and deadlines of one process. Raises `StoreUnavailable` and `Forbidden`."""
        view, faults = ProcessView(self.name, process_id), list[str]()
        last = await self._runner.store.tail(self.name, process_id)
        if last is None:
            return view
        view.version = number_of(last[3], VERSION) or 0
        stored_cursor = await self._cursors.find(self.name)
        view.paused = stored_cursor is not None and stored_cursor.cursor.state == PAUSED
        entries = await self._cursors.quarantined(self.name)
        waiting = [entry.event for entry in entries if entry.key == (self.name, process_id)]
        head = next((event for event in waiting if event.resolution != BLOCKED), None)
        view.quarantined = None if head is None else {"position": head.position, "reason": head.reason}
        try:
            state = (await self._runner.state(process_id)).state
        except DefinitionError as error:  # of the application's `evolve`
            view.faults = [f"its state: {fault}" for fault in error.faults]
            return view
        view.state = masked(plain_json(state), type(state))
        view.step = self._step(state, faults)
        view.deadlines = self._deadlines(state, recorded_at(last), faults)
        view.faults = faults
        return view

    async def history(self, jet: Jet, process_id: str) -> tuple[list[Moment], bool]:
        """Return the first events of one process, oldest first, and whether there are later ones."""
        await jet.skipped()
        subject = subject_of(jet.name, self.name, process_id)
        records, remaining = await page_of_log(self._client, jet.name, 1, subject, HISTORY_MAX)
        moments = [_moment(jet, self.name, process_id, record) for record in records]
        for record, moment in zip(records, moments, strict=True):
            if moment.kind == "step":
                moment.others = await self._other_events(jet, record)
            elif moment.cause is not None:
                cause_record = await self._client.ask(message_at(jet.name, moment.cause))
                moment.input = None if cause_record is None else event_view(jet, cause_record)
        self._add_steps_and_deadlines(jet, records, moments)
        return moments, remaining > 0

    async def wake(self, ids: Sequence[str]) -> Woken:
        """Wake these processes, or all without ids. Raises `StoreUnavailable`, `Unreachable` and `Forbidden`."""
        done, examples = Woken(0, 0, 0, ()), list[dict[str, str]]()
        for process_id in list(dict.fromkeys(ids)) or await self._all_ids():
            reason = ""
            try:
                if ids and await self._runner.store.tail(self.name, process_id) is None:
                    reason = "there are no events of it"
                else:
                    await called(wake(self._runner, self._timers, process_id))
            except (StoreUnavailable, Unreachable, Forbidden):
                raise  # every other process would fail likewise
            except Exception as error:  # noqa: BLE001 - of this one alone, and mostly the application's
                reason = reason_of(error, private=self._is_private)
            done.woken += not reason
            done.failed += bool(reason)
            if reason and len(examples) < EXAMPLES_MAX:
                examples.append({"id": process_id, "reason": reason})
        done.steps, done.examples = self._runner.steps, examples
        return done

    async def _all_ids(self) -> list[str]:
        subjects = {record[2] async for record in self._runner.store.records()}
        process_ids = {process_id for aggregate, process_id in map(entity_shown, subjects) if aggregate == self.name}
        return sorted(process_id for process_id in process_ids if process_id is not None)

    def _step(self, state: Any, faults: list[str]) -> str | None:
        """Return the next step from a state as text; None where it waits, or its function fails."""
        step = self._answer("step", lambda: step_of(state), faults)
        return None if step is None else step_text(step)

    def _deadlines(self, state: Any, at: datetime, faults: list[str]) -> list[dict[str, str]]:
        """Return the deadlines of a state after its event at this time, earliest first."""
        due = self._answer(
            "deadline",
            lambda: sorted((deadline.due_at(at), deadline.call.name) for deadline in deadlines_of(state)),
            faults,
        )
        return [{"at": utc_text(when, "seconds"), "decision": decision} for when, decision in due or []]

    def _answer(self, function: str, ask: Callable[[], T], faults: list[str]) -> T | None:
        """Call a function of the application; where it raises, add the error to `faults` and return None."""
        try:
            return ask()
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the application's
            error = UnexpectedExit.instead_of(raised)
            faults.append(f"its {function}: {reason_of(error, private=self._is_private)}")
            return None

    async def _other_events(self, jet: Jet, record: RawRecord) -> list[dict[str, Any]]:
        """Return the other aggregate's events of a step; its command stored them right before the process's own."""
        events: list[dict[str, Any]] = []
        command, position = _command_of(record), record[0] - 1
        while position > 0 and len(events) < _OTHERS_MAX:
            previous = await self._client.ask(message_at(jet.name, position))
            if previous is None or _command_of(previous) != command:
                break
            if previous[2] != record[2]:
                events.append(event_view(jet, previous))
            position -= 1
        return events[::-1]

    def _add_steps_and_deadlines(self, jet: Jet, records: Sequence[RawRecord], moments: Sequence[Moment]) -> None:
        """Add the commands of steps and the deadlines, as far as the process's functions can be called."""
        state, command = self._initial, None
        for record, moment in zip(records, moments, strict=True):
            if moment.kind == "step":
                moment.command = command
            try:
                recorded = jet.decode(record)
                state = state if recorded is None else evolved(own_copy(state), recorded.data)
                at = recorded_at(record)
            except (CodecError, DefinitionError) as error:
                moment.faults = [*getattr(error, "faults", [str(error)]), "What comes after it is not folded any more."]
                return
            faults: list[str] = []
            command = self._step(state, faults)
            if command is None:
                moment.deadlines = self._deadlines(state, at, faults)
            moment.faults = faults


def process_class(app: App, name: str) -> tuple[Any, ProcessInfo]:
    """Return the process of this name, class and declaration. Raises `UsageError` for a name that the app lacks."""
    declared = next(((cls, info) for cls, info in app.processes.items() if info.name == name), None)
    if declared is None:
        names = [info.name for info in app.processes.values()]
        raise UsageError(
            f"The app {app.name!r} has no process {name!r}. {suggestion(name, names)}It has {listed(names)}."
        )
    return declared


def event_names(app: App, event_types: Collection[type]) -> list[str]:
    """Return the stored names of these event types, sorted."""
    return sorted(kind.info.name for kind in app.catalog.kinds() if kind.event_type in event_types)


def _moment(jet: Jet, name: str, process_id: str, record: RawRecord) -> Moment:
    event = event_view(jet, record)
    command = str(event.get("command_id") or "")
    cause, step_prefix = command.removeprefix(f"{name}.heard."), f"{name}/{process_id}/"
    if cause != command and cause.isdecimal() and len(cause) < 20:
        return Moment(event, "input", cause=int(cause))
    if command.startswith(step_prefix):
        return Moment(event, "deadline" if command.endswith("/due") else "step")
    return Moment(event, "request")


def _command_of(record: RawRecord) -> str | None:
    try:
        return metadata_of(record[3])[0]
    except ValueError:
        return None


async def deadlines_waiting(
    client: Client, app: App, name: str | None = None, limit: int | None = None
) -> list[tuple[str, TimerSet]]:
    """Return (process, timer) of the timers that are set or are due and wait for a worker, earliest first.

    At most `limit` of either kind are read for each process, those that were set or fired first; by default all. Raises
    `UsageError` for a process without deadlines, and `LogUnusable` where the stream of timers does not exist.
    """
    names = [info.name for info in app.processes.values() if info.has_deadlines]
    if name is not None and name not in names:
        raise UsageError(
            f"{name!r} is not a process with deadlines. {suggestion(name, names)}There are: {listed(names)}."
        )
    waiting: list[tuple[str, TimerSet]] = []
    for process in names if name is None else [name]:
        # Read in this order, a timer that fires in between is in both lists, rather than in none.
        still_set = await timers_set(client, app.name, process, limit)
        due = await timers_due(client, app.name, process, limit)
        fired = {(timer.process_id, timer.at) for timer in due}
        waiting += [(process, timer) for timer in still_set if (timer.process_id, timer.at) not in fired]
        waiting += [(process, timer) for timer in due]
    if names and not waiting and await client.run(finding_stream(timer_stream(app.name))) is None:
        raise LogUnusable(
            f"The stream {timer_stream(app.name)!r}",
            "it does not exist, so it is not known which deadlines wait",
            "Run `eventjet init`, which makes it. `eventjet process sync NAME` then sets lost timers again.",
        )
    return sorted(waiting, key=lambda entry: (entry[1].at, entry[0], entry[1].process_id))


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The timers of one process type, of which at most 100 of each kind are read."""

    waiting: int
    due: int
    """Timers that have fired and that no worker has handled yet."""
    is_cut: bool
    """Whether there may be more timers."""
    first: Sequence[TimerSet]
    """The earliest 20 of the timers that were read."""


async def deadlines_by_process(client: Client, app: App) -> dict[str, Deadlines]:
    """Return the timers of every process type with deadlines. Raises as `deadlines_waiting`, and `Forbidden`."""
    entries = await deadlines_waiting(client, app, limit=_TIMERS_MAX)
    deadlines: dict[str, Deadlines] = {}
    for info in app.processes.values():
        if info.has_deadlines:
            timers = [timer for process, timer in entries if process == info.name]
            due = sum(timer.due for timer in timers)
            is_cut = max(due, len(timers) - due) >= _TIMERS_MAX
            deadlines[info.name] = Deadlines(len(timers) - due, due, is_cut, timers[:_FIRST_MAX])
    return deadlines


def step_text(step: Step[Any, Any]) -> str:
    """Return a step as text, such as `account ada: withdraw("4", transfer="t-1")`."""
    command = step.request
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
