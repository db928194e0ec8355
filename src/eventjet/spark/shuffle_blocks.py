"""Pack records into shuffle blocks by partition, and unpack them in the task that folds the partition.

A shuffle block has records of one partition in the order of the log, as bytes that Spark moves and sorts without
reading them: a few rows of some hundred kilobytes instead of a row of five columns for every event. A block is filled
from positions that were read one after the other without a gap, so the blocks of a partition do not overlap. Sorted by
their first position, they are in the order of the log, in whatever order their files were read.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from pyspark import TaskContext
from pyspark.sql import DataFrame

from eventjet.codec.headers import RawRecord
from eventjet.codec.records import chained
from eventjet.errors import CodecError, ProjectionError
from eventjet.log.predecessors import PredecessorReader
from eventjet.projections.app_ref import AppRef
from eventjet.projections.fold import Fold, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.rebuild.folding import Folding, fold_of, key_token
from eventjet.rebuild.plan import Route, route_of
from eventjet.runtime import uncollected
from eventjet.spark.columns import arrow_schema, pyarrow
from eventjet.spark.source import LogOptions, Reader

BLOCK_BYTES = 1_000_000
"""The maximum size of a block before it is compressed, unless a single record is larger."""
_BUFFER_BYTES = (1_000_000, 32_000_000)
"""The least and the most bytes that a task buffers before it sends all blocks; in between, `_PARTITION_BYTES` for each
partition."""
_PARTITION_BYTES = 500_000

CONF = {"spark.sql.execution.arrow.maxBytesPerBatch": "4000000"}
"""Settings of a session that shuffles blocks: by default, up to ten thousand rows go to a Python worker at once."""

_COLUMNS = {
    "partition": "int",
    "position": "bigint",
    "events": "bigint",
    "size": "bigint",
    "records": "binary",
    "fault": "string",
}
BLOCK_COLUMNS = ", ".join(f"{name} {ddl}" for name, ddl in _COLUMNS.items())
"""The columns of a block, in Spark's DDL: its partition, the position of its first record, the number of events
that it accounts for, the size of its records before compression, and the records. A row without records says how many
events a task has read, or why it failed."""

_CODEC = "lz4"
_WINDOW_EVENTS = 50_000
"""About how many events of one partition are merged in memory."""


class TaskFault(Exception):
    """A fault of an earlier task, which that task returned as a value."""


@dataclass(frozen=True, slots=True)
class StateNames:
    """The function of a projection from an event to the aggregate that it names, for a task to make."""

    app: AppRef
    projection: str
    skipped: Mapping[int, str]

    def load(self) -> Callable[[RawRecord], bytes | None]:
        """Return a function from a record to the id, as it is in subjects, of the aggregate that its event names."""
        app = self.app.load()
        resolved = fold_of(app, self.projection)
        assert resolved.joins is not None
        decode = chained(app.catalog.of_log(self.skipped), resolved.joins.lookups.keys(), None)
        fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type))

        def named(record: RawRecord) -> bytes | None:
            event = decode(record)
            state_id = None if event is None else fold.named(event)
            return None if state_id is None else state_id[1].encode()

        return named


@dataclass(frozen=True, slots=True)
class PackByAggregate:
    """A Spark task that packs records by the aggregate id in their subject, or by that which their event `names`."""

    read: Reader
    partitions: int
    names: StateNames | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _or_fault(self._packed(batches))

    def _packed(self, batches: Iterator[Any]) -> Iterator[Any]:
        named = None if self.names is None else self.names.load()
        packer, partitions = _Packer(self.partitions), self.partitions
        with uncollected():
            for records in self.read(batches):
                yield from packer.begin(records)
                buffers = packer.buffers
                for record in records:
                    # The row's key is the id alone, so aggregates of different types with one id go together.
                    subject = record[2]
                    token = subject[subject.rfind(b".") + 1 :]
                    if named is not None:
                        token = named(record) or token
                    buffers[crc32(token) % partitions].append(record)
                yield from packer.count(records)
            yield from packer.flush()


@dataclass(frozen=True, slots=True)
class PackByKey:
    """A Spark task that decodes events and packs each record once for each key of its event, with the key's token."""

    read: Reader
    partitions: int
    app: AppRef
    projection: str
    dialect: ColumnValues
    options: LogOptions | None
    """How to reach the log, in which an event's predecessor is looked up; None where nobody checks it."""
    skipped: Mapping[int, str]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        with _predecessors(self.options) as predecessors:
            yield from _or_fault(self._packed(batches, predecessors))

    def _packed(self, batches: Iterator[Any], predecessors: PredecessorReader | None) -> Iterator[Any]:
        app = self.app.load()
        resolved = fold_of(app, self.projection)
        decode = chained(app.catalog.of_log(self.skipped), resolved.events, predecessors)
        fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type, self.dialect))
        packer = _Packer(self.partitions, keyed=True)
        events = 0
        for records in self.read(batches):
            events += len(records)
            yield from packer.begin(records)
            decode.expect(records)
            for record in records:
                event = decode(record)
                for key in fold.keyed((event,))[1] if event is not None else ():
                    token = key_token(key)
                    packer.buffers[crc32(token.encode()) % self.partitions].append((token, record))
                    # One event may have thousands of keys and be sent in several blocks; their keys differ.
                    yield from packer.count((record,))
        yield from packer.flush()
        yield _batch([{"events": events}])


