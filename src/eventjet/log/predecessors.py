"""Blocking reads of single records of a log, for readers that check the predecessor of an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from eventjet.codec.headers import RawRecord
from eventjet.errors import ConnectionClosed, StoreUnavailable, Unreachable
from eventjet.jetstream.api import message_at, next_message
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint

T = TypeVar("T")

_TIMEOUT_S = 10.0
_RETRY_S = 30.0
"""How long requests to a stream without a leader are repeated."""
_PAUSE_S = 0.2
"""Pause between two tries, so that a starting server is not asked in a busy loop."""


class PredecessorReader:
    """Reads predecessors from the leader, as `codec.records.Earlier`, for one thread; any thread may `close` it."""

    def __init__(self, where: Endpoint | NatsConnection, stream: str) -> None:
        """`where` is an open connection, which its owner closes; or an endpoint, to connect to at the first request."""
        self._where = where
        self._stream = stream
        self._connection = where if isinstance(where, NatsConnection) else None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, positions: Sequence[int]) -> list[RawRecord | None]:
        """Return the record at each position, in order; None for a position without a record."""
        requests = [message_at(self._stream, position) for position in positions]
        return self._retried(lambda connection: connection.ask_all(requests, timeout_s=_TIMEOUT_S))

    def before(self, subject: bytes, position: int) -> RawRecord | None:
        """Return the last record of a subject before a position, None without one; takes 2 log2(position) requests."""
        name = subject.decode()
        candidate = self._next(name, 1)
        if candidate is None or candidate[0] >= position:
            return None
        # A later record may lie between `low` and `high`: searched from the end, where it mostly is, in doubling steps.
        low, high, step = candidate[0] + 1, position, 1
        while low < high:
            middle = max(low, high - step) if step else (low + high) // 2
            record = self._next(name, middle)
            if record is not None and record[0] < position:
                candidate, low, step = record, record[0] + 1, 0
            else:
                high, step = middle, 2 * step
        return candidate

    def close(self) -> None:
        self._closed = True
        self._hang_up()

    def _next(self, subject: str, position: int) -> RawRecord | None:
        request = next_message(self._stream, position, subject)
        return self._retried(lambda connection: connection.ask(request, timeout_s=_TIMEOUT_S))

    def _retried(self, ask: Callable[[NatsConnection], T]) -> T:
        deadline = time.monotonic() + _RETRY_S
        while True:
            try:
                return ask(self._connected())
            except (StoreUnavailable, Unreachable):
                self._hang_up()
                is_lost = self._connection is not None and not self._connection.usable
                if self._closed or is_lost or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _connected(self) -> NatsConnection:
        connection = self._connection
        if connection is None:
            assert isinstance(self._where, Endpoint)
            connection = self._connection = NatsConnection.open(self._where)
        if self._closed:
            self._hang_up()
            raise ConnectionClosed
        return connection

    def _hang_up(self) -> None:
        """Close the connection if it is the reader's own."""
        connection = self._connection
        if connection is not None and connection is not self._where:
            self._connection = None
            connection.close()
