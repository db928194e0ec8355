"""The log on JetStream: one subject for each aggregate, and an expected sequence for each save.

`publish` sends a save, and `outcome` decides whether it is stored. Histories are read by batched direct get (ADR-31);
reads that must be exact go to the leader.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TypeVar

from eventjet.codec.headers import RawRecord, event_id_of, logged_at
from eventjet.codec.subjects import stream_subjects, subject_of, type_subjects
from eventjet.errors import (
    ApiRefused,
    ConcurrencyConflict,
    ConnectionClosed,
    Forbidden,
    LogReplaced,
    LogUnusable,
    NoResponders,
    OutcomeUnknown,
    Refused,
    SaveTorn,
    StoreError,
    StoreUnavailable,
    StreamFull,
    StreamMissing,
)
from eventjet.jetstream import api
from eventjet.jetstream.answers import AMBIGUOUS_S
from eventjet.jetstream.client import Client, check_version
from eventjet.log import outcome
from eventjet.log.integrity import StreamIdentity
from eventjet.log.objects import JetStreamObjects
from eventjet.log.publish import GRACE_S, Sender
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.log.store import LAG_PAUSES_S, Append, EventStore, LogState, check_save, command_deadline
from eventjet.log.topology import Drift, drifted, full_stream, identity_of, missing_stream

T = TypeVar("T")

EXPLAIN_S = 2.0
"""How long a failed save waits at most for the settings of the log, which may be the reason."""
FRESH_S = 0.2
"""When nobody answers a read, a look at the log's settings that is older is renewed."""
_FOLLOW_S = 0.1
"""Pause between two looks at the end of a log that is followed."""
REQUEST_MAX = 1_000
"""Records of one request at most: there is no flow control inside a request."""
REQUEST_BYTES = 2_000_000
"""Bytes of one request, about, so that records of any size fit into memory."""
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0


class RetryPolicy:
    """The retry policy of one read: how long it asks a log that does not answer, which is as long as a save may take.

    A cluster takes 4 to 8 s to elect a leader, and nobody answers meanwhile. A read changes nothing, so it is repeated.
    The read of a command ends with the command.
    """

    def __init__(self, timeout_s: float, check_exists: Callable[[], Awaitable[object]]) -> None:
        """`check_exists` raises an error if the log certainly will not answer, for instance since it does not exist."""
        self._timeout_s = timeout_s
        self._check_exists = check_exists
        self._command_deadline = command_deadline.get()
        self.reset()

    def reset(self) -> None:
        """Start the timeout again, after something arrived."""
        self._until = min(time.monotonic() + self._timeout_s, self._command_deadline)
        self._pause_s = _RETRY_FIRST_S

    def request_s(self, timeout_s: float) -> float:
        """Return how long the next request may take if `timeout_s` is the usual time."""
        return min(timeout_s, max(GRACE_S, self._command_deadline - time.monotonic()))

    async def wait(self, error: StoreUnavailable) -> None:
        """Pause before the next try; raises `error` after the timeout, or if a retry cannot help."""
        if isinstance(error, NoResponders):
            await self._check_exists()
        left_s = self._until - time.monotonic()
        if left_s <= 0 or isinstance(error, ConnectionClosed):
            raise error
        await asyncio.sleep(min(left_s, self._pause_s * (0.5 + random.random())))  # noqa: S311  no secret
        self._pause_s = min(_RETRY_MAX_S, 2 * self._pause_s)


