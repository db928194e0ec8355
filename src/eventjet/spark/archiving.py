"""Read and write archives on Spark, on any file system that the JVM knows.

Everything uses DataFrames, so it works through Spark Connect, too, where the JVM cannot be reached directly. A segment
is written from the log, read back completely and compared, and only then named in the manifest: it belongs to the
archive from the moment its line is written. A run that ends before that leaves files that no manifest names.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from eventjet import failpoints
from eventjet.archive.reading import (
    COLUMNS,
    EVENTS,
    MANIFEST,
    Archive,
    ArchivedFile,
    ArchiveFiles,
    ArchiveReader,
    Segment,
    dump_segment,
    folder_of,
    load_archive,
)
from eventjet.codec.headers import MSG_ID, header
from eventjet.errors import ArchiveBroken
from eventjet.jetstream.reader import range_count, split
from eventjet.log.topology import CONTINUES
from eventjet.rebuild.job import Job
from eventjet.rebuild.replay_source import Log
from eventjet.spark.columns import SCHEMA
from eventjet.spark.running import following, provisions, send_files
from eventjet.spark.session import Started, first_line
from eventjet.spark.source import log_frame

_BATCH_ROWS_SETTING = "spark.sql.parquet.columnarReaderBatchSize"
ROWS_OF_A_BATCH = 256
"""The number of rows of Parquet that Spark reads into the JVM's memory at once. The default of 4,096 is too large,
because an event's body may have a megabyte."""

FILE_BYTES = 32_000_000
"""The desired maximum of headers and bodies in one file, before Parquet compresses them."""
FILE_BYTES_MAX = 2 * FILE_BYTES
"""The maximum size of a file, which the JVM keeps in memory for its checksum. If events differ so much in size that a
file is larger, the segment is cut into more files."""

_TRIES = 4
_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"


class SparkFiles:
    """The files of an archive on any file system that the JVM knows."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = url
        self._spark = spark
        self._base = url_for_spark(url)

    def manifest_lines(self) -> list[str]:
        try:
            # Files that a killed run has not completed begin with `_`, and Spark ignores them.
            frame: Any = self._spark.read.option("recursiveFileLookup", "true").text(f"{self._base}/{MANIFEST}")
            return [row.value for row in frame.collect() if row.value]
        except Exception as error:
            if isinstance(error, PySparkException) and error.getCondition() == "PATH_NOT_FOUND":
                return []
            remedy = "Check the URL, and that Spark has the connector and the credentials of its file system."
            raise ArchiveBroken(self.url, f"its manifest cannot be read ({first_line(error)})", remedy) from error

    def digests(self, paths: Sequence[str]) -> dict[str, tuple[int, str]]:
        if not paths:
            return {}
        try:
            frame: Any = self._spark.read.format("binaryFile").load([f"{self._base}/{path}" for path in paths])
            rows = frame.select("path", "length", F.sha2("content", 256).alias("sha256")).collect()
        except Exception as error:
            raise ArchiveBroken(self.url, f"its files cannot be read ({first_line(error)})") from error
        # Each file system writes the part of a path before `events/` in its own way, so it is left out.
        by_path = {"/".join(row.path.rsplit("/", 3)[1:]): (row.length, row.sha256) for row in rows}
        for path in paths:
            if path not in by_path:
                raise ArchiveBroken(self.url, f"{path} cannot be read")
        return by_path

    def batches(self, path: str, size: int) -> Iterator[Any]:
        """Yield the records of a file in Arrow batches; the whole file is in this process's memory meanwhile."""
        try:
            with reading(self._spark):
                frame: Any = self._spark.read.schema(SCHEMA).parquet(f"{self._base}/{path}")
                table = frame.orderBy("position").toArrow()
        except Exception as error:
            raise ArchiveBroken(self.url, f"{path} cannot be read ({first_line(error)})") from error
        yield from table.to_batches(max_chunksize=size)


def url_for_spark(url: str) -> str:
    """Return an archive's URL as Hadoop takes it, whatever its default file system is, without a `/` at the end."""
    folder = folder_of(url)
    return url.rstrip("/") if folder is None else f"file://{folder}"


def archived_frame(spark: SparkSession, archive: Archive, first: int, last: int) -> DataFrame:
    """Return the records from `first` to `last` as a frame in the source's `SCHEMA`; use it within `reading`."""
    base = url_for_spark(archive.url)
    paths = [f"{base}/{file.path}" for file in archive.files(first, last)]
    frame: Any = spark.read.schema(SCHEMA).parquet(*paths)
    return frame.where(F.col("position").between(first, last))


@contextmanager
def reading(spark: SparkSession, conf: Mapping[str, str] | None = None) -> Generator[None]:
    """Read archives in little memory within the block, with the session's settings changed, also by `conf`."""
    settings = {_BATCH_ROWS_SETTING: str(ROWS_OF_A_BATCH), **(conf or {})}
    previous = spark.conf.getAll
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name in settings:
            # A session that has ended meanwhile has no settings, and its error is the one that counts.
            with suppress(Exception):
                if name in previous:
                    spark.conf.set(name, previous[name])
                else:
                    spark.conf.unset(name)


def seal_all(job: Job, files: ArchiveFiles, ranges: Sequence[tuple[int, int]], started: Started) -> list[Segment]:
    """Archive ranges of positions, one segment each; raises `ArchiveBroken` when a segment reads back differently."""
    start, total = ranges[0][0], ranges[-1][1] - ranges[0][0] + 1
    with provisions(job, started) as provided, job.watch.phase("archive", total):
        sealer = _Sealer(started.spark, files.url, files, job.log, provided.options)
        send_files(provided.secrets, started)
        sealed: list[Segment] = []
        for first, last in ranges:
            name = f"eventjet: archive positions {first} to {last}"
            with following(started.spark, job.watch, "archive", first - start, last - first + 1, total, name=name):
                sealed.append(sealer.seal(first, last))
        job.watch.report("archive", total, total)
    return sealed


