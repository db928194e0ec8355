"""Timers on the server: message schedules (ADR-51) in a stream beside the log, which wake a process at its deadline.

They are not in the log: schedules need `discard: old`, and switch off what protects a log from being purged. A timer
is disposable (ADR 0027): it has the version of the process that it was set for, only a later version replaces it, and
the process decides by its state. When it fires, the server stores a message under a `due` subject, which stays until it
is cleared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeVar

from eventjet import failpoints
from eventjet.codec.headers import EXPECTED, RawRecord, header, header_block, number_of, stored_at
from eventjet.codec.subjects import due_subject, timer_stream, timer_subject
from eventjet.domain.identity import decode_id, encode_id
from eventjet.domain.moment import in_utc
from eventjet.errors import ApiRefused, StoreUnavailable
from eventjet.jetstream import api
from eventjet.jetstream.api import Request
from eventjet.jetstream.client import Client
from eventjet.log.topology import explained, timer_config
from eventjet.text import utc_text

T = TypeVar("T")

FARTHEST = timedelta(days=365 * 100)
"""How far ahead a timer is set, since the server's clock ends in 2262; a later one is set again as it fires."""
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
"""The earliest time that a timer is set for: a time before 1677 would wrap to a time in the future."""
_VERSION = "Ej-Version"
_AT = "Ej-At"
_SCHEDULE, _TARGET = "Nats-Schedule", "Nats-Schedule-Target"
_TRIES = 5
_TIMERS_MAX = 100_000
_LATE_S = 10.0
"""How long after its time a timer that has not fired counts as lost: the server fires within half a second."""
_DUE_MAX = 100
SHARED_S = 0.1
"""How long an answer of `newest_fired` is shared, by all process types of a worker."""


@dataclass(frozen=True, slots=True)
class Due:
    """A timer that has fired."""

    process_id: str
    version: int
    """Version of the process when the timer was set."""
    at: datetime
    """The server's time when it fired."""
    sequence: int
    """Sequence of its message in the stream of timers, for `clear`."""


class _TimerState(NamedTuple):
    """What is known of a timer since it was set or read last."""

    sequence: int = 0
    """Sequence of the schedule's message; 0 if there is none or the timer has fired."""
    version: int = 0
    time: str = ""


