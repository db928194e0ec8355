"""An archive on Spark: its manifest, its checksums and its records through the file systems that the JVM knows.

All of it is DataFrames, so it works through Spark Connect too, where nothing reaches the JVM.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from eventjet.archive.manifest import Archive
from eventjet.archive.reading import MANIFEST, url_for_spark
from eventjet.errors import ArchiveBroken
from eventjet.spark.columns import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NOT_THERE = "PATH_NOT_FOUND"
_ROWS_OF_A_BATCH = "spark.sql.parquet.columnarReaderBatchSize"
ROWS_OF_A_BATCH = 256
"""Spark reads Parquet in batches of rows in the JVM's memory. A body may have a megabyte, and the default is 4,096."""


def manifest_lines(spark: SparkSession, url: str) -> list[str]:
    """All lines of a manifest; none where there is no archive yet."""
    try:
        # What a killed run left half-written begins with `_`, and Spark passes that over.
        frame: Any = spark.read.option("recursiveFileLookup", "true").text(f"{url_for_spark(url)}/{MANIFEST}")
        return [row.value for row in frame.collect() if row.value]
    except Exception as error:
        if isinstance(error, PySparkException) and error.getCondition() == _NOT_THERE:
            return []
        raise ArchiveBroken(url, f"its manifest cannot be read ({first_line(error)})") from error


def digests(spark: SparkSession, url: str, paths: Sequence[str]) -> dict[str, tuple[int, str]]:
    """(bytes, sha256) of files of an archive, by path; raises `ArchiveBroken` when one is not there."""
    if not paths:
        return {}
    base = url_for_spark(url)
    try:
        frame: Any = spark.read.format("binaryFile").load([f"{base}/{path}" for path in paths])
        found = frame.select("path", "length", F.sha2("content", 256).alias("sha256")).collect()
    except Exception as error:
        raise ArchiveBroken(url, f"its files cannot be read ({first_line(error)})") from error
    # What comes before `events/` is written as the file system writes it.
    by_path = {"/".join(row.path.rsplit("/", 3)[1:]): (row.length, row.sha256) for row in found}
    for path in paths:
        if path not in by_path:
            raise ArchiveBroken(url, f"{path} cannot be read")
    return by_path


def archived_frame(spark: SparkSession, archive: Archive, first: int, last: int) -> DataFrame:
    """The records from `first` to `last`, as the source `jetstream` has them; to be used within `reading`."""
    base = url_for_spark(archive.url)
    paths = [f"{base}/{file.path}" for file in archive.files(first, last)]
    frame: Any = spark.read.schema(SCHEMA).parquet(*paths)
    return frame.where(F.col("position").between(first, last))


def arrow_table(spark: SparkSession, url: str, path: str) -> Any:
    """One file's records by position, in this process's memory; raises `ArchiveBroken`."""
    try:
        with reading(spark):
            frame: Any = spark.read.schema(SCHEMA).parquet(f"{url_for_spark(url)}/{path}")
            return frame.orderBy("position").toArrow()
    except Exception as error:
        raise ArchiveBroken(url, f"{path} cannot be read ({first_line(error)})") from error


@contextmanager
def reading(spark: SparkSession, conf: Mapping[str, str] | None = None) -> Generator[None]:
    """Read archives with the session's memory in mind; what the session had set is set again afterwards."""
    wanted = {_ROWS_OF_A_BATCH: str(ROWS_OF_A_BATCH), **(conf or {})}
    before = {name: spark.conf.get(name) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                spark.conf.set(name, value)


def first_line(error: Exception) -> str:
    """What Spark says first."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
