"""What the log is when a read is planned: its bounds, whether anything is missing, and the ranges to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition

from eventjet.errors import HistoryBroken, StreamMissing, Unreachable
from eventjet.nats.api import StreamState, deleted_positions, messages_of, stream_info
from eventjet.nats.connection import NatsConnection
from eventjet.nats.ranges import Range, range_count, read_range, split
from eventjet.spark.columns import SCHEMA, arrow_batch
from eventjet.spark.options import LogOptions

BATCH = 1_000
"""Records an Arrow batch; a record may be nearly a megabyte."""


@dataclass
class RangePartition(InputPartition):
    """Positions `start` <= position < `end`."""

    start: int
    end: int


def log_state(options: LogOptions, connection: NatsConnection) -> StreamState:
    """The stream as its leader sees it; raises `Unreachable` when there is none."""
    try:
        return connection.ask(stream_info(options.stream))
    except StreamMissing:
        raise Unreachable(
            f"The stream {options.stream!r}",
            "it does not exist on this server",
            "Name the app as `stream`, and its server as `servers`.",
        ) from None


def asked_for(options: LogOptions, state: StreamState) -> tuple[int, int]:
    """(first, last) position of the read; raises `HistoryBroken` when the log does not have what was named."""
    begins = max(state.first, 1)
    first = begins if options.first is None else max(options.first, 1)
    last = state.last if options.last is None else options.last
    if first <= last and first < begins:
        raise HistoryBroken(options.stream, first, f"the log begins at position {begins}")
    if first <= last and last > state.last:
        missing = f"the log ends at {state.last}, though positions up to {last} were asked for"
        raise HistoryBroken(options.stream, state.last + 1, missing)
    return first, last


def ranges(
    options: LogOptions, state: StreamState, connection: NatsConnection, first: int, last: int, at_least: int
) -> list[RangePartition]:
    """Cut `first` to `last` into what tasks read; raises `HistoryBroken` for what a filtered read would not notice."""
    events = last - first + 1
    if options.subject is not None and events > 0:
        if state.deleted:
            _raise_for_holes(options, connection, first, last)
        if not options.subject.endswith("*"):
            # One aggregate is a few events in a log of many: not worth a task for every range of the log.
            events, at_least = min(events, connection.ask(messages_of(options.stream, options.subject))), 1
    count = options.partitions or range_count(events, at_least)
    return [RangePartition(part.start, part.end) for part in split(first, last, count)]


def read_records(options: LogOptions, partition: Any, columns: Sequence[str]) -> Iterator[Any]:
    """A range in Arrow batches, the same on every try; raises `HistoryBroken` for a position that is missing."""
    start, end, subject = partition.start, partition.end, options.subject
    for records in read_range(options.endpoint(), options.stream, start, end, batch=BATCH, filter_subject=subject):
        yield arrow_batch(records, columns)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Reads the ranges whose numbers it is given; on every try the same records, or an error."""

    options: LogOptions
    ranges: tuple[Range, ...]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_records(self.options, self.ranges[number], self.options.columns)


def log_frame(spark: SparkSession, options: Mapping[str, str], ranges: Sequence[Range]) -> DataFrame:
    """The records of the ranges in the source's `SCHEMA`, a partition for each range, in order within it.

    `options` are the source's, and name no positions. A position that is missing fails the query. The source gives the
    same rows, but Spark starts three Python processes, one after the other, to ask which sources there are, how to make
    this one and how to cut it. A plan that has cut the log already needs none of them, and its reading and its folding
    share their Python workers.
    """
    numbers: Any = spark.range(0, len(ranges), 1, len(ranges))
    return numbers.mapInArrow(ReadTask(LogOptions.parse(options), tuple(ranges)), SCHEMA)


def _raise_for_holes(options: LogOptions, connection: NatsConnection, first: int, last: int) -> None:
    for hole in connection.ask(deleted_positions(options.stream)):
        if first <= hole <= last:
            raise HistoryBroken(options.stream, hole, "it is missing")
