"""The log after a position, read and decoded in a thread of its own while the loop writes.

`EventReader` reads it, and `check_log` says whether it is the log that a checkpoint was made from.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.domain.recorded import Recorded
from eventjet.errors import (
    CodecError,
    EventjetError,
    IdentityLost,
    LogIncomplete,
    LogRolledBack,
    StoreError,
    StreamMissing,
    Unreachable,
)
from eventjet.jetstream.api import StreamState, message_at, paused_until, stream_info
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import DurablePull
from eventjet.log.integrity import check_integrity, missing_range
from eventjet.log.predecessors import PredecessorReader
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.log.topology import check_settings, identity_of, info, missing_stream
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.quarantine.fold import Reader
from eventjet.subscriptions.buffer import Chunk, EventBuffer
from eventjet.writers.batch import Batch

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
CHUNK_MAX = 1_000
"""Events decoded at a time, of which several make a batch."""


@dataclass(frozen=True, slots=True)
class Source:
    """Which durable of which stream is read, and where."""

    endpoint: Endpoint
    stream: str
    durable: str


class EventReader:
    """Made by `EventReader.open`; raises from `take` whatever ended the reading, after the events before it."""

    def __init__(
        self,
        pull: DurablePull,
        buffer: EventBuffer,
        decode: Reader,
        earlier: PredecessorReader,
        position: int,
        name: str,
    ) -> None:
        self._pull = pull
        self._buffer = buffer
        self._decode = decode
        self._earlier = earlier
        self._position = position
        self._peeked: Batch | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._read, name=f"eventjet {name}", daemon=True)

    @classmethod
    async def open(
        cls,
        source: Source,
        position: int,
        decoder: Callable[[PredecessorReader], Reader],
        batch_max: int,
        filters: Sequence[str] = (),
    ) -> EventReader:
        """Take the durable over, so that it goes on after `position`; `start` begins to read.

        What is read is what `decoder` makes, which is given the log to ask for what an event follows.
        """
        endpoint = source.endpoint.with_name(f"eventjet worker {source.durable}")
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                DurablePull,
                endpoint,
                source.stream,
                source.durable,
                position=position,
                filters=filters,
                batch_max=min(batch_max, CHUNK_MAX),
            )
        )
        try:
            pull = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)  # a thread goes on, whoever waits for it
            raise
        earlier = PredecessorReader(pull.link, source.stream)
        return cls(pull, EventBuffer(batch_max), decoder(earlier), earlier, position, source.durable)

    def start(self) -> None:
        self._thread.start()

    async def take(self, timeout_s: float) -> Batch | None:
        """The next events; None when none came in time or `wake` was called."""
        batch, self._peeked = self._peeked, None
        return await self._buffer.take(timeout_s) if batch is None else batch

    async def peek_whole(self) -> Batch | None:
        """What the next `take` returns, once it is as many as may be in a batch; None when reading ends before.

        Nothing is lost where it is cancelled: it waits only while the buffer still has the events.
        """
        if self._peeked is None:
            self._peeked = await self._buffer.take_whole()
        return self._peeked

    def wake(self) -> None:
        self._buffer.wake()

    def left_after(self, position: int) -> int:
        return left_after(self._pull, position)

    def end(self) -> None:
        """Read no more than what comes next; whoever takes goes on while it `has_more`."""
        self._ending = True

    @property
    def has_more(self) -> bool:
        """Whether something that was read was not taken."""
        return self._peeked is not None or self._buffer.has_more

    async def close(self) -> None:
        """End the thread and the connection; the durable stays."""
        self._buffer.close()
        self._earlier.close()
        await asyncio.to_thread(close_reading, self._pull, self._thread)

    def _read(self) -> None:
        """The thread: whatever ends it is handed over."""
        try:
            for records in self._pull:
                if (records and not self._hand_over(records)) or self._ending:
                    break
            self._buffer.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by the task that takes
            self._buffer.fail(error)

    def _hand_over(self, records: Sequence[RawRecord]) -> bool:
        """Decode and put; a record that cannot be decoded ends the chunk before it. False when nobody takes."""
        decode = self._decode
        decode.expect(records)
        events: list[Recorded[Any]] = []
        done = 0
        fault: CodecError | None = None
        try:
            for record in records:
                event = decode(record)
                if event is not None:
                    events.append(event)
                done += 1
        except CodecError as error:
            fault = error
        if done:
            last = records[done - 1]
            size = sum([len(record[4]) for record in records[:done]])
            event_id, left = header(last[3], MSG_ID) or "", self._pull.pending
            chunk = Chunk(self._position, last[0], event_id, events, done, size, left)
            self._position = last[0]
            if not self._buffer.put(chunk):
                return False
        if fault is not None:
            raise fault
        return True


def left_after(pull: DurablePull, position: int) -> int:
    """About how many events are known to come after `position`; 0 at the end."""
    # The thread that reads changes this last: what arrives in between counts twice, never not at all.
    pending = pull.pending
    return max(0, pull.position - position) + pending


async def left_in_log(client: Client, stream: str, position: int) -> int:
    """About how many events come after `position`, for who has not begun to read."""
    return max(0, (await info(client, stream)).last - position)


def _close_unused(opened: asyncio.Future[DurablePull]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


def close_reading(pull: DurablePull, thread: threading.Thread) -> None:
    """End what a thread reads, and the thread, if it was started. Blocks."""
    pull.close()
    if thread.ident is not None:
        thread.join(_JOIN_S)
        if thread.is_alive():
            logs.THREAD_LEFT.tell(_log, thread=thread.name, seconds=_JOIN_S)


class Stand(Protocol):
    """Where something that follows a log stands, a checkpoint or a cursor: at which event of which log."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> str: ...
    @property
    def position(self) -> int: ...
    @property
    def event_id(self) -> str: ...


