"""Event sources of subscriptions: the app's own log, or another stream that an inbox reads messages from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.codec.headers import RawRecord
from eventjet.commands.repository import Repositories
from eventjet.domain.reactor import Inbox, Incoming
from eventjet.errors import LogRolledBack, StoreError, StreamMissing, UnexpectedExit
from eventjet.jetstream.api import StreamState, message_at, stream_info
from eventjet.jetstream.client import Client
from eventjet.log.gathering import check_gathering, source_names, stalled_sources
from eventjet.log.integrity import pause_of, succession_fault
from eventjet.log.mirror import LogReader
from eventjet.log.predecessors import PredecessorReader
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.log.topology import reading_log_state
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.projections.fold import Offered, Offering, Reader, aggregate_key_of
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.declarations import Declaration, filters_of, missing_stream

_log = logging.getLogger(__name__)


class EventSource(Protocol):
    """A stream as a subscription reads it."""

    stream: str
    endpoint: Endpoint
    """Where the stream is read."""
    filters: Sequence[str]
    forgets: bool
    """Whether the stream may drop old records as part of its normal operation."""

    async def check(self, cursor: Cursor) -> str:
        """Return what identifies the stream, or one that continues it; raises if the cursor cannot go on there."""
        ...

    async def look(self, cursor: Cursor, durable: str) -> str | None:
        """Check again what may change while the stream is read; return why its durable delivers nothing when paused.

        Raises as `check`, but a server that cannot be reached or an inbox stream that is missing is not a fault.
        """
        ...

    def reader(self, predecessors: PredecessorReader) -> Reader:
        """Return the decoder that turns records of this stream into `Offered` events."""
        ...

    def decode(self, record: RawRecord) -> Offered | None:
        """Decode one record by itself; None for a record that the subscription does not take or that is skipped."""
        ...

    async def at(self, position: int) -> RawRecord | None:
        """Return the record at a position, or None."""
        ...

    def noted(self, cursor: Cursor) -> Cursor:
        """Return a cursor with what it has to remember of this stream."""
        ...


class LogSource:
    """The app's own log, filtered to the aggregates of a declaration's events."""

    forgets = False

    def __init__(self, repositories: Repositories, log: LogReader, declaration: Declaration) -> None:
        self.stream = repositories.app.name
        self.endpoint = log.endpoint
        self.filters: Sequence[str] = filters_of(repositories.app, declaration.events)
        self._repositories = repositories
        self._log = log
        self._declaration = declaration

    async def check(self, cursor: Cursor) -> str:
        identity = await self._log.check(cursor)
        if identity != cursor.log:
            state = await self._log.client.run(reading_log_state(self.stream))
            if reason := succession_fault(state, cursor.log, cursor.furthest):
                raise LogRolledBack(cursor.name, cursor.furthest, reason)
        skip_markers = await self._log.client.run(reading_skip_markers(self.stream))
        self._repositories.catalog.skipped.update(skip_markers)
        return identity

    async def look(self, cursor: Cursor, durable: str) -> str | None:
        return await self._log.look(cursor, cursor.log, durable)

    def reader(self, predecessors: PredecessorReader) -> Reader:
        offering = Offering(self._repositories.catalog, self._declaration.events, (), predecessors)
        return offering if self._declaration.partitions == 1 else _PartitionReader(offering, self._declaration)

    def decode(self, record: RawRecord) -> Offered | None:
        return Offering(self._repositories.catalog, self._declaration.events)(record)

    async def at(self, position: int) -> RawRecord | None:
        return await self._repositories.store.at(position)

    def noted(self, cursor: Cursor) -> Cursor:
        return cursor


class StreamSource:
    """The stream of an inbox, which is identified by its time of creation and may drop old messages."""

    forgets = True

    def __init__(self, inbox: Inbox[Any, Any], client: Client) -> None:
        self.stream = inbox.stream
        self.endpoint = client.endpoint
        self._name = inbox.name
        self.filters: Sequence[str] = (inbox.subject,)
        self._client = client
        self._inbox = inbox
        self._decoder = IncomingDecoder(inbox.type, "")
        self._origins: dict[str, str] = {}
        """When the origins of a gathered stream were made, by their names; replaced, since another thread reads it."""

    async def check(self, cursor: Cursor) -> str:
        state = await self._check(cursor)
        if self._inbox.sources:
            check_gathering(state, self._inbox)
        # The stream is part of the id of a message without one, and may have been created anew since the last session.
        self._decoder = IncomingDecoder(self._inbox.type, cursor.log, source_names(state))
        self._origins = dict(cursor.origins)
        return cursor.log

    async def _check(self, cursor: Cursor) -> StreamState:
        try:
            state = await self._client.ask(stream_info(self.stream))
        except StreamMissing:
            raise missing_stream(self._name, self.stream) from None
        if state.created != cursor.log:
            reason = f"the stream {self.stream!r} was made at {state.created}, and it began in one of {cursor.log}"
            raise LogRolledBack(cursor.name, cursor.position, reason, _way_out(cursor))
        if state.last < cursor.position:
            reason = f"the stream {self.stream!r} ends at {state.last}"
            raise LogRolledBack(cursor.name, cursor.position, reason, _way_out(cursor))
        return state

    async def look(self, cursor: Cursor, durable: str) -> str | None:
        try:
            state = await self._check(cursor)
        except StoreError:
            return None
        return await pause_of(self._client, self.stream, durable) or next(iter(stalled_sources(state)), None)

    def reader(self, predecessors: PredecessorReader) -> Reader:
        del predecessors  # those of another stream have none
        return self

    def __call__(self, record: RawRecord, /) -> Any:
        return self.decode(record)

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Do nothing: no predecessors have to be looked up."""

    def decode(self, record: RawRecord) -> Offered | None:
        try:
            message = self._decoder(record)
            self._compare_origin(message)
            return Offered(record, cast("Any", message))
        except BaseException as raised:  # noqa: BLE001 - a type of the application's own
            return Offered(record, None, UnexpectedExit.instead_of(raised))

    async def at(self, position: int) -> RawRecord | None:
        return await self._client.ask(message_at(self.stream, position))

    def noted(self, cursor: Cursor) -> Cursor:
        origins = tuple(sorted(self._origins.items()))
        return cursor if origins == cursor.origins else replace(cursor, origins=origins)

    def _compare_origin(self, message: Incoming[Any]) -> None:
        """Log when an origin was made again since its last message."""
        origin = message.origin
        if origin is None or not origin.made:
            return
        name = f"{origin.stream} ({origin.api})" if origin.api else origin.stream
        previous = self._origins.get(name)
        if previous != origin.made:
            self._origins = {**self._origins, name: origin.made}
            if previous is not None:
                logs.SOURCE_MADE_AGAIN.log(_log, name=self._name, position=message.position, source=name)


def _way_out(cursor: Cursor) -> str:
    return (
        "bring the right stream back, or say where it goes on in this one (`eventjet cursor set "
        f"{cursor.name} POSITION`, 0 for its beginning)"
    )


class _PartitionReader:
    """Decodes the records of one partition's aggregates and leaves out all others."""

    def __init__(self, offering: Offering, declaration: Declaration) -> None:
        self._offering = offering
        self._declaration = declaration

    def __call__(self, record: RawRecord, /) -> Any:
        return self._offering(record) if self._is_own(record) else None

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Announce only the records of this partition, so that no predecessor of another record is looked up."""
        self._offering.expect([record for record in records if self._is_own(record)])

    def _is_own(self, record: RawRecord) -> bool:
        return self._declaration.has(aggregate_key_of(record[2]))
