"""Read records in pieces, pack them into shuffle blocks (`parcels`) by partition, and unpack them in the folding task.

A shuffle block has records of one partition in the order of the log, as bytes that Spark moves and sorts without
reading them: a few rows of some hundred kilobytes instead of a row of five columns for every event. A block is filled
from positions that were read one after the other without a gap, so the blocks of a partition do not overlap. Sorted by
their first position, they are in the order of the log, in whatever order their files were read.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias
from zlib import crc32

from pyspark.sql import DataFrame, SparkSession

from eventjet.archive.reading import ArchiveReader
from eventjet.codec.headers import RawRecord
from eventjet.codec.records import chained
from eventjet.errors import CodecError, ProjectionError
from eventjet.jetstream.reader import Range, read_range
from eventjet.log.predecessors import PredecessorReader
from eventjet.projections.app_ref import AppRef
from eventjet.projections.row_codec import ColumnValues
from eventjet.rebuild.folding import Tokens, fold_of
from eventjet.runtime import uncollected
from eventjet.spark.columns import arrow_schema, pyarrow, records_of
from eventjet.spark.options import LogOptions
from eventjet.spark.source import BATCH

PARCEL_BYTES = 1_000_000
"""The maximum size of a block before it is compressed, unless a single record is larger."""
_BUFFER_BYTES = (1_000_000, 32_000_000)
"""The least and the most bytes that a task buffers before it sends all blocks; in between, `_SHARE_BYTES` for each
partition."""
_SHARE_BYTES = 500_000

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
_BLOCK_COLUMNS = ", ".join(f"{name} {ddl}" for name, ddl in _COLUMNS.items())
"""The columns of a block, in Spark's DDL: its partition, the position of its first record, the number of the log's
events that it accounts for, the size of its records before compression, and the records. A row without records says how
many events a task has read, or why it failed."""

_CODEC = "lz4"

Reader: TypeAlias = Callable[[Iterator[Any]], Iterator[list[RawRecord]]]
"""A function that makes lists of records of Spark's batches; the positions in each list follow one another."""


class TaskFault(Exception):
    """A fault of an earlier task, which that task returned as a value."""


@dataclass(frozen=True, slots=True)
class ReadPieces:
    """A function in a Spark task that reads the pieces whose numbers it gets; every try reads the same, or raises."""

    options: LogOptions
    pieces: tuple[Range, ...]
    archive: ArchiveReader | None = None
    archived: int = 0
    """The last position of the archive: a piece that begins at or before it is in the archive, and ends by then."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[list[RawRecord]]:
        for batch in batches:
            piece_numbers: list[int] = batch.column(0).to_pylist()
            for number in piece_numbers:
                yield from self._records(self.pieces[number])

    def _records(self, piece: Range) -> Iterator[list[RawRecord]]:
        if self.archive is not None and piece.start <= self.archived:
            return self.archive.records(piece.start, piece.end, batch=BATCH)
        options = self.options
        return read_range(options.endpoint(), options.stream, piece.start, piece.end, batch=BATCH)


def read_columns(batches: Iterator[Any]) -> Iterator[list[RawRecord]]:
    """Yield the records of a frame in the source's `SCHEMA`, whose files come in any order, several in one batch."""
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH):
            records = list(records_of(batch.slice(start, BATCH)))
            run_start = 0
            for number, (previous, record) in enumerate(pairwise(records), 1):
                if record[0] != previous[0] + 1:
                    yield records[run_start:number]
                    run_start = number
            yield records[run_start:]


def numbers(spark: SparkSession, count: int) -> DataFrame:
    """Return a frame with the number of each piece of `ReadPieces`, one row and one task for each."""
    return spark.range(0, count, 1, count)


def shuffled(packed: DataFrame, partitions: int) -> DataFrame:
    """Return the blocks shuffled to their partitions, in the order of the log."""
    return packed.repartitionById(partitions, "partition").sortWithinPartitions("position")


@dataclass(frozen=True, slots=True)
class PackByAggregate:
    """A Spark task that packs records by their aggregate id, which is in the subject and needs no decoding."""

    read: Reader
    partitions: int

    def over(self, frame: Any) -> DataFrame:
        return frame.mapInArrow(self, _BLOCK_COLUMNS)

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        packer = _Packer(self.partitions)
        partitions = self.partitions
        with uncollected():
            for records in self.read(batches):
                yield from packer.begun(records)
                buffers = packer.held
                for record in records:
                    subject = record[2]
                    # The row's key is the id alone, so aggregates of different types with one id go together.
                    buffers[crc32(subject[subject.rfind(b".") + 1 :]) % partitions].append(record)
                yield from packer.took(records)
            yield from packer.emptied()