def state_of_log(connection: NatsConnection, stream: str) -> tuple[str, StreamState]:
    """(identity, state) of an app's stream; raises `Unreachable` when `init` has not made it."""
    try:
        state = connection.ask(stream_info(stream))
    except StreamMissing:
        raise missing_stream(stream) from None
    return identity_of(state), state


async def learn_voids(client: Client, stream: str, catalog: Catalog) -> None:
    """Have the readers of a worker pass over what its log declares void."""
    catalog.voids.update(await client.run(reading_skip_markers(stream)))


def check_log(connection: NatsConnection, stream: str, held: Stand) -> None:
    """Raise `LogRolledBack` where the checkpoint was not made from this log. Blocks."""
    identity, state = state_of_log(connection, stream)
    fault = _another_past(identity, state, held, _record_under(connection, stream, held))
    if fault is not None:
        raise fault


async def check_whole_log(client: Client, stream: str, held: Stand) -> str:
    """The log's identity, if the checkpoint was made from it, and may go on from there.

    Raises `LogRolledBack`, `LogIncomplete` and `LogDrifted`.
    """
    state = await info(client, stream)
    identity = identity_of(state)
    record = await client.ask(message_at(stream, held.position)) if held.position else None
    fault = _fault(identity, state, held, record)
    if fault is not None:
        raise fault
    check_settings(state)
    return identity


async def check_running(client: Client, stream: str, held: Stand, log: str) -> None:
    """What may change under a worker while it reads: raises as `check_whole_log`.

    A server that is away is no fault, and another past under the same identity ends the reading by itself.
    """
    try:
        state = await info(client, stream)
        identity = identity_of(state)
    except IdentityLost:
        raise
    except (StoreError, Unreachable):
        return
    if identity != log:
        raise LogRolledBack(held.name, held.position, _other(log, stream, identity))
    check_integrity(state)
    check_settings(state)


async def pause_of(client: Client, stream: str, durable: str) -> str | None:
    """Why nothing comes where somebody has paused the durable at the server, whose heartbeats go on; None else.

    Nor is anything known where the server is away, or does not let us ask.
    """
    try:
        until = await client.ask(paused_until(stream, durable))
    except EventjetError:
        return None
    what = f"its consumer {durable!r} of the stream {stream!r} is paused at the server until {until}"
    return f"{what}. Run `nats consumer resume {stream} {durable}`" if until else None


def log_fault(
    connection: NatsConnection, identity: str, state: StreamState, held: Stand
) -> LogRolledBack | LogIncomplete | None:
    """Why the projection cannot go on over this log; None if it can. Blocks."""
    return _fault(identity, state, held, _record_under(connection, state.name, held))


def _record_under(connection: NatsConnection, stream: str, held: Stand) -> RawRecord | None:
    """What the log has where the checkpoint stands. Blocks."""
    return connection.ask(message_at(stream, held.position)) if held.position else None


def _fault(
    identity: str, state: StreamState, held: Stand, record: RawRecord | None
) -> LogRolledBack | LogIncomplete | None:
    """As `log_fault`, for a log that has `record` where the checkpoint stands."""
    fault = _another_past(identity, state, held, record)
    gone = "" if fault else missing_range(state)
    return LogIncomplete(f"The log {state.name!r}", gone) if gone else fault


def _another_past(identity: str, state: StreamState, held: Stand, record: RawRecord | None) -> LogRolledBack | None:
    """Why the checkpoint was not made from this log, None if it was.

    A log restored from an old backup and grown again has a longer tail but another past: hence the event's id.
    """
    if held.position == 0:
        return None
    if held.log != identity:
        return LogRolledBack(held.name, held.position, _other(held.log, state.name, identity))
    if state.last < held.position:
        return LogRolledBack(held.name, held.position, f"the log ends at position {state.last}")
    if record is None:
        return LogRolledBack(held.name, held.position, "the log has no event there any more")
    event_id = header(record[3], MSG_ID) or ""
    if event_id == held.event_id:
        return None
    reason = f"the event there is {event_id or 'without id'}, and it was {held.event_id}"
    return LogRolledBack(held.name, held.position, reason)


def _other(log: str, stream: str, identity: str) -> str:
    return f"it was made from the log {log} and the stream {stream!r} is {identity}"
