"""The log on JetStream: one subject per entity, expected-sequence checks, outcomes that equal the log.

What a save sends is in `sending`, what came of it in `outcome`. Histories are read by batched direct get (ADR-31); what
must be certain is read from the leader.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from eventjet.codec.headers import MSG_ID, RawRecord, header, logged_at
from eventjet.codec.subjects import stream_subjects, subject_of, type_subjects
from eventjet.errors import (
    ApiRefused,
    ConcurrencyConflict,
    Forbidden,
    LogUnusable,
    OutcomeUnknown,
    Refused,
    SaveTorn,
    StoreError,
    StoreUnavailable,
    StreamFull,
)
from eventjet.jetstream import api
from eventjet.jetstream.answers import AMBIGUOUS_S
from eventjet.jetstream.client import Client
from eventjet.jetstream.requirements import check_version
from eventjet.log import outcome
from eventjet.log.known_log import KnownLog
from eventjet.log.patience import Patience
from eventjet.log.sending import GRACE_S, Sender
from eventjet.log.store import Append, EventStore, LogState, check_save
from eventjet.log.topology import Drift, drifted, full_stream, identity_of
from eventjet.log.voids import voids_of

T = TypeVar("T")

EXPLAIN_S = 2.0
"""So long a save that failed waits at the most for the settings of the log, which may be the reason."""
FRESH_S = 0.2
"""A look at the settings of the log that is older is made again where nobody answers a read."""
_FOLLOW_S = 0.1
"""Between two looks at the end of a log that is followed."""
REQUEST_MAX = 1_000
"""Records of one request: there is no flow control inside it."""
REQUEST_BYTES = 2_000_000
"""Bytes of one request, so that records of any size fit into memory."""


class JetStreamStore(EventStore):
    """Lives as long as its client; safe for any number of tasks of one loop.

    Cancelling whoever waits in `append` does not abandon the save.
    """

    def __init__(
        self, app: str, client: Client, *, save_timeout_s: float, aggregates: Collection[str] = frozenset()
    ) -> None:
        """`aggregates` are those that the application knows of, where a log is to be only of these."""
        self.app = app
        self._aggregates = frozenset(aggregates)
        self._client = client
        self.known = KnownLog(app, client)
        self._reader = client.another("eventjet histories") if client.is_own else client
        self._save_timeout_s = save_timeout_s
        self._long_reads = LongReads(app, self._reader, self._patience)
        self._sender = Sender(app, client)
        self._in_flight: set[asyncio.Task[int]] = set()
        self._acks_proved_until = 0.0
        """An acknowledgement over this connection was compared with the log, which counts until then."""
        client.on_lost.append(self._doubt_acks)

    @property
    def identity(self) -> str:
        return self.known.identity

    @property
    def is_certain(self) -> bool:
        return self.known.is_certain

    @property
    def loss(self) -> str:
        return self.known.loss

    async def at(self, position: int) -> RawRecord | None:
        return await self._from_leader(api.message_at(self.app, position))

    async def confirm(self) -> bool:
        return await self.known.confirm()

    async def append(self, writes: Sequence[Append]) -> int:
        check_save(self.app, writes)
        self._client.check_open()  # later it would be a save whose outcome is unknown
        self.known.check_settings()
        self._check_begun(writes)
        deadline = time.monotonic() + self._save_timeout_s
        try:
            # The usual save is one answer long and needs no task of its own.
            first = await self._sender.send(writes, deadline)
        except asyncio.CancelledError:
            self._start(writes, None, deadline)
            raise
        if isinstance(first, outcome.Acked) and not first.duplicate and self._acks_are_proved:
            return first.position
        return await asyncio.shield(self._start(writes, first, deadline))

    @property
    def unknown(self) -> list[str]:
        """Aggregates that the log is noted to be of, and the application does not know."""
        return sorted(self.known.aggregates - self._aggregates) if self._aggregates else []

    def _check_begun(self, writes: Sequence[Append]) -> None:
        """Raise `Refused` for the first event of a name that `init` has not noted, in a log of names not known here.

        An aggregate that was renamed would begin a second history. An older release, which does not know what a newer
        one records, goes on with its own.
        """
        noted = self.known.aggregates
        for write in writes:
            if write.version == 0 and noted and write.aggregate not in noted and self.unknown:
                raise Refused(
                    f"The first event of {write.aggregate} {write.aggregate_id!r}",
                    f"the log {self.app!r} is of other aggregates, which this application does not declare: "
                    f"{', '.join(self.unknown[:10])}",
                    f"Run `eventjet init`: it says what of them is in the log and what to do, and lets "
                    f"{write.aggregate!r} begin.",
                )

    async def resolve(self, writes: Sequence[Append]) -> int:
        """As `append`, for a save whose deadline passed before: it looks before it sends."""
        self._client.check_open()
        return await asyncio.shield(self._start(writes, None, time.monotonic() + self._save_timeout_s))

    async def check_server(self) -> None:
        """Raise `Unreachable` where the server that has the log is another than the connected one, and too old; and
        `SingleResponse` where a page of the log cannot arrive. Nothing is known of an empty one."""
        if self._client.endpoint.is_elsewhere and self.known.server_version:
            check_version(f"The NATS server that has the log {self.app!r}", {"version": self.known.server_version})
        first = self.known.first
        if first is not None:
            await self._client.check_pages(api.direct_page(self.app, first, None, count=1, size=REQUEST_BYTES))

    async def settle(self) -> None:
        """Wait for the saves in flight, at most one save's time; nothing can be read afterwards."""
        if self._reader is not self._client:
            await self._reader.close()
        await self.known.close()
        if self._in_flight:
            # One request may be under way at the deadline.
            timeout_s = self._save_timeout_s + self._client.timeout_s + 2 * GRACE_S + EXPLAIN_S
            await asyncio.wait(set(self._in_flight), timeout=timeout_s)

    def _start(self, writes: Sequence[Append], first: outcome.Answer | None, deadline: float) -> asyncio.Task[int]:
        """Go on with a save in a task of its own, which outlives the caller."""
        task = asyncio.create_task(self._save(writes, first, deadline))
        self._in_flight.add(task)
        task.add_done_callback(self._landed)
        return task

    def _landed(self, task: asyncio.Task[int]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # taken, so that an abandoned caller leaves no warning

    async def _save(self, writes: Sequence[Append], first: outcome.Answer | None, deadline: float) -> int:
        """A save from its first answer to its outcome; with none, it looks first whether it is stored."""
        subjects = self._subjects(writes)
        ids = [[new.event_id for new in write.events] for write in writes]
        save = outcome.Save(ids, deadline=deadline, jitter=random.random)
        step: outcome.Step = save.resume() if first is None else await self._answered(first, save, subjects, writes)
        while isinstance(step, outcome.Send | outcome.Look):
            if step.after_s:
                await asyncio.sleep(step.after_s)
            if isinstance(step, outcome.Send):
                answer = await self._sender.send(writes, deadline, alone=step.alone)
                step = await self._answered(answer, save, subjects, writes)
            else:
                step = save.looked(await self._look(subjects, writes, save), time.monotonic())
        if isinstance(step, outcome.Stored):
            return step.position
        drifts: Sequence[Drift] = ()
        if not isinstance(step, outcome.Conflicted) or step.index is None:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(EXPLAIN_S):
                    drifts = await self.known.drifts(age_s=0)
        if isinstance(step, outcome.Conflicted):
            self.known.check_settings()  # a transformed subject looks like a rival whose event is nowhere
        raise _error_of(step, subjects, writes, drifts, self.app)

    async def _answered(
        self, answer: outcome.Answer, save: outcome.Save, subjects: Sequence[str], writes: Sequence[Append]
    ) -> outcome.Step:
        """What to do after an answer. A refusal is compared with the log: an error does not say whose it is.

        So is an acknowledgement now and then, the first one over a connection too: a second stream of this name, in a
        JetStream without a domain of its own, acknowledges in the same words. For those in between see `Answerers`.
        """
        step = save.answered(answer)
        is_ack = isinstance(step, outcome.Stored)
        if not isinstance(step, outcome.ErrorReply) and (not is_ack or self._acks_are_proved):
            return step
        slots = await self._look(subjects, writes, save)
        if slots is None:
            return step  # who may not read has nothing else to go by
        if not is_ack and not any(slots):
            return step
        save.resume()
        looked = save.looked(slots, time.monotonic())
        if is_ack:
            self._acks_proved_until = time.monotonic() + AMBIGUOUS_S if looked == step else 0.0
        return looked

    @property
    def _acks_are_proved(self) -> bool:
        return time.monotonic() < self._acks_proved_until

    def _doubt_acks(self) -> None:
        self._acks_proved_until = 0.0

    def _subjects(self, writes: Sequence[Append]) -> list[str]:
        return [subject_of(self.app, write.aggregate, write.aggregate_id) for write in writes]

    async def _look(
        self, subjects: Sequence[str], writes: Sequence[Append], save: outcome.Save
    ) -> outcome.Slots | None:
        """All slots at once, so that a look takes one request's time; another one for a batch of ours."""
        looks = map(self._slot, subjects, (write.expected for write in writes))
        try:
            slots = await asyncio.gather(*looks)
            for index, (slot, write) in enumerate(zip(slots, writes, strict=True)):
                if slot is not None and slot.event_id == write.events[0].event_id:
                    last = save.last_position(index, slot)
                    if last > slot.position and not await self._holds(last, writes[-1].events[-1].event_id):
                        slots[index] = replace(slot, is_torn=True)
                    break
        except (StoreUnavailable, LogUnusable, Forbidden):
            return None
        return slots

    async def _holds(self, position: int, event_id: str) -> bool:
        found = await self._from_leader(api.message_at(self.app, position), patient=False)
        return found is not None and header(found[3], MSG_ID) == event_id

    async def _slot(self, subject: str, expected: int) -> outcome.SlotFound | None:
        found = await self._from_leader(api.next_message(self.app, expected + 1, subject), patient=False)
        return None if found is None else outcome.SlotFound(found[0], header(found[3], MSG_ID) or "", record=found)

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, most: int | None = None
    ) -> list[RawRecord]:
        pages = self._long_reads.pages(subject_of(self.app, aggregate, aggregate_id), after + 1, most=most)
        return [record async for page in pages for record in page]

    def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        return self._long_reads.pages(subject_of(self.app, aggregate, aggregate_id), after + 1)

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        found = await self.tail(aggregate, aggregate_id)
        return 0 if found is None else found[0]

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self._from_leader(api.last_message(self.app, subject_of(self.app, aggregate, aggregate_id)))

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self._patiently(api.direct_last(self.app, subject_of(self.app, aggregate, aggregate_id)))

    async def ends(self, aggregate: str) -> tuple[int, int]:
        subjects = type_subjects(self.app, aggregate)
        first = await self._from_leader(api.next_message(self.app, 1, subjects))
        last = None if first is None else await self._from_leader(api.last_message(self.app, subjects))
        return (first[0], last[0]) if first is not None and last is not None else (0, 0)

    def pages_of(self, aggregate: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        return self._long_reads.pages(type_subjects(self.app, aggregate), after + 1, at_leisure=True)

    async def voids(self) -> dict[int, str]:
        return await self._until_answered(lambda: voids_of(self._client, self.app))

    async def position_at(self, at: datetime) -> int:
        found = await self._patiently(api.direct_since(self.app, at, stream_subjects(self.app)))
        end = (await self.state()).last + 1
        if found is None or logged_at(found) >= at:
            return end if found is None else found[0]
        before = found[0]  # the log was restored, and the server knows only when that was
        while end - before > 1:
            middle = (before + end) // 2
            found = await self._from_leader(api.next_message(self.app, middle, stream_subjects(self.app)))
            before, end = (middle, end) if found is not None and logged_at(found) < at else (before, middle)
        return end

    async def state(self) -> LogState:
        found = await self._until_answered(self.known.look)
        return LogState(identity_of(found), max(1, found.first), found.last)

    async def some(self, start: int, most: int) -> list[RawRecord]:
        pages = self._long_reads.pages(None, max(start, 1), most=most)
        return [record async for page in pages for record in page]

    async def records(
        self, *, start: int = 1, until: int | None = None, follow: bool = False
    ) -> AsyncIterator[RawRecord]:
        position = max(start, 1)
        while until is None or position <= until:
            most = None if until is None else until - position + 1
            async for page in self._long_reads.pages(None, position, at_leisure=True, most=most):
                for record in page:
                    if until is not None and record[0] > until:
                        return
                    position = record[0] + 1
                    yield record
            if not follow or (until is not None and position > until):
                return
            await self._grown(position)

    async def _grown(self, position: int) -> None:
        """Return when the log may have come to a position: all who follow it share a look at its end."""
        end: int | None = 0
        while end is not None and end < position:
            await asyncio.sleep(_FOLLOW_S)
            end = await self.known.end(_FOLLOW_S / 2)

    async def _from_leader(self, request: api.Request[RawRecord | None], *, patient: bool = True) -> RawRecord | None:
        """What the leader has; not `patient` where a save waits by itself."""
        try:
            return await (self._patiently(request) if patient else self._client.ask(request))
        except ApiRefused as refusal:
            raise StoreUnavailable("A read from the leader", str(refusal)) from None

    def _patience(self) -> Patience:
        return Patience(self._save_timeout_s, self._check_there)

    async def _check_there(self) -> None:
        """Raise what is certain of a log at which nobody listens: it does not exist, or its direct gets are off."""
        try:
            drifts = await self.known.drifts(age_s=FRESH_S)
        except LogUnusable:
            raise
        except StoreError:
            return
        off = [drift for drift in drifts if drift.setting == "allow_direct"]
        if off:
            raise drifted(self.app, off)

    async def _patiently(self, request: api.Request[T]) -> T:
        """The answer, however long an election takes."""
        return await self._until_answered(lambda: self._client.ask(request))

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        patience = self._patience()
        while True:
            try:
                return await ask()
            except StoreUnavailable as error:
                await patience.wait(error)


class LongReads:
    """Records of the log in pages, over a client of their own unless one was given. For one loop.

    What a save waits for does not stand behind a long history there, and the pages are folded while they travel.
    """

    def __init__(self, stream: str, reader: Client, patience: Callable[[], Patience]) -> None:
        self._patience = patience
        self._stream = stream
        self._reader = reader

    async def pages(
        self, subject: str | None, start: int, *, at_leisure: bool = False, most: int | None = None
    ) -> AsyncIterator[list[RawRecord]]:
        """The records of one subject, of those of a type, or of all, from a position on; raises what `EventStore` says.

        `most` of them, where that is given.

        While a request is answered, others may wait for it: who stands still between two pages reads `at_leisure`, and
        gets those of a request once all of them are there.
        """
        told = subject.encode() if subject is not None and not subject.endswith("*") else None
        last, left, room = start - 1, 1, REQUEST_MAX if most is None else most
        patience: Patience | None = None
        while left and room > 0:
            count = min(REQUEST_MAX, room)
            request = api.direct_page(self._stream, last + 1, subject, count=count, size=REQUEST_BYTES)
            came, ended, kept = 0, (0, 0), list[list[RawRecord]]()
            fault: StoreUnavailable | None = None
            async with self._reader.room:
                patience = patience or self._patience()  # it begins with the first request, however many go before
                parts = self._reader.stream(request)
                try:
                    async for frames in parts:
                        final = frames.pop() if api.is_status(frames[-1]) else None
                        if frames:
                            page = api.direct_records(frames, self._stream, told)
                            came = page[-1][0]
                            if at_leisure:
                                kept.append(page)
                            else:
                                room -= 0 if most is None else len(page)
                                yield page
                        if final is not None:
                            ended = request.parse(final) or (0, 0)
                            break
                except StoreUnavailable as error:
                    fault = error
                finally:
                    await parts.aclose()
            if fault is None and came != ended[0]:
                fault = StoreUnavailable(request.what, f"records up to position {ended[0]} were lost on the way")
            if came and (fault is None or not at_leisure):
                last = came  # they are in order: what follows is asked for next
                patience.progressed()
            if fault is not None:
                await patience.wait(fault)
                continue
            left = ended[1]
            for page in kept:
                room -= 0 if most is None else len(page)
                yield page


def _error_of(
    failed: outcome.Failed, subjects: Sequence[str], writes: Sequence[Append], drifts: Sequence[Drift], stream: str
) -> Exception:
    """The error that a save ends in; `drifts` are settings of the log that may be the reason."""
    changed = "".join(f" {drift}: {drift.cost}. Run `eventjet init --repair`." for drift in drifts)
    shown = ", ".join(subjects[:3]) + ("…" if len(subjects) > 3 else "")
    match failed:
        case outcome.Conflicted(index=index, rival=rival):
            return ConcurrencyConflict(
                subjects[index or 0], writes[index or 0].expected, rival=rival, is_unseen=index is None
            )
        case outcome.ErrorReply(code=code, text=text) if code in (api.NO_RESOURCES, api.STORE_FAILED):
            config = {drift.setting: drift.found for drift in drifts}
            full = full_stream(stream, {"discard": "new", **config}, code, text)
            assert full is not None  # nothing else is definite
            if code == api.STORE_FAILED:  # old events are not for anybody to remove
                return StreamFull(stream, full.limit, "Run `eventjet init --repair`, which takes the limit away.")
            return full
        case outcome.ErrorReply(code=code, text=text):
            reason = f"the server answered {text!r} ({code})"
            return Refused(f"A save to {shown}", reason, f"Nothing was stored.{changed}")
        case outcome.Violation(refused=Refused() as refused):
            return refused
        case outcome.Violation(reason=reason):
            return Forbidden(f"a publish to {shown}", reason)
        case outcome.Unknown(cause=cause, is_read_only=is_read_only, is_torn=is_torn):
            ids = [new.event_id for write in writes for new in write.events]
            if is_torn:
                return SaveTorn(subjects, ids, writes)
            cause = f"{cause}.{changed}" if changed else cause
            return OutcomeUnknown(subjects, ids, cause, writes, is_read_only=is_read_only)
