"""An archive on Spark: its manifest, its checksums and its records through the file systems that the JVM knows.

All of it is DataFrames, so it works through Spark Connect too, where nothing reaches the JVM.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from eventjet.archive.manifest import Archive
from eventjet.archive.reading import MANIFEST, folder_of
from eventjet.errors import ArchiveBroken
from eventjet.spark.columns import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NOT_THERE = "PATH_NOT_FOUND"
_ROWS_OF_A_BATCH = "spark.sql.parquet.columnarReaderBatchSize"
ROWS_OF_A_BATCH = 256
"""Spark reads Parquet in batches of rows in the JVM's memory. A body may have a megabyte, and the default is 4,096."""


class SparkFiles:
    """The files of an archive on any file system that the JVM knows."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = url
        self._spark = spark
        self._base = url_for_spark(url)

    def manifest_lines(self) -> list[str]:
        try:
            # What a killed run left half-written begins with `_`, and Spark passes that over.
            frame: Any = self._spark.read.option("recursiveFileLookup", "true").text(f"{self._base}/{MANIFEST}")
            return [row.value for row in frame.collect() if row.value]
        except Exception as error:
            if isinstance(error, PySparkException) and error.getCondition() == _NOT_THERE:
                return []
            raise ArchiveBroken(self.url, f"its manifest cannot be read ({_first_line(error)})") from error

    def digests(self, paths: Sequence[str]) -> dict[str, tuple[int, str]]:
        if not paths:
            return {}
        try:
            frame: Any = self._spark.read.format("binaryFile").load([f"{self._base}/{path}" for path in paths])
            rows = frame.select("path", "length", F.sha2("content", 256).alias("sha256")).collect()
        except Exception as error:
            raise ArchiveBroken(self.url, f"its files cannot be read ({_first_line(error)})") from error
        # What comes before `events/` is written as the file system writes it.
        by_path = {"/".join(row.path.rsplit("/", 3)[1:]): (row.length, row.sha256) for row in rows}
        for path in paths:
            if path not in by_path:
                raise ArchiveBroken(self.url, f"{path} cannot be read")
        return by_path

    def batches(self, path: str, size: int) -> Iterator[Any]:
        """One whole file is in this process's memory meanwhile."""
        try:
            with reading(self._spark):
                frame: Any = self._spark.read.schema(SCHEMA).parquet(f"{self._base}/{path}")
                table = frame.orderBy("position").toArrow()
        except Exception as error:
            raise ArchiveBroken(self.url, f"{path} cannot be read ({_first_line(error)})") from error
        yield from table.to_batches(max_chunksize=size)


def url_for_spark(url: str) -> str:
    """The URL as Hadoop takes it, whatever its default file system is; without a `/` at the end."""
    folder = folder_of(url)
    return url.rstrip("/") if folder is None else f"file://{folder}"


def archived_frame(spark: SparkSession, archive: Archive, first: int, last: int) -> DataFrame:
    """The records from `first` to `last`, as the source `jetstream` has them; to be used within `reading`."""
    base = url_for_spark(archive.url)
    paths = [f"{base}/{file.path}" for file in archive.files(first, last)]
    frame: Any = spark.read.schema(SCHEMA).parquet(*paths)
    return frame.where(F.col("position").between(first, last))


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


def _first_line(error: Exception) -> str:
    """What Spark says first."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