class JetStreamTimers:
    """The timers of an app on JetStream.

    Any number of tasks of one event loop may use them, one at a time for each process. The methods raise
    `StoreUnavailable`, `LogUnusable`, `StreamMissing` and `Forbidden`.
    """

    def __init__(self, client: Client, app: str) -> None:
        self._client = client
        self._app = app
        self._stream = timer_stream(app)
        self._timer_state: dict[str, _TimerState] = {}
        self._newest, self._newest_read_at = 0, float("-inf")
        self._newest_lock = asyncio.Lock()

    async def set(self, process: str, process_id: str, version: int, at: datetime, fired: int = 0) -> None:
        """Set a process's timer unless a later version has; `fired` is the sequence of the one being handled, or 0."""
        token = encode_id(process_id)
        subject = timer_subject(self._app, process, token)
        time = utc_text(max(_EARLIEST, min(in_utc(at), datetime.now(UTC) + FARTHEST)))
        for _ in range(_TRIES):
            timer = None if fired else self._timer_state.get(subject)
            if timer is None or _is_late(timer):
                timer = await self._read(process, token, fired)
            if timer.version > version or (timer.version == version and timer.time == time and not _is_late(timer)):
                return
            if await self._publish(process, token, _TimerState(timer.sequence, version, time)):
                return
        raise StoreUnavailable(f"The timer of {process} {process_id!r}", "others keep changing it")

    async def set_late_again(self, process: str) -> int:
        """Set the timers of a process type again that the server did not fire at their time; return how many.

        nats-server 2.15.1 marks a timer that it is firing, and clears the mark when the timer's message is stored or
        the leader changes. If the stream is scaled from one replica to three in between, that message is lost, the
        leader stays, and so does the mark. The server fires a timer that is set again.
        """
        subject, start, late = timer_subject(self._app, process, "*"), 1, 0
        while records := await self._client.run(api.reading_records(self._stream, subject, api.PAGE_MAX, start=start)):
            start = records[-1][0] + 1
            for record in records:
                timer = _timer_state(record, record[0])
                if _is_late(timer):
                    late += await self._publish(process, record[2].decode().rpartition(".")[2], timer)
        return late

    async def _publish(self, process: str, token: str, timer: _TimerState) -> bool:
        """Set a timer in place of the one at `sequence`; return False if another worker has changed it meanwhile."""
        subject = timer_subject(self._app, process, token)
        headers = [
            (EXPECTED, str(timer.sequence)),
            (_SCHEDULE, f"@at {timer.time}"),
            (_TARGET, due_subject(self._app, process, token)),
            (_VERSION, str(timer.version)),
            (_AT, timer.time),
        ]
        self._timer_state.pop(subject, None)  # until there is an answer, the timer may or may not be set
        failpoints.reach("timer.before_set")
        try:
            frame = await self._client.request(subject, b"", header_block(headers), stream=self._stream)
            failpoints.reach("timer.set")
            answer = api.answer_in(frame, f"The timer of {process} {decode_id(token)!r}")
        except (ApiRefused, StoreUnavailable) as error:
            if isinstance(error, ApiRefused) and error.err_code in (api.WRONG_SEQUENCE, api.IN_PROCESS):
                return False
            raise await explained(self._client, timer_config(self._app, 1), error) from error
        self._remember(subject, timer._replace(sequence=int(answer["seq"])))
        return True

    async def cancel(self, process: str, process_id: str, version: int) -> None:
        """Remove a known timer of this version or an earlier one; one that stays fires once, and changes nothing."""
        subject = timer_subject(self._app, process, encode_id(process_id))
        timer = self._timer_state.get(subject)
        if timer is not None and timer.sequence and timer.version <= version:
            # Only up to the known sequence, so that a successor's timer is never removed.
            await self._client.ask(api.purge_stream(self._stream, subject, timer.sequence))
            self._timer_state.pop(subject, None)

    async def newest_fired(self) -> int:
        """Return the highest sequence of a timer that has fired, of all processes, or 0; shared for `SHARED_S`."""
        async with self._newest_lock:
            loop = asyncio.get_running_loop()
            if loop.time() - self._newest_read_at > SHARED_S:
                record = await self._ask(api.last_message(self._stream, due_subject(self._app, "*", "*")))
                self._newest, self._newest_read_at = 0 if record is None else record[0], loop.time()
            return self._newest

    async def due(self, process: str, after: int) -> Sequence[Due]:
        """Return up to 100 timers of a process type that fired after a sequence and were not cleared, in order."""
        fired: list[Due] = []
        subject = due_subject(self._app, process, "*")
        while len(fired) < _DUE_MAX:
            record = await self._ask(api.next_message(self._stream, after + 1, subject))
            if record is None:
                break
            after = record[0]
            fired.append(_due(record))
        return fired

    async def clear(self, process: str, due: Due) -> None:
        """Remove a timer that has fired and was handled."""
        token = encode_id(due.process_id)
        failpoints.reach("timer.before_clear")
        await self._client.ask(api.purge_stream(self._stream, due_subject(self._app, process, token), due.sequence))

    async def _ask(self, request: Request[T]) -> T:
        try:
            return await self._client.ask(request)
        except (ApiRefused, StoreUnavailable) as error:
            raise await explained(self._client, timer_config(self._app, 1), error) from error

    async def _read(self, process: str, token: str, fired: int) -> _TimerState:
        """Return the timer of a process; a timer that fired after `fired` and is not handled yet has sequence 0."""
        timer = await self._client.ask(api.last_message(self._stream, timer_subject(self._app, process, token)))
        if timer is not None:
            return _timer_state(timer, timer[0])
        due_timer = await self._client.ask(api.last_message(self._stream, due_subject(self._app, process, token)))
        return _TimerState() if due_timer is None or due_timer[0] <= fired else _timer_state(due_timer, 0)

    def _remember(self, subject: str, timer: _TimerState) -> None:
        self._timer_state[subject] = timer
        if len(self._timer_state) > _TIMERS_MAX:
            del self._timer_state[next(iter(self._timer_state))]


@dataclass(frozen=True, slots=True)
class TimerSet:
    """A timer of a process, for display."""

    process_id: str
    at: datetime
    due: bool = False
    """Whether the timer has fired and was not handled yet."""


async def timers_set(client: Client, app: str, process: str, limit: int | None = None) -> list[TimerSet]:
    """Return up to `limit` timers of a process type that have not fired; none if there is no stream of timers."""
    return await _timers(client, app, timer_subject(app, process, "*"), limit, due=False)


async def timers_due(client: Client, app: str, process: str, limit: int | None = None) -> list[TimerSet]:
    """Return up to `limit` timers of a process type that have fired and were not handled."""
    return await _timers(client, app, due_subject(app, process, "*"), limit, due=True)


async def _timers(client: Client, app: str, subject: str, limit: int | None, *, due: bool) -> list[TimerSet]:
    records = await client.run(api.reading_records(timer_stream(app), subject, limit))
    return [TimerSet(process_of(record[2]), timer_time(record[3]), due) for record in records]


def process_of(subject: bytes) -> str:
    """Return the id of the process in the subject of a timer."""
    return decode_id(subject.decode().rpartition(".")[2])


def timer_time(block: bytes) -> datetime:
    """Return the time that a timer is set for, from the headers of its message."""
    return datetime.fromisoformat(header(block, _AT) or "1970-01-01T00:00:00Z")


def _is_late(timer: _TimerState) -> bool:
    """Return whether a timer should have fired long ago; one that has fired, or does not exist, is not late."""
    latest = datetime.now(UTC) - timedelta(seconds=_LATE_S)
    return bool(timer.sequence and timer.time) and datetime.fromisoformat(timer.time) < latest


def _timer_state(record: RawRecord, sequence: int) -> _TimerState:
    return _TimerState(sequence, number_of(record[3], _VERSION) or 0, header(record[3], _AT) or "")


def _due(record: RawRecord) -> Due:
    sequence, _, subject, block, _ = record
    return Due(process_of(subject), number_of(block, _VERSION) or 0, stored_at(record), sequence)
