"""The log on JetStream: one subject an entity, expected-sequence checks, outcomes that equal the log.

One event goes as a plain publish, several as an atomic batch (ADR-50) with a new batch id on every try. History is read
by batched direct get (ADR-31); what must be certain is read from the leader.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

from eventjet.codec.envelope import MSG_ID, RawRecord, header, header_block, recorded_at
from eventjet.codec.subjects import stream_subjects, subject_of
from eventjet.errors import (
    ConcurrencyConflict,
    Forbidden,
    OutcomeUnknown,
    Refused,
    StoreUnavailable,
)
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.requests import ROOM_BYTES, ApiError, Denied, Lost, Requests
from eventjet.store import outcome
from eventjet.store.limits import check_save
from eventjet.store.long_reads import LongReads, nanoseconds
from eventjet.store.store import Append, LogState, event_headers
from eventjet.store.topology import IDENTITY, info

FIRST_PAGE = 6
"""Records after a known position that come by the client's own connection: mostly there are none."""
PAGE = 1_000
_GRACE_S = 0.05
"""A request is given this much, however near the deadline is."""
_NO_MESSAGE = 10037
_END = "204"
_NOTHING = "404"
_REPLY_HEADERS = frozenset(
    {
        "Nats-Stream",
        "Nats-Subject",
        "Nats-Sequence",
        "Nats-Last-Sequence",
        "Nats-Time-Stamp",
        "Nats-Num-Pending",
        "Nats-UpTo-Sequence",
    }
)


