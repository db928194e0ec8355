"""Ranges of the log as a frame, read by tasks that were told their ranges.

The source `jetstream` gives the same rows, but Spark starts three Python processes, one after the other, to ask which
sources there are, how to make this one and how to cut it. A plan that has cut the log already needs none of them, and
its reading and its folding share their Python workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventjet.nats.position_ranges import Range
from eventjet.spark.columns import SCHEMA
from eventjet.spark.options import LogOptions
from eventjet.spark.read_planning import read_records

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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

    `options` are the source's, and name no positions. A position that is missing fails the query.
    """
    numbers: Any = spark.range(0, len(ranges), 1, len(ranges))
    return numbers.mapInArrow(ReadTask(LogOptions.parse(options), tuple(ranges)), SCHEMA)