@dataclass(frozen=True, slots=True)
class PackByState:
    """A Spark task that folds the states of a partition's aggregates, and packs events by the keys that these give.

    It takes the blocks of `PackByAggregate`. Its own have (entry, record) pairs of events, and (None, row) pairs of
    states, at position 0; both account for no events. Blocks of different tasks overlap within a window of positions,
    and no block is of two windows: see `in_windows`.
    """

    partitions: int
    app: AppRef
    projection: str
    dialect: ColumnValues
    options: LogOptions | None
    """How to reach the log, in which an event's predecessor is looked up; None where nobody checks it."""
    skipped: Mapping[int, str]
    with_states: bool = True
    """Whether the states themselves are sent on, too, to be loaded."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get() if self.with_states else None
        part = 0 if context is None else context.partitionId()
        with uncollected(), _predecessors(self.options) as predecessors:
            yield from _or_fault(self._packed(batches, predecessors, part))

    def _packed(self, batches: Iterator[Any], predecessors: PredecessorReader | None, part: int) -> Iterator[Any]:
        app = self.app.load()
        resolved = fold_of(app, self.projection)
        folding = Folding(resolved, self.dialect, {})
        decode = reader(app.catalog.of_log(self.skipped), resolved, (), predecessors)
        packer = _Packer(self.partitions, keyed=True)
        events = window = 0
        for accounted, records in unpack(batches):
            events += accounted
            decode.expect(records)
            by_position = {record[0]: record for record in records}
            decoded = [event for record in records if (event := decode(record)) is not None]
            for token, entry in folding.entries_of(decoded):
                if window_of(entry[1], self.partitions) != window:
                    yield from packer.flush()
                    window = window_of(entry[1], self.partitions)
                record = by_position[entry[1]]
                packer.buffers[crc32(token.encode()) % self.partitions].append((entry, record))
                yield from packer.count((record, (0, 0, b"", b"", entry[3] or b"")))
        yield from packer.flush()
        for row in folding.state_rows() if self.with_states else ():
            packer.buffers[part].append((None, (0, *row)))
            yield from packer.count(((0, 0, b"", b"", str(row[-1]).encode()),))
        yield from packer.flush()
        yield _batch([{"events": events}])


def packing(
    read: Reader,
    partitions: int,
    app: AppRef,
    resolved: ResolvedProjection,
    dialect: ColumnValues,
    options: LogOptions | None,
    skipped: Mapping[int, str],
) -> PackByAggregate | PackByKey:
    """Return the task that packs the records of a projection for their first shuffle."""
    if route_of(resolved) is Route.BY_KEY:
        return PackByKey(read, partitions, app, resolved.name, dialect, options, skipped)
    names = resolved.joins is not None and resolved.joins.lookups
    return PackByAggregate(read, partitions, StateNames(app, resolved.name, skipped) if names else None)


def _predecessors(options: LogOptions | None) -> AbstractContextManager[PredecessorReader | None]:
    return nullcontext() if options is None else options.predecessors()


def _or_fault(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches; an error about an event becomes a batch that says it, since another try would only fail again."""
    try:
        yield from batches
    except (CodecError, ProjectionError, TaskFault) as error:
        yield _batch([{"fault": str(error)}])


def window_of(position: int, partitions: int) -> int:
    """Return the window of a position; some `_WINDOW_EVENTS` events of a window are in one partition."""
    return 1 + position // (_WINDOW_EVENTS * partitions)