@dataclass(frozen=True, slots=True)
class PackByKey:
    """A Spark task that decodes events and packs each record once for each key of its event, with the key's token."""

    read: Reader
    partitions: int
    app: AppRef
    projection: str
    dialect: ColumnValues
    options: LogOptions
    """How to reach the log."""
    skipped: Mapping[int, str]

    def over(self, frame: Any) -> DataFrame:
        return frame.mapInArrow(self, _BLOCK_COLUMNS)

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        packer = _Packer(self.partitions, accounts=False)
        try:
            with self.options.earlier() as earlier:
                yield from self._packed(batches, packer, earlier)
        except (CodecError, ProjectionError) as error:
            yield _batch([_row(fault=str(error))])

    def _packed(self, batches: Iterator[Any], packer: _Packer, predecessors: PredecessorReader) -> Iterator[Any]:
        app = self.app.load()
        resolved = fold_of(app, self.projection)
        decode = chained(app.catalog.of_log(self.skipped), resolved.events, predecessors)
        tokens_of = Tokens(resolved, self.dialect)
        events_read = 0
        for records in self.read(batches):
            events_read += len(records)
            yield from packer.begun(records)
            decode.expect(records)
            for record in records:
                event = decode(record)
                for token in tokens_of(event) if event is not None else ():
                    packer.held[crc32(token.encode()) % self.partitions].append((token, record))
                    # One event may have thousands of keys and be sent in several blocks; their keys differ.
                    yield from packer.took((record,))
        yield from packer.emptied()
        yield _batch([_row(events=events_read)])


def opened(batches: Iterator[Any]) -> Iterator[tuple[int, list[Any]]]:
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

    def __init__(self, partitions: int, *, accounts: bool = True) -> None:
        minimum, maximum = _BUFFER_BYTES
        self.held: list[list[Any]] = [[] for _ in range(partitions)]
        """The buffered records of each partition; callers append to these lists, then call `took`."""
        self._buffer_max = min(max(minimum, partitions * _SHARE_BYTES), maximum)
        self._buffer_bytes = 0
        self._accounts = accounts
        self._last = 0

    def begun(self, records: Sequence[RawRecord]) -> Iterator[Any]:
        """Send the buffer, unless these records, which come next, follow the last ones without a gap."""
        if records[0][0] != self._last + 1:
            yield from self.emptied()
        self._last = records[-1][0]

    def took(self, records: Sequence[RawRecord]) -> Iterator[Any]:
        """Count the bytes of records that were appended, and send the buffer when it is full."""
        self._buffer_bytes += sum([len(subject) + len(headers) + len(body) for _, _, subject, headers, body in records])
        if self._buffer_bytes >= self._buffer_max:
            yield from self.emptied()

    def emptied(self) -> Iterator[Any]:
        """Send the buffer: yield its records as an Arrow batch of blocks, unless it is empty."""
        rows = [
            row for partition, entries in enumerate(self.held) if entries for row in self._blocks(partition, entries)
        ]
        self.held = [[] for _ in self.held]
        self._buffer_bytes = 0
        if rows:
            yield _batch(rows)

    def _blocks(self, partition: int, entries: list[Any]) -> Iterator[dict[str, Any]]:
        """Yield the records as one block, or as the blocks of two halves when they are too large for one."""
        packed = marshal.dumps(entries, 2)
        if len(packed) > PARCEL_BYTES and len(entries) > 1:
            middle = len(entries) // 2
            for half in (entries[:middle], entries[middle:]):
                yield from self._blocks(partition, half)
            return
        position = entries[0][0] if self._accounts else entries[0][1][0]
        compressed = pyarrow().compress(packed, _CODEC, asbytes=True)
        events = len(entries) if self._accounts else 0
        yield _row(partition=partition, position=position, events=events, size=len(packed), records=compressed)


def _row(**values: int | str | bytes) -> dict[str, Any]:
    """Return one row of `_BLOCK_COLUMNS`, with defaults for columns that are not given."""
    row: dict[str, Any] = {"partition": 0, "position": 0, "events": 0, "size": 0, "records": None, "fault": None}
    return {**row, **values}


def _batch(rows: Iterable[Mapping[str, Any]]) -> Any:
    return pyarrow().RecordBatch.from_pylist(list(rows), schema=arrow_schema(_COLUMNS))
