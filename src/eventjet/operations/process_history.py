"""What a process did and why: each of its events with what led to it, what it asked for, and what came of that.

What led to an event is in its command id, which `reactions.steps` chose. What it was about to ask for, and until when
it waited, is no fact of the log: its own functions say so, as they are now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eventjet.codec.headers import RawRecord, metadata_of, recorded_at
from eventjet.codec.subjects import subject_of
from eventjet.domain.history import evolved
from eventjet.domain.process import deadlines_of
from eventjet.domain.state import own_copy
from eventjet.errors import CodecError, DefinitionError
from eventjet.jet import Jet
from eventjet.jetstream.api import message_at
from eventjet.jetstream.client import Client
from eventjet.operations.events import shown
from eventjet.operations.processes import Running, asked_of, shown_time, step_shown
from eventjet.operations.rows import page_of_log

EVENTS_MAX = 200
"""Of one process that are shown, the first ones: a process is short, or it does not come to an end."""
OTHERS_MAX = 20
"""Events of another aggregate that are shown of one step."""

HEARD, STEP, DUE, ASKED = "heard", "step", "deadline", "asked"


@dataclass(slots=True)
class Moment:
    """One event of a process."""

    event: dict[str, Any]
    """As `operations.events.shown` has it."""
    kind: str
    """What led to it: an event that it heard, its own step, a deadline that fired, or a decision that somebody asked
    for."""
    cause: int | None = None
    """Position of the event that it heard."""
    heard: dict[str, Any] | None = None
    """That event; None where there is none, or it is gone."""
    sent: str | None = None
    """The command that its step sent, as its own functions say now."""
    others: Sequence[dict[str, Any]] = ()
    """What the other aggregate recorded in the same save."""
    deadlines: Sequence[dict[str, str]] = ()
    """`at` and `decision` of what it waits for after it; the timer is set for the earliest."""
    faults: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The moments of one process, oldest first."""

    moments: Sequence[Moment]
    more: bool
    """Whether there are later ones."""


async def process_history(jet: Jet, client: Client, running: Running, process_id: str) -> History:
    """What one process did, from its first event on. Raises `StoreUnavailable`, `Forbidden` and `Refused`."""
    runner = running.runner
    await jet.voids()
    subject = subject_of(jet.name, runner.name, process_id)
    records, left = await page_of_log(client, jet.name, 1, subject, EVENTS_MAX)
    moments = [_moment(jet, runner.name, process_id, record) for record in records]
    for record, moment in zip(records, moments, strict=True):
        if moment.kind == STEP:
            moment.others = await _others(jet, client, record)
        elif moment.cause is not None:
            heard = await client.ask(message_at(jet.name, moment.cause))
            moment.heard = None if heard is None else shown(jet, heard)
    _tell_states(jet, running, records, moments)
    return History(moments, left > 0)


def _moment(jet: Jet, name: str, process_id: str, record: RawRecord) -> Moment:
    event = shown(jet, record)
    command = str(event.get("command_id") or "")
    heard, own = f"{name}.heard.", f"{name}/{process_id}/"
    if command.startswith(heard) and command[len(heard) :].isdecimal() and len(command) < len(heard) + 20:
        return Moment(event, HEARD, cause=int(command[len(heard) :]))
    if command.startswith(own) and command.endswith("/due"):
        return Moment(event, DUE)
    return Moment(event, STEP if command.startswith(own) else ASKED)


async def _others(jet: Jet, client: Client, record: RawRecord) -> list[dict[str, Any]]:
    """The other aggregate's events of a step: stored right before the process's own, by the same command."""
    found: list[dict[str, Any]] = []
    command, position = _command_of(record), record[0] - 1
    while position > 0 and len(found) < OTHERS_MAX:
        other = await client.ask(message_at(jet.name, position))
        if other is None or _command_of(other) != command:
            break
        if other[2] != record[2]:
            found.append(shown(jet, other))
        position -= 1
    return found[::-1]


def _command_of(record: RawRecord) -> str | None:
    try:
        return metadata_of(record[3])[0]
    except ValueError:
        return None


def _tell_states(jet: Jet, running: Running, records: Sequence[RawRecord], moments: Sequence[Moment]) -> None:
    """Add what each state asked for, and until when it waited, as far as its functions can say."""
    state: Any = running.initial
    private = running.is_private
    asked: str | None = None
    for record, moment in zip(records, moments, strict=True):
        faults: list[str] = []
        if moment.kind == STEP:
            moment.sent = asked
        try:
            recorded = jet.decode(record)
            state = state if recorded is None else evolved(own_copy(state), recorded.data)
            at = recorded_at(record)
        except (CodecError, DefinitionError) as error:
            moment.faults = [*getattr(error, "faults", [str(error)]), "What comes after it is not folded any more."]
            return
        step = asked_of("step", own_copy(state).step, faults, private=private)
        asked = None if step is None else step_shown(step)
        if step is None:
            due = asked_of(
                "deadline",
                lambda now=state, when=at: sorted((one.due_at(when), one.call.name) for one in deadlines_of(now)),
                faults,
                private=private,
            )
            moment.deadlines = [{"at": shown_time(when), "decision": decision} for when, decision in due or []]
        moment.faults = faults