@dataclass(frozen=True, slots=True)
class _Sealer:
    """The writer of a log's segments to an archive."""

    spark: SparkSession
    url: str
    files: ArchiveFiles
    log: Log
    options: Mapping[str, str]
    """The options of the source `jetstream`, without positions."""

    def seal(self, first: int, last: int) -> Segment:
        """Archive the positions from `first` to `last`; raises `ArchiveBroken` if another run has sealed them."""
        path, file_rows = self._write_segment(first, last)
        segment = self._segment(path, file_rows)
        before = ArchiveReader(self.files).manifest
        line = dump_segment(segment)
        # A segment that a reader would refuse must not be sealed.
        load_archive(self.url, [line])
        if (segment.first, segment.last) != (first, last):
            raise ArchiveBroken(self.url, f"{path} holds positions {segment.first} to {segment.last}")
        if before.last >= first:
            raise ArchiveBroken(self.url, f"another run sealed position {first} meanwhile, and only one may be at work")
        failpoints.reach("archive.read_back")
        frame: Any = self.spark.range(0, 1, 1, 1).select(F.lit(line).alias("value"))
        frame.write.mode("overwrite").text(f"{url_for_spark(self.url)}/{MANIFEST}/{segment.name}")
        failpoints.reach("archive.sealed")
        return segment

    def _write_segment(self, first: int, last: int) -> tuple[str, list[Any]]:
        """Write a segment, in more files if one is too large; return (their folder, the rows of `_read_back`)."""
        count = last - first + 1
        event_bytes = self.log.state.bytes / max(self.log.state.messages, 1)
        files = max(range_count(count), -(-int(count * event_bytes) // FILE_BYTES))
        path, file_rows = f"{EVENTS}/{first:020d}-{last:020d}-{token_hex(4)}", list[Any]()
        for _ in range(_TRIES):
            written = self._write(path, first, last, min(files, count))
            failpoints.reach("archive.written")
            file_rows = self._read_back(path, written)
            largest = max(file_row.size for file_row in file_rows)
            if largest <= FILE_BYTES_MAX or files >= count:
                break
            files *= 2 * -(-largest // FILE_BYTES_MAX)
        return path, file_rows

    def _write(self, path: str, first: int, last: int, files: int) -> tuple[int, int]:
        """Write one file for each task; return (number of records written, checksum of the records)."""
        observation = Observation()
        frame: Any = log_frame(self.spark, self.options, split(first, last, files))
        frame = frame.observe(observation, F.count(F.lit(1)).alias("count"), _checksum().alias("checksum"))
        frame.write.mode("overwrite").option("compression", "zstd").parquet(f"{url_for_spark(self.url)}/{path}")
        return observation.get["count"], observation.get["checksum"]

    def _read_back(self, path: str, written: tuple[int, int]) -> list[Any]:
        """Read the files back, and return a row about each, in order; raises `ArchiveBroken` for any difference."""
        row = F.col("position") - F.col("_metadata.row_index")
        with reading(self.spark, {_SHUFFLE_PARTITIONS: "1"}):
            frame: Any = self.spark.read.schema(SCHEMA).parquet(f"{url_for_spark(self.url)}/{path}")
            file_rows: list[Any] = (
                frame.groupBy(F.col("_metadata.file_name").alias("file"), F.col("_metadata.file_size").alias("size"))
                .agg(
                    F.count(F.lit(1)).alias("events"),
                    F.min(row).alias("first"),
                    F.max(row).alias("same"),
                    _checksum().alias("checksum"),
                    F.min_by("time_ns", "position").alias("first_time_ns"),
                    F.max_by("time_ns", "position").alias("last_time_ns"),
                    F.max_by("headers", "position").alias("headers"),
                )
                .collect()
            )
        # If position minus row number is the same for all rows of a file, they are sorted and no position is missing.
        if any(file_row.first != file_row.same for file_row in file_rows):
            raise ArchiveBroken(self.url, f"{path} was read back in another order than it was written")
        events = checksum = 0
        for file_row in file_rows:
            events, checksum = events + file_row.events, checksum ^ file_row.checksum
        if (events, checksum) != written:
            raise ArchiveBroken(self.url, f"the {events} records of {path} are not the {written[0]} that were written")
        return sorted(file_rows, key=lambda file_row: file_row.first)

    def _segment(self, path: str, file_rows: list[Any]) -> Segment:
        names = [f"{path}/{file_row.file}" for file_row in file_rows]
        # Spark wrote the files, so Spark computes their checksums, even in a folder of this machine.
        digests = SparkFiles(self.spark, self.url).digests(names)
        files = tuple(
            ArchivedFile(name, file_row.first, file_row.first + file_row.events - 1, *digests[name])
            for name, file_row in zip(names, file_rows, strict=True)
        )
        return Segment(
            stream=self.log.stream,
            log=self.log.identity,
            first=files[0].first,
            last=files[-1].last,
            first_time_ns=file_rows[0].first_time_ns,
            last_time_ns=file_rows[-1].last_time_ns,
            last_id=header(bytes(file_rows[-1].headers), MSG_ID) or "",
            files=files,
            continues=self.log.state.metadata.get(CONTINUES, ""),
        )


def _checksum() -> Any:
    """Return a checksum of records that does not depend on their order; a changed, lost or added record changes it."""
    return F.bit_xor(F.xxhash64(*COLUMNS))
