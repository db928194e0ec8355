"""`settled` waits until a process instance has come to its end, and says what it waits for when it has not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from typing import Any

from eventjet.codec.headers import TYPE, RawRecord, header, recorded_at
from eventjet.commands.execute import Executor
from eventjet.domain.aggregate import AggregateInfo
from eventjet.domain.history import FoldedState
from eventjet.domain.position import FAILED, PAUSED
from eventjet.domain.process import deadlines_of, step_of
from eventjet.domain.quarantined import QUARANTINED
from eventjet.domain.state import own_copy
from eventjet.errors import EventjetError, NotSettled
from eventjet.jetstream.client import Client
from eventjet.subscriptions.cursor_store import Cursors

_PAUSES_S = (0.01, 1.0)
"""The pause before the next look: the first one after an event of the process, then twice as long each time."""
_SILENT_S = 4.0
"""A cursor that nobody has written for so long has no worker: a worker renews its lease every second or so."""


async def settled(
    executor: Executor[Any, Any],
    client: Client,
    process_id: str,
    *,
    timeout_s: float,
    until: Callable[[Any], bool] | None,
) -> Any:
    """Return the state of a process instance once it is settled; raises `NotSettled` after `timeout_s` seconds.

    It looks again as soon as an event of the instance is published, and once a second, since messages may be lost.
    """
    began = time.monotonic()
    name, cursors = executor.info.name, Cursors(client, executor.app)
    folded = await executor.newest(process_id)
    if is_settled(folded, until):
        return own_copy(folded.state)
    first_sequence: int | None = None
    with suppress(EventjetError):
        stored = await cursors.find(name)
        first_sequence = None if stored is None else stored.sequence
    async with _published(client, executor.subject(process_id)) as published:
        pause_s = _PAUSES_S[0]
        while (remaining_s := began + timeout_s - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, remaining_s)):
                    await published.wait()
            pause_s = _PAUSES_S[0] if published.is_set() else min(2 * pause_s, _PAUSES_S[1])
            published.clear()
            folded = await executor.newest(process_id)
            if is_settled(folded, until):
                return own_copy(folded.state)
    record = await executor.store.tail(name, process_id)
    waited_s = time.monotonic() - began
    obstacle = await _obstacle(cursors, executor.info, process_id, first_sequence, waited_s)
    reason = obstacle or waits_for(folded, record)
    raise not_settled(name, process_id, timeout_s, folded, record, reason)


def is_settled(folded: FoldedState[Any], until: Callable[[Any], bool] | None) -> bool:
    """Return whether an instance has begun and `until` holds; by default, that no step and no deadline follow."""
    if until is not None:
        return folded.version > 0 and until(own_copy(folded.state))
    return folded.version > 0 and step_of(folded.state) is None and not deadlines_of(folded.state)


def waits_for(folded: FoldedState[Any], record: RawRecord | None) -> str:
    """Return in words what an instance waits for by its own functions."""
    if record is None:
        return "it has no events"
    step = step_of(folded.state)
    if step is not None:
        return f"its next step is not taken yet: {step.request}"
    last = recorded_at(record)
    deadlines = sorted((deadline.due_at(last), deadline.call.name) for deadline in deadlines_of(folded.state))
    if not deadlines:
        return "it rests, without a step and a deadline"
    at, decision = deadlines[0]
    return f"it waits for its deadline, {decision}, at {at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def not_settled(
    name: str, process_id: str, timeout_s: float | None, folded: FoldedState[Any], record: RawRecord | None, reason: str
) -> NotSettled:
    """Return the error for an instance that is at this state."""
    last_event = "" if record is None else header(record[3], TYPE) or ""
    return NotSettled(name, process_id, timeout_s, folded.version, last_event, reason)


@asynccontextmanager
async def _published(client: Client, subject: str) -> AsyncGenerator[asyncio.Event]:
    """Yield an event that is set when a message is published on a subject; a server may deny that, or lose one."""
    published = asyncio.Event()
    listening = await client.serve(subject, lambda _: published.set())
    try:
        yield published
    finally:
        await client.unsubscribe([listening])


async def _obstacle(
    cursors: Cursors, info: AggregateInfo, process_id: str, first_sequence: int | None, waited_s: float
) -> str | None:
    """Return in words what keeps every worker from an instance; None if nothing does, or it cannot be read.

    `first_sequence` is the sequence of the cursor when the wait began, `waited_s` seconds ago.
    """
    name = info.name
    try:
        stored = await cursors.find(name)
        entries = await cursors.quarantined(name)
    except EventjetError:
        return None
    if stored is None:
        return "it has no cursor: run `eventjet init`"
    blocking = next((entry.event for entry in entries if entry.key == (name, process_id)), None)
    if blocking is not None and blocking.resolution == QUARANTINED:
        reason = " ".join(blocking.reason.split()).rstrip(".")
        return f"its event at position {blocking.position} is quarantined ({reason}): `eventjet quarantine show {name}`"
    if stored.cursor.state == PAUSED:
        return f"processes of this type are paused: `eventjet resume {name}`"
    if stored.cursor.state == FAILED:
        return f"processes of this type stopped: {stored.cursor.reason}"
    if stored.cursor.owner is None or (first_sequence == stored.sequence and waited_s > _SILENT_S):
        if (refusal := stored.cursor.refusal_of(info.revision)) is not None:
            return refusal.rstrip(".")
        return "no worker runs processes of this type: start `eventjet worker`"
    return None