def in_windows(blocks: Iterator[tuple[int, list[Any]]], partitions: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield the blocks of `PackByState` merged: the (entry, record) pairs of a window in the order of the log.

    The (None, row) pairs of states come as they are, in lists of their own.
    """
    window, waiting = 0, list[Any]()
    for events, pairs in blocks:
        if not pairs or pairs[0][0] is None:
            yield events, pairs
            continue
        next_window = window_of(pairs[0][1][0], partitions)
        if next_window != window:
            yield 0, sorted(waiting, key=_position)
            window, waiting = next_window, []
        waiting += pairs
    yield 0, sorted(waiting, key=_position)


def _position(pair: tuple[Any, RawRecord]) -> int:
    return pair[1][0]


def incoming(
    batches: Iterator[Any], route: Route, read: Reader | None, partitions: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yield (number of events accounted for, records) of what a folding task gets, as `Foldings.take_of` takes them.

    `read` makes records of Spark's batches; without it the batches are shuffle blocks.
    """
    if read is not None:
        return ((len(records), records) for records in read(batches))
    return in_windows(unpack(batches), partitions) if route is Route.BY_STATE else unpack(batches)


def shuffled(packed: DataFrame, partitions: int) -> Any:
    """Return the blocks shuffled to their partitions, in the order of the log."""
    return packed.repartitionById(partitions, "partition").sortWithinPartitions("position")


def unpack(batches: Iterator[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Unpack blocks; yield (number of events that the block accounts for, its records) of each.

    Blocks of `PackByKey` have (token, record) pairs instead of records. Raises `TaskFault` for a fault that an earlier
    task returned.
    """
    arrow = pyarrow()
    for batch in batches:
        for number in range(batch.num_rows):
            _, _, events, size, records, fault = (column[number] for column in batch.columns)
            if fault.is_valid:
                raise TaskFault(fault.as_py())
            packed = b"" if not records.is_valid else arrow.decompress(records.as_buffer(), size.as_py(), _CODEC)
            yield events.as_py(), marshal.loads(packed) if packed else []  # noqa: S302 - our own tasks made it


class _Packer:
    """A buffer of records by partition, which is sent when it is full."""

    def __init__(self, partitions: int, *, keyed: bool = False) -> None:
        """Prepare an empty buffer; a `keyed` one has (token, record) pairs, which account for no events."""
        minimum, maximum = _BUFFER_BYTES
        self.buffers: list[list[Any]] = [[] for _ in range(partitions)]
        """The buffered records of each partition; callers append to these lists, then call `count`."""
        self._keyed = keyed
        self._buffer_max = min(max(minimum, partitions * _PARTITION_BYTES), maximum)
        self._buffer_bytes = 0
        self._last = 0

    def begin(self, records: Sequence[RawRecord]) -> Iterator[Any]:
        """Send the buffer, unless these records, which come next, follow the last ones without a gap."""
        if records[0][0] != self._last + 1:
            yield from self.flush()
        self._last = records[-1][0]

    def count(self, records: Sequence[RawRecord]) -> Iterator[Any]:
        """Count the bytes of records that were appended, and send the buffer when it is full."""
        self._buffer_bytes += sum([len(subject) + len(headers) + len(body) for _, _, subject, headers, body in records])
        if self._buffer_bytes >= self._buffer_max:
            yield from self.flush()

    def flush(self) -> Iterator[Any]:
        """Send the buffer: yield its records as an Arrow batch of blocks, unless it is empty."""
        rows = [row for partition, entries in enumerate(self.buffers) for row in self._blocks(partition, entries)]
        self.buffers = [[] for _ in self.buffers]
        self._buffer_bytes = 0
        if rows:
            yield _batch(rows)

    def _blocks(self, partition: int, entries: list[Any]) -> Iterator[dict[str, Any]]:
        """Yield the records as one block, or as the blocks of two halves when they are too large for one."""
        if not entries:
            return
        packed = marshal.dumps(entries, 2)
        if len(packed) > BLOCK_BYTES and len(entries) > 1:
            middle = len(entries) // 2
            for half in (entries[:middle], entries[middle:]):
                yield from self._blocks(partition, half)
            return
        compressed = pyarrow().compress(packed, _CODEC, asbytes=True)
        first, events = (entries[0][1], 0) if self._keyed else (entries[0], len(entries))
        row = {"partition": partition, "position": first[0], "events": events}
        yield {**row, "size": len(packed), "records": compressed}


def _batch(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a batch of `BLOCK_COLUMNS`; numbers that are not given are 0, texts and bytes are null."""
    numbers = {"partition": 0, "position": 0, "events": 0, "size": 0}
    return pyarrow().RecordBatch.from_pylist([{**numbers, **row} for row in rows], schema=arrow_schema(_COLUMNS))
