"""The log as a stream: an offset is the position up to which a query has read, with the log's identity.

Micro-batches are ranges of positions, so one that is tried again, or replayed after a crash, reads the same events. A
checkpoint that is not of this log is refused, whichever way the log was changed under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from eventjet.errors import HistoryBroken, StoreUnavailable, UsageError
from eventjet.nats.api import StreamState
from eventjet.nats.connection import NatsConnection
from eventjet.spark.options import LogOptions
from eventjet.spark.read_planning import RangePartition, asked_for, log_state, ranges, read_records
from eventjet.store.topology import IDENTITY


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process beside the driver as long as the query, with one connection; tasks have copies without it."""

    def __init__(self, options: LogOptions, columns: Sequence[str]) -> None:
        if options.last is not None:
            raise UsageError("A stream has no end. Leave toPosition out, or read the range with `spark.read`.")
        self._options = options
        self._columns = columns
        self._connection: NatsConnection | None = None
        self._state: StreamState | None = None
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark names it
        state = self._current_state()
        first, _ = asked_for(self._options, state)
        if first > state.last + 1:
            raise UsageError(
                f"fromPosition is {first}, and the log ends at {state.last}. Give {state.last + 1} at most."
            )
        identity = state.metadata.get(IDENTITY)
        return {"position": first - 1, **({"log": identity} if identity else {})}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark names it
        return ReadMaxRows(self._options.positions_per_trigger)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark names it
        end = self._checked_state(start).last
        if self._target is not None:
            end = min(end, self._target)
        if isinstance(limit, ReadMaxRows):
            end = min(end, start["position"] + limit.max_rows)
        return {**start, "position": max(end, start["position"])}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark names it
        return None if self._state is None else {"position": self._state.last}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark names it
        self._target = self._current_state().last

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[RangePartition]:
        if start["position"] >= end["position"]:
            return []
        # A batch that is replayed after a restart comes before anything asked for the log.
        state = self._state
        if state is None or state.last < end["position"]:
            state = self._checked_state(end)
        assert self._connection is not None
        return ranges(self._options, state, self._connection, start["position"] + 1, end["position"], at_least=1)

    def read(self, partition: Any) -> Iterator[Any]:
        return read_records(self._options, partition, self._columns)

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _checked_state(self, offset: dict[str, Any]) -> StreamState:
        """The log as it is now; raises `HistoryBroken` unless it is the one that `offset` was read from."""
        state = self._current_state()
        name, position = self._options.stream, offset["position"]
        was, now = offset.get("log"), state.metadata.get(IDENTITY)
        if was is not None and was != now:
            raise HistoryBroken(name, position, f"the query's checkpoint was made from the log {was}, this is {now}")
        if state.last < position:
            reason = f"the query's checkpoint says that it was read, and the log ends at {state.last}"
            raise HistoryBroken(name, position, reason)
        self._state = state
        return state

    def _current_state(self) -> StreamState:
        """Ask, and connect again once: the server drops a connection that was idle for long."""
        if self._connection is not None:
            with suppress(StoreUnavailable):
                return log_state(self._options, self._connection)
            self._connection.close()
        self._connection = NatsConnection.open(self._options.endpoint())
        return log_state(self._options, self._connection)
