"""The data source `jetstream`: the log, or a range of it, as a DataFrame of records, batch or stream.

`spark.read.format("jetstream")` and `spark.readStream` find it without registration, through `pyspark_eventjet`. What
each task reads is fixed when the query is planned, so a task that is tried again reads the same events; a position that
is missing fails the query. Options:

* `stream` — the app's name; `servers` — NATS URLs separated by commas, without userinfo
* `columns` — those wanted, separated by commas; default: a record as it is stored
* `aggregate` — only the events of these; with `id`, of this one
* `fromPosition`, `toPosition` — both included; default: all there is when the query is planned
* `partitions` — how many ranges; default: one for each 100,000 positions, in a batch read two at least
* `maxPositionsPerTrigger` — how much of the log a micro-batch takes; default: 1,000,000 positions
* `pushFilters` — true: comparisons of `position` and `subject = '…'` narrow what is read, where the session's
  `spark.sql.python.filterPushdown.enabled` says so. For a DataFrame that is used once: Spark 4.3 keeps the filters of
  its last use for all others, even within one query
* `user`, `passwordFile`, `tokenFile`, `credentials`, `nkey`, `tlsCa`, `tlsCert`, `tlsKey` — credentials by path, each
  read where a task runs; no secret is part of a plan. The first two files may come with the session (`addArtifacts`)

What no option names is taken from `EVENTJET_*` where the task runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import datasource as spark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from eventjet.nats.connection import NatsConnection
from eventjet.spark.columns import columns_in, schema_of
from eventjet.spark.options import LogOptions, connection_options
from eventjet.spark.read_planning import RangePartition, asked_for, log_state, ranges, read_records
from eventjet.spark.streaming import JetStreamStreamReader

__all__ = ["JetStreamReader", "JetStreamSource", "LogOptions", "connection_options"]

_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"
_LITERAL = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_END = 2**63 - 1


class JetStreamSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> str:
        return schema_of(LogOptions.parse(dict(self.options)).columns)

    def reader(self, schema: Any) -> DataSourceReader:
        options = LogOptions.parse(dict(self.options))
        reader = JetStreamReader(options, columns_in(schema))
        return FilteringReader(reader) if options.push_filters and _filters_are_pushed() else reader

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark names it
        return JetStreamStreamReader(LogOptions.parse(dict(self.options)), columns_in(schema))


class JetStreamReader(DataSourceReader):
    """Plans ranges once, reads each through a consumer of its own."""

    def __init__(self, options: LogOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.at_least = 1
        """With `at_most`, what the query's filters leave of the positions."""
        self.at_most = _END
        self._columns = columns

    def partitions(self) -> list[RangePartition]:
        with NatsConnection.open(self.options.endpoint()) as connection:
            state = log_state(self.options, connection)
            first, last = asked_for(self.options, state)
            first, last = max(first, self.at_least), min(last, self.at_most)
            return ranges(self.options, state, connection, first, last, at_least=2) or [RangePartition(1, 1)]

    def read(self, partition: Any) -> Iterator[Any]:
        return read_records(self.options, partition, self._columns)


class FilteringReader(DataSourceReader):
    """A reader that takes the query's filters: limits of the position become the range, one subject the consumer's.

    Spark keeps every filter that is not taken, and refuses a reader that could take some where the session does not
    push any; so there are two readers.
    """

    def __init__(self, reader: JetStreamReader) -> None:
        self._reader = reader

    def pushFilters(self, filters: Any) -> Iterator[Any]:  # noqa: N802 - Spark names it
        for one in filters:
            if not self._takes(one):
                yield one

    def partitions(self) -> list[RangePartition]:
        return self._reader.partitions()

    def read(self, partition: Any) -> Iterator[Any]:
        return self._reader.read(partition)

    def _takes(self, one: Any) -> bool:
        name = one.attribute[0] if hasattr(one, "attribute") else None
        if isinstance(one, spark.IsNotNull):
            return name in ("position", "subject")
        value = getattr(one, "value", None)
        if name == "position" and isinstance(value, int):
            return self._narrows(one, value)
        if name == "subject" and isinstance(one, spark.EqualTo) and isinstance(value, str):
            return self._selects(value)
        return False

    def _narrows(self, one: Any, value: int) -> bool:
        match one:
            case spark.EqualTo():
                low, high = value, value
            case spark.GreaterThan():
                low, high = value + 1, _END
            case spark.GreaterThanOrEqual():
                low, high = value, _END
            case spark.LessThan():
                low, high = 1, value - 1
            case spark.LessThanOrEqual():
                low, high = 1, value
            case _:
                return False
        self._reader.at_least = max(self._reader.at_least, low)
        self._reader.at_most = min(self._reader.at_most, high)
        return True

    def _selects(self, subject: str) -> bool:
        """Only where no other subject is selected already, and never what the server would read as a wildcard."""
        options = self._reader.options
        if options.subject is not None or not _LITERAL.fullmatch(subject):
            return False
        self._reader.options = replace(options, subject=subject)
        return True


def _filters_are_pushed() -> bool:
    """Whether this process is the one in which Spark pushes filters, which it starts where the session's conf says so.

    Where that cannot be told, Spark filters what was read, and the rows are the same.
    """
    program = sys.modules["__main__"].__spec__
    return _PUSHDOWN in sys.modules or (program is not None and program.name == _PUSHDOWN)