class JetStreamStore(EventStore):
    """The log of an app on JetStream, for the tasks of one event loop; a save goes on if its task is cancelled."""

    def __init__(
        self,
        app: str,
        client: Client,
        *,
        save_timeout_s: float,
        aggregates: Collection[str] = frozenset(),
        is_mirror: bool = False,
    ) -> None:
        """`aggregates` are the names that the application declares; see `unknown`. A mirror is only read."""
        self.app = app
        self._aggregates = frozenset(aggregates)
        self._client = client
        self.stream = StreamIdentity(app, client, is_mirror=is_mirror)
        self._reader = client.another("eventjet histories") if client.is_own else client
        self.save_timeout_s = save_timeout_s
        self._page_reader = PageReader(app, self._reader, self._retry_policy)
        self._sender = Sender(app, client)
        self.objects = JetStreamObjects(app, client, save_timeout_s)
        self._in_flight: set[asyncio.Task[int]] = set()
        self._acks_proved_until = 0.0
        """Until when acknowledgements over this connection are believed: one of them was compared with the log."""
        client.on_lost.append(self._doubt_acks)

    @property
    def identity(self) -> str:
        return self.stream.identity

    @property
    def is_confirmed(self) -> bool:
        return self.stream.is_confirmed

    @property
    def may_lag(self) -> bool:
        return self.stream.replicas != 1

    def continuing(self, log: str, position: int) -> str:
        return self.stream.continuing(log, position)

    @property
    def missing_range(self) -> str:
        return self.stream.missing_range

    async def at(self, position: int) -> RawRecord | None:
        return await self._from_leader(api.message_at(self.app, position))

    async def confirm(self) -> bool:
        left_s = command_deadline.get() - time.monotonic()
        if left_s > self._client.timeout_s:
            return await self.stream.confirm()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                return await self.stream.confirm()
        return False

    async def append(self, writes: Sequence[Append]) -> int:
        check_save(self.app, writes)
        self._client.check_open()  # an error after the first send would leave the outcome unknown
        self.stream.check_settings()
        self._check_first_events(writes)
        now = time.monotonic()
        deadline = min(now + self.save_timeout_s, command_deadline.get())
        if deadline - now < GRACE_S:
            raise StoreUnavailable(
                f"A save to {', '.join(self._subjects(writes[:3]))}",
                f"its command took all of its {self.save_timeout_s:g} s before, and nothing was sent",
            )
        log = self.stream.identity
        try:
            # Usually the first answer decides the outcome, and the save needs no task of its own.
            answer = await self._sender.send(writes, deadline)
        except asyncio.CancelledError:
            self._start(writes, log, None, deadline)
            raise
        is_same_log = log == self.stream.identity and not self.stream.is_forgotten
        if isinstance(answer, outcome.Acked) and not answer.duplicate and is_same_log and self._acks_are_proved:
            return answer.position
        return await asyncio.shield(self._start(writes, log, answer, deadline))

    @property
    def unknown(self) -> list[str]:
        """The names of aggregates that are noted in the log and that the application does not declare."""
        return sorted(self.stream.aggregates - self._aggregates) if self._aggregates else []

    def _check_first_events(self, writes: Sequence[Append]) -> None:
        """Raise `Refused` for the first event of an aggregate that `init` has not noted, if `unknown` names others.

        Otherwise a renamed aggregate would begin a second history. An older release, which does not know the aggregates
        of a newer one, can still record events of its own (ADR 0047).
        """
        noted = self.stream.aggregates
        for write in writes:
            if write.version == 0 and noted and write.aggregate not in noted and self.unknown:
                raise Refused(
                    f"The first event of {write.aggregate} {write.aggregate_id!r}",
                    f"the log {self.app!r} is of other aggregates, which this application does not declare: "
                    f"{', '.join(self.unknown[:10])}",
                    f"Run `eventjet init`: it says what of them is in the log and what to do. Once that is done, it "
                    f"lets {write.aggregate!r} begin.",
                )

    async def resolve(self, writes: Sequence[Append], log: str = "") -> int:
        """Finish a save of unknown outcome that began on `log`, as `append` does; the log is read before a send."""
        self._client.check_open()
        deadline = time.monotonic() + self.save_timeout_s
        return await asyncio.shield(self._start(writes, log or self.stream.identity, None, deadline))

    async def check_server(self) -> None:
        """Check that the log's server is new enough and that pages arrive; raises `Unreachable`, `SingleResponse`."""
        if self._client.endpoint.is_elsewhere and self.stream.server_version:
            check_version(f"The NATS server that has the log {self.app!r}", {"version": self.stream.server_version})
        first = self.stream.first
        if first is not None:
            await self._client.check_pages(api.direct_page(self.app, first, None, count=1, size=REQUEST_BYTES))

    async def settle(self) -> None:
        """Wait for the saves in flight, for the time of one save at most; afterwards nothing can be read."""
        if self._reader is not self._client:
            await self._reader.close()
        await self.stream.close()
        if self._in_flight:
            # One request may be under way at the deadline.
            timeout_s = self.save_timeout_s + self._client.timeout_s + 2 * GRACE_S + EXPLAIN_S
            await asyncio.wait(set(self._in_flight), timeout=timeout_s)

    def _start(
        self, writes: Sequence[Append], log: str, first_answer: outcome.Answer | None, deadline: float
    ) -> asyncio.Task[int]:
        """Continue a save in a task of its own, which goes on if the caller is cancelled."""
        task = asyncio.create_task(self._save(writes, log, first_answer, deadline))
        self._in_flight.add(task)
        task.add_done_callback(self._save_ended)
        return task

    def _save_ended(self, task: asyncio.Task[int]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # so that asyncio does not warn when no caller waits any more

    async def _save(
        self, writes: Sequence[Append], log: str, first_answer: outcome.Answer | None, deadline: float
    ) -> int:
        """Continue a save from its first answer to its outcome; without `first_answer`, read first if it is stored.

        `log` is the identity of the log on which it began. Over another connection, or in a stream that changed, the
        log may be another one, such as a mirror that was promoted: so it is looked at before anything is sent again,
        and before an answer counts. The save goes on if that log has its history, and else raises `LogReplaced`.
        """
        subjects = self._subjects(writes)
        ids = [[event.event_id for event in write.events] for write in writes]
        save = outcome.Save(ids, deadline=deadline, jitter=random.random)
        expected = max([write.expected for write in writes])

        def check_history(position: int | None = None) -> None:
            if reason := self.stream.replaced(log, expected):
                raise LogReplaced(subjects, [each for of_write in ids for each in of_write], reason, position)

        step: outcome.Step = (
            save.resume() if first_answer is None else await self._answered(first_answer, save, subjects, writes)
        )
        while True:
            if isinstance(step, outcome.Send | outcome.Look):
                if step.after_s:
                    await asyncio.sleep(step.after_s)
                if not await self.stream.remember():
                    step = save.looked(None, time.monotonic())
                    continue
                if isinstance(step, outcome.Send):
                    check_history()
                    answer = await self._sender.send(writes, deadline, alone=step.alone)
                    step = await self._answered(answer, save, subjects, writes)
                else:
                    step = save.looked(await self._look(subjects, writes, save), time.monotonic())
            elif isinstance(step, outcome.Stored) and self.stream.is_forgotten:
                step = save.resume()  # it may be stored in the log that was, or in the one that is
            else:
                break
        if isinstance(step, outcome.Stored):
            check_history(step.position)
            return step.position
        if save.is_in_doubt:
            check_history()
        drifts: Sequence[Drift] = ()
        if not isinstance(step, outcome.Conflicted) or step.index is None:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(EXPLAIN_S):
                    drifts = await self.stream.drifts(age_s=0)
        if isinstance(step, outcome.Conflicted):
            self.stream.check_settings()  # with a subject_transform, conflicts appear without another writer's event
        raise _error_of(step, subjects, writes, drifts, self.app, log)

    async def _answered(
        self, answer: outcome.Answer, save: outcome.Save, subjects: Sequence[str], writes: Sequence[Append]
    ) -> outcome.Step:
        """Return the next step after an answer, comparing a refusal with the log: an error may be another stream's.

        An acknowledgement is compared once in `AMBIGUOUS_S`, and so is the first over a connection: a second stream of
        this name, in a JetStream without a domain of its own, acknowledges in the same words (ADR 0046). For the
        acknowledgements in between see `Answerers`.
        """
        step = save.answered(answer)
        is_ack = isinstance(step, outcome.Stored)
        if not isinstance(step, outcome.ErrorReply) and (not is_ack or self._acks_are_proved):
            return step
        is_known = await self.stream.remember()
        next_messages = await self._look(subjects, writes, save)
        if next_messages is None:
            return step  # without a read there is only the answer
        if not is_ack and not any(next_messages):
            return step
        save.resume()
        verified_step = save.looked(next_messages, time.monotonic())
        if is_ack:
            is_proved = is_known and verified_step == step
            self._acks_proved_until = time.monotonic() + AMBIGUOUS_S if is_proved else 0.0
        return verified_step

    @property
    def _acks_are_proved(self) -> bool:
        return time.monotonic() < self._acks_proved_until

    def _doubt_acks(self) -> None:
        self._acks_proved_until = 0.0

    def _subjects(self, writes: Sequence[Append]) -> list[str]:
        return [subject_of(self.app, write.aggregate, write.aggregate_id) for write in writes]

    async def _look(
        self, subjects: Sequence[str], writes: Sequence[Append], save: outcome.Save
    ) -> outcome.NextMessages | None:
        """Read the next message of each subject, and whether a save of ours is whole; None if that fails."""
        try:
            next_messages = await asyncio.gather(
                *map(self._next_message, subjects, (write.expected for write in writes))
            )
            for index, (message, write) in enumerate(zip(next_messages, writes, strict=True)):
                if message is not None and message.event_id == write.events[0].event_id:
                    last = save.last_position(index, message)
                    if last > message.position and not await self._holds(last, writes[-1].events[-1].event_id):
                        next_messages[index] = replace(message, is_torn=True)
                    break
        except (StoreUnavailable, LogUnusable, Forbidden):
            return None
        return next_messages

    async def _holds(self, position: int, event_id: str) -> bool:
        record = await self._from_leader(api.message_at(self.app, position), retry=False)
        return record is not None and event_id_of(record) == event_id

    async def _next_message(self, subject: str, expected: int) -> outcome.NextMessage | None:
        record = await self._from_leader(api.next_message(self.app, expected + 1, subject), retry=False)
        return None if record is None else outcome.NextMessage(record[0], event_id_of(record), record=record)

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        pages = self._page_reader.pages(subject_of(self.app, aggregate, aggregate_id), after + 1, limit=limit)
        return [record async for page in pages for record in page]

    def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        return self._page_reader.pages(subject_of(self.app, aggregate, aggregate_id), after + 1)

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        record = await self.tail(aggregate, aggregate_id)
        return 0 if record is None else record[0]

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self._from_leader(api.last_message(self.app, subject_of(self.app, aggregate, aggregate_id)))

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self._ask(api.direct_last(self.app, subject_of(self.app, aggregate, aggregate_id)))

    async def newest_of(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], RawRecord]:
        subjects = {subject_of(self.app, *key): key for key in keys}
        async with self._reader.room:
            reading = partial(api.reading_last_records, self.app, list(subjects))
            records = await self._until_answered(lambda wait_s: self._reader.run(reading(), wait_s))
        return {subjects[record[2].decode()]: record for record in records}

    async def ends(self, aggregate: str) -> tuple[int, int]:
        subjects = type_subjects(self.app, aggregate)
        first = await self._from_leader(api.next_message(self.app, 1, subjects))
        last = None if first is None else await self._from_leader(api.last_message(self.app, subjects))
        return (first[0], last[0]) if first is not None and last is not None else (0, 0)

    def pages_of(self, aggregate: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        return self._page_reader.pages(type_subjects(self.app, aggregate), after + 1, at_leisure=True)

    async def skip_markers(self) -> dict[int, str]:
        try:
            return await self._until_answered(lambda wait_s: self._client.run(reading_skip_markers(self.app), wait_s))
        except StreamMissing:
            raise missing_stream(self.app) from None

    async def position_at(self, at: datetime) -> int:
        record = await self._ask(api.direct_since(self.app, at, stream_subjects(self.app)))
        end = (await self.state()).last + 1
        if record is None or logged_at(record) >= at:
            return end if record is None else record[0]
        before = record[0]  # the log was restored, and the server knows only the time of the restore
        while end - before > 1:
            middle = (before + end) // 2
            record = await self._from_leader(api.next_message(self.app, middle, stream_subjects(self.app)))
            before, end = (middle, end) if record is not None and logged_at(record) < at else (before, middle)
        return end

    async def state(self) -> LogState:
        state = await self._until_answered(lambda _: self.stream.look())
        return LogState(identity_of(state), max(1, state.first), state.last)

    async def records_from(self, start: int, limit: int) -> list[RawRecord]:
        pages = self._page_reader.pages(None, max(start, 1), limit=limit)
        return [record async for page in pages for record in page]

    async def records(
        self, *, start: int = 1, until: int | None = None, follow: bool = False
    ) -> AsyncGenerator[RawRecord]:
        position, pauses_s = max(start, 1), iter(LAG_PAUSES_S)
        if not follow and self.may_lag:
            newest = await self._from_leader(api.last_message(self.app, stream_subjects(self.app)))
            end = 0 if newest is None else newest[0]
            until = end if until is None else min(until, end)
        while until is None or position <= until:
            remaining = None if until is None else until - position + 1
            async for page in self._page_reader.pages(None, position, at_leisure=True, limit=remaining):
                for record in page:
                    if until is not None and record[0] > until:
                        return
                    position = record[0] + 1
                    yield record
            if until is not None and position > until:
                return
            if follow:
                await self._wait_for_growth(position)
            elif not self.may_lag:
                return
            elif (pause_s := next(pauses_s, None)) is not None:
                await asyncio.sleep(pause_s)
            else:
                raise StoreUnavailable(f"The log {self.app!r}", f"a replica lags behind position {position}")

    async def _wait_for_growth(self, position: int) -> None:
        """Wait until the log may have reached a position; all tasks that follow the log share the looks at its end."""
        end: int | None = 0
        while end is not None and end < position:
            await asyncio.sleep(_FOLLOW_S)
            end = await self.stream.end(_FOLLOW_S / 2)

    async def _from_leader(self, request: api.Request[RawRecord | None], *, retry: bool = True) -> RawRecord | None:
        """Return the record that the leader has; a save asks without `retry`, since it waits by itself."""
        try:
            return await (self._ask(request) if retry else self._client.ask(request))
        except ApiRefused as refusal:
            if retry and isinstance(refusal, StreamMissing):
                raise missing_stream(self.app) from None
            raise StoreUnavailable("A read from the leader", str(refusal)) from None

    def _retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self.save_timeout_s, self._check_exists)

    async def _check_exists(self) -> None:
        """Raise an error if the log does not exist, or if its direct gets are switched off, so nobody ever answers."""
        try:
            drifts = await self.stream.drifts(age_s=FRESH_S)
        except LogUnusable:
            raise
        except StoreError:
            return
        direct_get_drifts = [drift for drift in drifts if drift.setting == "allow_direct"]
        if direct_get_drifts:
            raise drifted(self.app, direct_get_drifts)

    async def _ask(self, request: api.Request[T]) -> T:
        """Return the answer to a request, repeating it by the retry policy while a leader is elected."""
        return await self._until_answered(lambda wait_s: self._client.ask(request, wait_s))

    async def _until_answered(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Call `ask`, with the seconds that a request may take, by the retry policy until it returns."""
        retry = self._retry_policy()
        while True:
            try:
                return await ask(retry.request_s(self._client.timeout_s))
            except StoreUnavailable as error:
                await retry.wait(error)


class PageReader:
    """Reads records of the log in pages, for any number of tasks of one event loop.

    Unless the application gave a client, histories have a connection of their own, so that a save does not wait behind
    a long history, and pages are folded while the next ones arrive (ADR 0056).
    """

    def __init__(self, stream: str, reader: Client, retry_policy: Callable[[], RetryPolicy]) -> None:
        self._retry_policy = retry_policy
        self._stream = stream
        self._reader = reader

    async def pages(
        self, subject: str | None, start: int, *, at_leisure: bool = False, limit: int | None = None
    ) -> AsyncIterator[list[RawRecord]]:
        """Yield up to `limit` records from a position on, in pages; `subject` may be a pattern, or None for all.

        Raises as the reads of `EventStore`. The number of requests at once is limited, so others may wait until a
        request is answered. A caller that pauses between two pages reads `at_leisure`, and gets the pages of a request
        once all of them have arrived.
        """
        known_subject = subject.encode() if subject is not None and not subject.endswith("*") else None
        last, pending, remaining = start - 1, 1, REQUEST_MAX if limit is None else limit
        retry: RetryPolicy | None = None
        while pending and remaining > 0:
            count = min(REQUEST_MAX, remaining)
            request = api.direct_page(self._stream, last + 1, subject, count=count, size=REQUEST_BYTES)
            received_position, page_end, whole_pages = 0, (0, 0), list[list[RawRecord]]()
            fault: StoreUnavailable | None = None
            async with self._reader.room:
                retry = retry or self._retry_policy()  # its timeout begins with the first request, not while it waits
                parts = self._reader.stream(request, retry.request_s(self._reader.timeout_s))
                try:
                    async for frames in parts:
                        status = frames.pop() if api.is_status(frames[-1]) else None
                        if frames:
                            page = api.direct_records(frames, self._stream, known_subject)
                            received_position = page[-1][0]
                            if at_leisure:
                                whole_pages.append(page)
                            else:
                                remaining -= 0 if limit is None else len(page)
                                yield page
                        if status is not None:
                            page_end = request.parse(status) or (0, 0)
                            break
                except StoreUnavailable as error:
                    fault = error
                finally:
                    await parts.aclose()
            if fault is None and received_position != page_end[0]:
                fault = StoreUnavailable(request.what, f"records up to position {page_end[0]} were lost on the way")
            if received_position and (fault is None or not at_leisure):
                last = received_position  # records arrive in order: the next request begins after it
                retry.reset()
            if fault is not None:
                await retry.wait(fault)
                continue
            pending = page_end[1]
            for page in whole_pages:
                remaining -= 0 if limit is None else len(page)
                yield page


def _error_of(
    failed: outcome.Failed,
    subjects: Sequence[str],
    writes: Sequence[Append],
    drifts: Sequence[Drift],
    stream: str,
    log: str,
) -> Exception:
    """Return the error of a failed save; `drifts` are drifted settings of the log, which may be the reason."""
    drift_text = "".join(f" {drift}: {drift.cost}. {drift.remedy}" for drift in drifts)
    subject_list = ", ".join(subjects[:3]) + ("…" if len(subjects) > 3 else "")
    match failed:
        case outcome.Conflicted(index=index, rival=rival):
            return ConcurrencyConflict(
                subjects[index or 0], writes[index or 0].expected, rival=rival, is_unseen=index is None
            )
        case outcome.ErrorReply(code=code, text=text) if code in (api.NO_RESOURCES, api.STORE_FAILED):
            config = {drift.setting: drift.actual for drift in drifts}
            full = full_stream(stream, {"discard": "new", **config}, code, text)
            assert full is not None  # with these codes, no other refusal is definite
            if code == api.STORE_FAILED:  # not the remedy of `full_stream`: nobody may remove events of the log
                return StreamFull(stream, full.limit, "Run `eventjet init --repair`, which takes the limit away.")
            return full
        case outcome.ErrorReply(code=code, text=text):
            reason = f"the server answered {text!r} ({code})"
            return Refused(f"A save to {subject_list}", reason, f"Nothing was stored.{drift_text}")
        case outcome.PermissionDenied(refused=Refused() as error):
            return error
        case outcome.PermissionDenied(reason=reason):
            return Forbidden(f"a publish to {subject_list}", reason)
        case outcome.Unknown(cause=cause, is_read_only=is_read_only, is_torn=is_torn):
            ids = [event.event_id for write in writes for event in write.events]
            if is_torn:
                return SaveTorn(subjects, ids, writes)
            cause = f"{cause}.{drift_text}" if drift_text else cause
            return OutcomeUnknown(subjects, ids, cause, writes, is_read_only=is_read_only, log=log)
