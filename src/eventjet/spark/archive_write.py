"""Seal a segment: written from the log, read back whole and compared, and only then named in the manifest.

A segment is in the archive from the moment its line of the manifest is there. Whatever ends a run before that leaves
files that nothing names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from eventjet import failpoints
from eventjet.archive.manifest import ArchivedFile, Segment, dump_segment, load_archive
from eventjet.archive.reading import COLUMNS, EVENTS, MANIFEST, read_manifest, url_for_spark
from eventjet.codec.envelope import MSG_ID, header
from eventjet.errors import ArchiveBroken
from eventjet.nats.position_ranges import range_count
from eventjet.spark.archive_frames import digests, reading
from eventjet.spark.columns import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_BYTES = 32_000_000
"""Of headers and bodies, which a file should hold at most; Parquet makes less of them."""
FILE_BYTES_MAX = 2 * FILE_BYTES
"""Of a file: the JVM holds one in memory for its checksum. Where events differ much in size the cut is made finer."""

_TRIES = 4
_SHUFFLE = "spark.sql.shuffle.partitions"


@dataclass(frozen=True, slots=True)
class Log:
    """What is archived: a stream, the identity of the log in it, and how its tasks reach it."""

    stream: str
    identity: str
    options: Mapping[str, str]
    """Of the source `jetstream`."""
    event_bytes: float
    """An event's size on average."""


def seal(spark: SparkSession, url: str, log: Log, first: int, last: int) -> Segment:
    """Archive the positions from `first` to `last` as one segment; raises `ArchiveBroken` when it reads back otherwise.

    The manifest must not have these positions yet.
    """
    path, found = _written(spark, url, log, first, last)
    segment = _segment(spark, url, path, log, found)
    line = dump_segment(segment)
    # What a reader would refuse is not sealed.
    load_archive(url, [line])
    if (segment.first, segment.last) != (first, last):
        raise ArchiveBroken(url, f"{path} holds positions {segment.first} to {segment.last}")
    if read_manifest(url, spark).last >= first:
        raise ArchiveBroken(url, f"another run sealed position {first} meanwhile, and only one may be at work")
    failpoints.reach("archive.read_back")
    frame: Any = spark.range(0, 1, 1, 1).select(F.lit(line).alias("value"))
    frame.write.mode("overwrite").text(f"{url_for_spark(url)}/{MANIFEST}/{segment.name}")
    failpoints.reach("archive.sealed")
    return segment


def _written(spark: SparkSession, url: str, log: Log, first: int, last: int) -> tuple[str, list[Any]]:
    """(folder of the files, what `_read_back` says of each); cut finer where large events lie together."""
    count = last - first + 1
    files = max(range_count(count), -(-int(count * log.event_bytes) // FILE_BYTES))
    path, found = f"{EVENTS}/{first:020d}-{last:020d}-{token_hex(4)}", list[Any]()
    for _ in range(_TRIES):
        seen = _write(spark, f"{url_for_spark(url)}/{path}", log, first, last, min(files, count))
        failpoints.reach("archive.written")
        found = _read_back(spark, url, path, seen)
        largest = max(one.size for one in found)
        if largest <= FILE_BYTES_MAX or files >= count:
            break
        files *= 2 * -(-largest // FILE_BYTES_MAX)
    return path, found


def _write(spark: SparkSession, folder: str, log: Log, first: int, last: int, files: int) -> tuple[int, int]:
    """Write one file a task; returns (how many records went by, a checksum of all they hold)."""
    options = {
        **log.options,
        "stream": log.stream,
        "fromPosition": str(first),
        "toPosition": str(last),
        "partitions": str(files),
    }
    seen = Observation()
    frame: Any = spark.read.format("jetstream").options(**options).load()
    frame = frame.observe(seen, F.count(F.lit(1)).alias("count"), _checksum().alias("checksum"))
    frame.write.mode("overwrite").option("compression", "zstd").parquet(folder)
    return seen.get["count"], seen.get["checksum"]


def _read_back(spark: SparkSession, url: str, path: str, seen: tuple[int, int]) -> list[Any]:
    """What each file holds, by position; raises unless that is what was written: every record, in order, unchanged."""
    row = F.col("position") - F.col("_metadata.row_index")
    with reading(spark, {_SHUFFLE: "1"}):
        frame: Any = spark.read.schema(SCHEMA).parquet(f"{url_for_spark(url)}/{path}")
        found: list[Any] = (
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
    # As many rows as positions, each as far from the first as its row: unbroken, and sorted.
    if any(one.first != one.same for one in found):
        raise ArchiveBroken(url, f"{path} was read back in another order than it was written")
    events = checksum = 0
    for one in found:
        events, checksum = events + one.events, checksum ^ one.checksum
    if (events, checksum) != seen:
        raise ArchiveBroken(url, f"the {events} records of {path} are not the {seen[0]} that were written")
    return sorted(found, key=lambda one: one.first)


def _segment(spark: SparkSession, url: str, path: str, log: Log, found: list[Any]) -> Segment:
    names = [f"{path}/{one.file}" for one in found]
    sealed = digests(spark, url, names)
    files = tuple(
        ArchivedFile(name, one.first, one.first + one.events - 1, *sealed[name])
        for name, one in zip(names, found, strict=True)
    )
    return Segment(
        stream=log.stream,
        log=log.identity,
        first=files[0].first,
        last=files[-1].last,
        first_time_ns=found[0].first_time_ns,
        last_time_ns=found[-1].last_time_ns,
        last_id=header(bytes(found[-1].headers), MSG_ID) or "",
        files=files,
    )


def _checksum() -> Any:
    """Of any number of records, in any order: a changed, missing or added one gives another."""
    return F.bit_xor(F.xxhash64(*COLUMNS))