class JetStreamStore:
    """Lives as long as its connection; safe for any number of tasks of one loop."""

    def __init__(
        self, app: str, client: Client, requests: Requests, endpoint: Endpoint, *, save_timeout_s: float
    ) -> None:
        self.app = app
        self._long_reads = LongReads(app, endpoint, timeout_s=requests.timeout_s)
        self._client = client
        self._requests = requests
        self._save_timeout_s = save_timeout_s
        self._in_flight: set[asyncio.Task[int]] = set()

    async def append(self, writes: Sequence[Append]) -> int:
        """As `EventStore.append`. Cancelling the caller does not abandon the save."""
        check_save(self.app, writes)
        deadline = time.monotonic() + self._save_timeout_s
        if self._client.pending_data_size > ROOM_BYTES:
            return await self._bounded(writes, None, deadline, resume=False)
        try:
            # The usual save is one answer long and needs no task of its own.
            timeout_s = min(self._requests.timeout_s, self._save_timeout_s)
            first = await self._send(self._subjects(writes), writes, timeout_s)
        except asyncio.CancelledError:
            self._start(writes, None, deadline, resume=True)
            raise
        if isinstance(first, outcome.Acked) and not first.duplicate:
            return first.position
        return await self._bounded(writes, first, deadline, resume=False)

    async def resolve(self, writes: Sequence[Append]) -> int:
        """As `append`, for a save whose deadline passed before: it looks before it sends."""
        return await self._bounded(writes, None, time.monotonic() + self._save_timeout_s, resume=True)

    async def settle(self) -> None:
        """Wait for the saves in flight, at most one save's time; nothing can be read afterwards."""
        self._long_reads.close()
        if self._in_flight:
            await asyncio.wait(set(self._in_flight), timeout=self._save_timeout_s + self._last_request_s)

    @property
    def _last_request_s(self) -> float:
        """How long the request takes that is under way at a deadline."""
        return self._requests.timeout_s + 2 * _GRACE_S

    async def _bounded(
        self, writes: Sequence[Append], first: outcome.Answer | None, deadline: float, *, resume: bool
    ) -> int:
        task = self._start(writes, first, deadline, resume=resume)
        # Not `asyncio.timeout`: nats-py swallows a cancellation while it waits for room in its buffer.
        done, _ = await asyncio.wait({task}, timeout=deadline - time.monotonic() + self._last_request_s)
        if not done:
            raise _error_of(outcome.Unknown("the connection takes nothing"), self._subjects(writes), writes)
        return task.result()

    def _start(
        self, writes: Sequence[Append], first: outcome.Answer | None, deadline: float, *, resume: bool
    ) -> asyncio.Task[int]:
        task = asyncio.ensure_future(self._save(writes, first, deadline, resume=resume))
        self._in_flight.add(task)
        task.add_done_callback(self._landed)
        return task

    def _landed(self, task: asyncio.Task[int]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # taken, so that an abandoned caller leaves no warning

    async def _save(
        self, writes: Sequence[Append], first: outcome.Answer | None, deadline: float, *, resume: bool
    ) -> int:
        """The whole road of a save, from its first answer when that is there already."""
        subjects = self._subjects(writes)
        save = outcome.Save(_parts(writes), deadline=deadline, jitter=random.random)
        step: outcome.Step = save.resume() if resume else save.begin()
        if first is not None:
            step = save.answered(first)
        while True:
            match step:
                case outcome.Send(after_s=pause_s):
                    if pause_s:
                        await asyncio.sleep(pause_s)
                    left_s = max(_GRACE_S, deadline - time.monotonic())
                    timeout_s = min(self._requests.timeout_s, left_s)
                    step = save.answered(await self._send(subjects, writes, timeout_s))
                case outcome.Look(after_s=pause_s):
                    if pause_s:
                        await asyncio.sleep(pause_s)
                    step = save.looked(await self._look(subjects, writes), time.monotonic())
                case outcome.Stored(position=position):
                    return position
                case _:
                    raise _error_of(step, subjects, writes)

    def _subjects(self, writes: Sequence[Append]) -> list[str]:
        return [subject_of(self.app, write.aggregate, write.aggregate_id) for write in writes]

    async def _send(self, subjects: Sequence[str], writes: Sequence[Append], timeout_s: float) -> outcome.Answer:
        try:
            if len(writes) == 1 and len(writes[0].events) == 1:
                headers = dict(event_headers(writes[0], 0))
                await self._room(timeout_s)
                reply = await self._requests.ask(subjects[0], writes[0].events[0].encoded.body, headers, timeout_s)
            else:
                messages = [
                    (subject, event_headers(write, index), new.encoded.body)
                    for subject, write in zip(subjects, writes, strict=True)
                    for index, new in enumerate(write.events)
                ]
                reply = await self._send_batch(subjects, messages, timeout_s)
        except Lost as error:
            return outcome.Silence(str(error))
        except Denied as error:
            return outcome.Violation(str(error))
        return _answer_of(reply.data)

    async def _send_batch(
        self,
        subjects: Sequence[str],
        messages: Sequence[tuple[str, list[tuple[str, str]], bytes]],
        timeout_s: float,
    ) -> Msg:
        batch_id = uuid4().hex
        last = len(messages)
        limit = time.monotonic() + timeout_s
        for number, (subject, pairs, body) in enumerate(messages[:-1], 1):
            headers = {**dict(pairs), "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
            await self._room(limit - time.monotonic())
            try:
                await self._client.publish(subject, body, headers=headers)
            except Exception as error:
                raise Lost(f"{type(error).__name__}: {error}") from None
        subject, pairs, body = messages[-1]
        headers = {
            **dict(pairs),
            "Nats-Batch-Id": batch_id,
            "Nats-Batch-Sequence": str(last),
            "Nats-Batch-Commit": "1",
        }
        await self._room(limit - time.monotonic())
        left_s = max(_GRACE_S, limit - time.monotonic())
        return await self._requests.ask(subject, body, headers, left_s, also=subjects)

    async def _room(self, timeout_s: float | None = None) -> None:
        """Wait until the connection takes more: beyond its buffer, nats-py waits without a bound. Raises `Lost`."""
        if self._client.pending_data_size <= ROOM_BYTES:
            return
        limit = time.monotonic() + (self._requests.timeout_s if timeout_s is None else timeout_s)
        while self._client.pending_data_size > ROOM_BYTES:
            if time.monotonic() > limit:
                raise Lost("the connection takes nothing")
            await asyncio.sleep(0.001)

    async def _look(self, subjects: Sequence[str], writes: Sequence[Append]) -> outcome.Slots | None:
        """All slots at once, so that a look takes one request's time."""
        looks = map(self._slot, subjects, (write.expected for write in writes))
        try:
            return await asyncio.gather(*looks)
        except (StoreUnavailable, Forbidden):
            return None

    async def _slot(self, subject: str, expected: int) -> outcome.SlotFound | None:
        found = await self._from_leader({"seq": expected + 1, "next_by_subj": subject})
        return None if found is None else outcome.SlotFound(found[0], header(found[3], MSG_ID) or "")

    async def history(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> list[RawRecord]:
        """As `EventStore.history`; raises `StoreUnavailable` and `Forbidden`."""
        pages = self.pages(aggregate, aggregate_id, after=after)
        return [record async for page in pages for record in page]

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        """As `EventStore.pages`: from the beginning over the fast road, what came since by the client's own connection.

        What came since is mostly nothing, and that is as cheap by the client's own.
        """
        subject = subject_of(self.app, aggregate, aggregate_id)
        if after == 0:
            async for page in self._long_reads.pages(subject, 1):
                yield page
            return
        body = orjson.dumps({"seq": after + 1, "next_by_subj": subject, "batch": FIRST_PAGE})
        messages, final = await self._gather(f"The history of {subject}", body)
        if messages:
            yield [_record_of_reply(message) for message in messages]
        headers = final.headers or {}
        if headers.get("Status") == "404" or int(headers.get("Nats-Num-Pending", "0")) == 0:
            return
        async for page in self._long_reads.pages(subject, int(headers["Nats-Last-Sequence"]) + 1):
            yield page

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        """As `EventStore.last`."""
        found = await self._from_leader({"last_by_subj": subject_of(self.app, aggregate, aggregate_id)})
        return 0 if found is None else found[0]

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        """As `EventStore.newest`; raises `StoreUnavailable` and `Forbidden`."""
        subject = subject_of(self.app, aggregate, aggregate_id)
        return await self._direct(f"The last event of {subject}", f".{subject}", b"")

    async def position_at(self, at: datetime) -> int:
        """As `EventStore.position_at`; raises `StoreUnavailable` and `Forbidden`."""
        body = orjson.dumps({"start_time": at.astimezone(UTC), "next_by_subj": stream_subjects(self.app)})
        found = await self._direct(f"The first event after {at.isoformat()}", "", body)
        end = (await self.state()).last + 1
        if found is None or recorded_at(found) >= at:
            return end if found is None else found[0]
        before = found[0]  # the log was restored, and the server knows only when that was
        while end - before > 1:
            middle = (before + end) // 2
            found = await self._from_leader({"seq": middle, "next_by_subj": stream_subjects(self.app)})
            before, end = (middle, end) if found is not None and recorded_at(found) < at else (before, middle)
        return end

    async def state(self) -> LogState:
        """As `EventStore.state`."""
        found = await info(self._requests, self.app)
        state = found["state"]
        return LogState(found["config"]["metadata"][IDENTITY], max(1, state["first_seq"]), state["last_seq"])

    async def records(self, *, start: int = 1, follow: bool = False) -> AsyncIterator[RawRecord]:
        """As `EventStore.records`, page by page; bulk readers use `eventjet.nats`."""
        position = max(start, 1)
        while True:
            body = orjson.dumps({"seq": position, "batch": PAGE})
            messages, _ = await self._gather(f"The log from position {position}", body)
            for message in messages:
                record = _record_of_reply(message)
                position = record[0] + 1
                yield record
            if not messages:
                if not follow:
                    return
                await asyncio.sleep(0.1)

    async def _gather(self, what: str, body: bytes) -> tuple[list[Msg], Msg]:
        subject = f"$JS.API.DIRECT.GET.{self.app}"
        try:
            await self._room()
            messages, final = await self._requests.gather(subject, body)
        except Lost as error:
            raise StoreUnavailable(what, str(error)) from None
        except Denied as error:
            raise Forbidden(subject, str(error)) from None
        _checked_status(what, final, (_END, _NOTHING))
        told = (final.headers or {}).get("Nats-Last-Sequence")
        if messages and (messages[-1].headers or {}).get("Nats-Sequence") != told:
            raise StoreUnavailable(what, f"records up to position {told} were lost on the way")
        return messages, final

    async def _direct(self, what: str, suffix: str, body: bytes) -> RawRecord | None:
        subject = f"$JS.API.DIRECT.GET.{self.app}{suffix}"
        try:
            await self._room()
            reply = await self._requests.ask(subject, body)
        except Lost as error:
            raise StoreUnavailable(what, str(error)) from None
        except Denied as error:
            raise Forbidden(subject, str(error)) from None
        if "Nats-Sequence" in (reply.headers or {}):
            return _record_of_reply(reply)
        _checked_status(what, reply, (_NOTHING,))
        return None

    async def _from_leader(self, body: dict[str, Any]) -> RawRecord | None:
        try:
            await self._room()
            found = await self._requests.read("A read from the leader", f"STREAM.MSG.GET.{self.app}", body)
        except ApiError as error:
            if error.code == _NO_MESSAGE:
                return None
            raise StoreUnavailable("A read from the leader", str(error)) from None
        except Lost as error:
            raise StoreUnavailable("A read from the leader", str(error)) from None
        message = found["message"]
        return (
            int(message["seq"]),
            nanoseconds(str(message["time"]).encode()),
            str(message["subject"]).encode(),
            base64.b64decode(message.get("hdrs", "")),
            base64.b64decode(message.get("data", "")),
        )


def _parts(writes: Sequence[Append]) -> list[outcome.Part]:
    parts: list[outcome.Part] = []
    offset = 0
    for write in writes:
        parts.append(outcome.Part(tuple(new.event_id for new in write.events), offset))
        offset += len(write.events)
    return parts


def _answer_of(reply: bytes) -> outcome.Answer:
    try:
        value: dict[str, Any] = orjson.loads(reply)
        if "error" not in value:
            return outcome.Acked(int(value["seq"]), bool(value.get("duplicate")))
        found = ApiError(value["error"])
        return outcome.ErrorReply(found.status, found.code, found.text)
    except (ValueError, TypeError, KeyError, AttributeError):
        return outcome.Silence(f"an answer that cannot be read: {reply[:80]!r}")


def _error_of(step: outcome.Step, subjects: Sequence[str], writes: Sequence[Append]) -> Exception:
    shown = ", ".join(subjects[:3]) + ("…" if len(subjects) > 3 else "")
    match step:
        case outcome.Conflicted(index=index):
            return ConcurrencyConflict(subjects[index or 0], writes[index or 0].expected)
        case outcome.RefusedOutcome(code=code, reason=reason):
            return Refused(f"A save to {shown}", f"the server answered {reason!r} ({code})", "Nothing was stored.")
        case outcome.ForbiddenOutcome(reason=reason):
            return Forbidden(f"a publish to {shown}", reason)
        case outcome.Unknown(cause=cause):
            ids = [new.event_id for write in writes for new in write.events]
            return OutcomeUnknown(subjects, ids, cause, writes)
        case _:
            return AssertionError(f"not an outcome: {step}")


def _checked_status(what: str, final: Msg, ends: Sequence[str]) -> None:
    """A status that is not an end is no answer: an empty history must not be made of a refusal."""
    status = (final.headers or {}).get("Status")
    if status not in ends:
        raise StoreUnavailable(what, f"the server answered status {status}")


def _record_of_reply(message: Msg) -> RawRecord:
    headers = message.headers or {}
    kept = [(name, value) for name, value in headers.items() if name not in _REPLY_HEADERS]
    return (
        int(headers["Nats-Sequence"]),
        nanoseconds(headers["Nats-Time-Stamp"].encode()),
        headers["Nats-Subject"].encode(),
        header_block(kept) if kept else b"",
        message.data,
    )
