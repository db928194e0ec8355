"""The Spark data source `jetstream` reads the log, or a range of it, as records, in a batch or as a stream.

`spark.read.format("jetstream")` and `spark.readStream` find the source without registration, through
`pyspark_eventjet`. The range of each task is fixed when the query is planned, so a task that is tried again reads the
same events; a missing position fails the query. `docs/how-to/spark-source.md` explains the options, which are names and
paths, and no secrets. Settings without an option come from `EVENTJET_*` on the machine where the task runs.

A secret reaches tasks in two parts: a sealed file that is sent with the session, and its key. Executors keep a
session's files in work folders, for days after it has ended, so a file must be worthless without the key. The key is
part of the reference that tasks get by value; only a Connect server stores that, in its log.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeAlias, cast

from nacl.secret import SecretBox
from nacl.utils import random
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as spark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from eventjet.archive.reading import ArchiveReader
from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import is_name, subject_of
from eventjet.errors import HistoryBroken, Refused, StoreUnavailable, StreamMissing, Unreachable, UsageError
from eventjet.jetstream.api import StreamState, deleted_positions, messages_of, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import Range, range_count, read_range, split
from eventjet.log.integrity import earlier_logs, succession_fault
from eventjet.log.mirror import readable_log
from eventjet.log.predecessors import PredecessorReader
from eventjet.log.topology import IDENTITY
from eventjet.nats.endpoint import Endpoint, check_picklable
from eventjet.settings import Settings, SettingsOverrides
from eventjet.spark.columns import SCHEMA, STORED, arrow_batch, columns_in, parse_columns, records_of, schema_of

BATCH = 1_000
"""The maximum number of records in an Arrow batch; a record may have nearly a megabyte."""

_PUSHDOWN_MODULE = "pyspark.sql.worker.data_source_pushdown_filters"
_LITERAL = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_END = 2**63 - 1

POSITIONS_PER_TRIGGER = 1_000_000
"""The default maximum of positions in one micro-batch; without it, a query's first batch would be the whole log."""

_PATHS = {"credentials": "credentials", "nkey": "nkey", "tlsCa": "tls_ca", "tlsCert": "tls_cert", "tlsKey": "tls_key"}
_FILES = {"passwordFile": "password", "tokenFile": "token"}
_TEXTS = {
    "servers": "servers",
    "user": "user",
    "inboxPrefix": "inbox_prefix",
    "jetstreamDomain": "jetstream_domain",
    "jetstreamPrefix": "jetstream_prefix",
}
_READ_OPTIONS = ("columns", "aggregate", "id", "fromPosition", "toPosition", "partitions", "maxPositionsPerTrigger")
_SERVERS = {"servers", "jetstream_domain", "jetstream_prefix"}
"""Settings that lead to one JetStream, which is read as it is: a mirror that they name is not compared."""
_CONNECTION = "eventjet-spark"
_SOURCE_OPTIONS = ("stream", *_READ_OPTIONS, "pushFilters")
_STREAM = re.compile(r"[^\s.*>/\\]+")
_SEALED = re.compile(r"(?P<path>.+)#(?P<key>[0-9a-f]{64})", re.DOTALL)

Reader: TypeAlias = Callable[[Iterator[Any]], Iterator[list[RawRecord]]]
"""A function that makes lists of records of Spark's batches; the positions in each list follow one another."""


@dataclass
class RangePartition(InputPartition):
    """The part of a query that one task reads: the positions `start` <= position < `end`."""

    start: int
    end: int


class JetStreamSource(DataSource):
    """The Spark data source `jetstream`; the module's docstring describes it."""

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> str:
        return schema_of(LogOptions.parse(dict(self.options)).columns)

    def reader(self, schema: Any) -> DataSourceReader:
        options = LogOptions.parse(dict(self.options))
        kind = FilteringReader if options.push_filters and _filters_are_pushed() else JetStreamReader
        return kind(options, columns_in(schema))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark names it
        return JetStreamStreamReader(LogOptions.parse(dict(self.options)), columns_in(schema))


class JetStreamReader(DataSourceReader):
    """The reader of a batch query, which plans the ranges once and reads each range through its own consumer."""

    def __init__(self, options: LogOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.at_least = 1
        """The first position that the query's filters select; `at_most` is the last."""
        self.at_most = _END
        self._columns = columns

    def partitions(self) -> list[RangePartition]:
        with self.options.open() as connection:
            state = _log_state(self.options, connection)
            first, last = _requested_range(self.options, state)
            first, last = max(first, self.at_least), min(last, self.at_most)
            return _ranges(self.options, state, connection, first, last, at_least=2) or [RangePartition(1, 1)]

    def read(self, partition: Any) -> Iterator[Any]:
        return _read_records(self.options, partition, self._columns)


class FilteringReader(JetStreamReader):
    """A batch reader that applies filters itself: on the position in its range, on one subject in its consumer.

    Spark applies all other filters. It refuses a reader with `pushFilters` in a session that does not push filters, so
    there are two classes of readers.
    """

    def pushFilters(self, filters: Any) -> Iterator[Any]:  # noqa: N802 - Spark names it
        for pushed in filters:
            if not self._apply(pushed):
                yield pushed

    def _apply(self, pushed_filter: Any) -> bool:
        name = pushed_filter.attribute[0] if hasattr(pushed_filter, "attribute") else None
        if isinstance(pushed_filter, spark.IsNotNull):
            return name in ("position", "subject")
        value = getattr(pushed_filter, "value", None)
        if name == "position" and isinstance(value, int):
            return self._narrow_range(pushed_filter, value)
        if name == "subject" and isinstance(pushed_filter, spark.EqualTo) and isinstance(value, str):
            return self._select_subject(value)
        return False

    def _narrow_range(self, pushed_filter: Any, value: int) -> bool:
        match pushed_filter:
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
        self.at_least = max(self.at_least, low)
        self.at_most = min(self.at_most, high)
        return True

    def _select_subject(self, subject: str) -> bool:
        """Select one subject; return False if another is selected already or the server would take it as a wildcard."""
        if self.options.subject is not None or not _LITERAL.fullmatch(subject):
            return False
        self.options = replace(self.options, subject=subject)
        return True


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query; an offset is the last position that the query has read and the log's identity.

    Micro-batches are ranges of positions, so a batch that is tried again, or replayed after a crash, reads the same
    events. A checkpoint of another log is refused, however the log was changed. The reader lives as long as the query,
    in a process beside the driver, with one connection; the copies in tasks have no connection.
    """

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
        first, _ = _requested_range(self._options, state)
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
        # A promoted mirror continues the log under another identity, and so does the query.
        log = {"log": self._state.metadata[IDENTITY]} if self._state is not None and "log" in start else {}
        return {**start, **log, "position": max(end, start["position"])}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark names it
        return None if self._state is None else {"position": self._state.last}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark names it
        self._target = self._current_state().last

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[RangePartition]:
        if _position_of(start) >= end["position"]:
            return []
        # After a restart, a replayed batch is planned before any other method has asked for the log's state.
        state = self._state
        if state is None or state.last < end["position"]:
            state = self._checked_state(end)
        assert self._connection is not None
        return _ranges(self._options, state, self._connection, start["position"] + 1, end["position"], at_least=1)

    def read(self, partition: Any) -> Iterator[Any]:
        return _read_records(self._options, partition, self._columns)

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _checked_state(self, offset: dict[str, Any]) -> StreamState:
        """Return the log's state now; raises `Refused` unless it is the log from which `offset` was read."""
        position, state = _position_of(offset), self._current_state()
        recorded_log, current_log = offset.get("log"), state.metadata.get(IDENTITY)
        reason = ""
        if recorded_log is not None and recorded_log not in (current_log, *earlier_logs(state)):
            reason = f"its checkpoint was made from the log {recorded_log}, and this is the log {current_log}"
        elif recorded_log is not None and (fault := succession_fault(state, recorded_log, position)):
            reason = fault
        elif state.last < position:
            reason = f"its checkpoint says that position {position} was read, and the log ends at {state.last}"
        if reason:
            raise Refused(
                f"A streaming query of {self._options.stream!r}",
                reason,
                "Is the server (EVENTJET_SERVERS) the right one? To read this log, begin the query again with another "
                "checkpoint location, and its output anew; in a pipeline, with `eventjet pipeline --full-refresh`.",
            )
        self._state = state
        return state

    def _current_state(self) -> StreamState:
        """Ask for the log's state, and connect again once, because the server drops a connection that was long idle."""
        if self._connection is not None:
            with suppress(StoreUnavailable):
                return _log_state(self._options, self._connection)
            self._connection.close()
        self._connection = self._options.open()
        return _log_state(self._options, self._connection)


def _position_of(offset: Mapping[str, Any]) -> int:
    """Return the position of a query's offset; raises `UsageError` for an offset of another source."""
    position: int | None = offset.get("position")
    if position is None:
        raise UsageError(
            "The query's checkpoint is of another source than jetstream. Begin the query again with another checkpoint "
            "location, and its output anew; in a pipeline, with `eventjet pipeline --full-refresh`."
        )
    return position


def _log_state(options: LogOptions, connection: NatsConnection) -> StreamState:
    """Return the stream's state as its leader sees it; raises `Unreachable` when the stream does not exist."""
    try:
        return connection.ask(stream_info(options.stream))
    except StreamMissing:
        raise Unreachable(
            f"The stream {options.stream!r}",
            "it does not exist on this server",
            "Name the app as `stream`, and its server as `servers`.",
        ) from None


def _requested_range(options: LogOptions, state: StreamState) -> tuple[int, int]:
    """Return (first, last) position to read; raises `HistoryBroken` when the options name positions not in the log."""
    log_first = max(state.first, 1)
    first = log_first if options.first is None else max(options.first, 1)
    last = state.last if options.last is None else options.last
    if first <= last and first < log_first:
        raise HistoryBroken(options.stream, first, f"the log begins at position {log_first}")
    if first <= last and last > state.last:
        missing = f"the log ends at {state.last}, though positions up to {last} were asked for"
        raise HistoryBroken(options.stream, state.last + 1, missing)
    return first, last


def _ranges(
    options: LogOptions, state: StreamState, connection: NatsConnection, first: int, last: int, at_least: int
) -> list[RangePartition]:
    """Cut positions into a range for each task; raises `HistoryBroken` for a hole that a filtered read hides."""
    events = last - first + 1
    if options.subject is not None and events > 0:
        if state.deleted:
            for hole in connection.ask(deleted_positions(options.stream)):
                if first <= hole <= last:
                    raise HistoryBroken(options.stream, hole, "it is missing")
        if not options.subject.endswith("*"):
            # One aggregate has few of the log's events, so it is not worth a task for every range of the log.
            events, at_least = min(events, connection.ask(messages_of(options.stream, options.subject))), 1
    count = options.partitions or range_count(events, at_least)
    return [RangePartition(part.start, part.end) for part in split(first, last, count)]


def _read_records(options: LogOptions, partition: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Read a range as Arrow batches, the same on every try; raises `HistoryBroken` for a missing position."""
    start, end, subject = partition.start, partition.end, options.subject
    for records in read_range(options.endpoint(), options.stream, start, end, batch=BATCH, filter_subject=subject):
        yield arrow_batch(records, columns)


def _filters_are_pushed() -> bool:
    """Tell whether Spark pushes filters in this process; where that is not known, it filters the records itself."""
    program = sys.modules["__main__"].__spec__
    return _PUSHDOWN_MODULE in sys.modules or (program is not None and program.name == _PUSHDOWN_MODULE)


@dataclass(frozen=True, slots=True)
class ReadRanges:
    """A function in a Spark task that reads the ranges whose numbers it gets; every try reads the same, or raises."""

    options: LogOptions
    ranges: tuple[Range, ...]
    archive: ArchiveReader | None = None
    archived: int = 0
    """The last position of the archive: a range that begins at or before it is in the archive, and ends by then."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[list[RawRecord]]:
        for batch in batches:
            numbers: list[int] = batch.column(0).to_pylist()
            for start, end in ((self.ranges[number].start, self.ranges[number].end) for number in numbers):
                if self.archive is not None and start <= self.archived:
                    yield from self.archive.records(start, end, batch=BATCH)
                else:
                    yield from read_range(self.options.endpoint(), self.options.stream, start, end, batch=BATCH)


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


def ranges_frame(spark: SparkSession, ranges: Sequence[Range]) -> Any:
    """Return a frame with the number of each range for `ReadRanges`, one row and one task for each."""
    return spark.range(0, len(ranges), 1, len(ranges))


def log_frame(spark: SparkSession, options: Mapping[str, str], ranges: Sequence[Range]) -> DataFrame:
    """Return the records of the ranges as a frame in the source's `SCHEMA`, with one ordered partition for each range.

    `options` are those of the source, without positions. A missing position fails the query. The source `jetstream`
    would give the same rows, but Spark starts three Python processes for it, one after the other: to list the sources,
    to create this one, and to plan its partitions. A plan already has its ranges and needs none of these processes; its
    reading and folding share their Python workers.
    """
    read = ReadRanges(LogOptions.parse(options), tuple(ranges))

    def read_batches(batches: Iterator[Any]) -> Iterator[Any]:
        return map(arrow_batch, read(batches))

    return ranges_frame(spark, ranges).mapInArrow(read_batches, SCHEMA)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options of one read, checked; they can be pickled."""

    stream: str
    connection: Mapping[str, str] = field(repr=False)
    """The options that name the server and the credentials."""
    columns: tuple[str, ...] = STORED
    subject: str | None = None
    """The subject of the records, which may end in a wildcard; None for all records."""
    first: int | None = None
    last: int | None = None
    partitions: int | None = None
    positions_per_trigger: int = POSITIONS_PER_TRIGGER
    push_filters: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> LogOptions:
        """Check options whose names may be in any case, as in Spark; raises `UsageError`."""
        names = {name.lower(): name for name in (*_PATHS, *_FILES, *_TEXTS, *_SOURCE_OPTIONS)}
        unknown = [name for name in options if name.lower() not in names and name.lower() != "path"]
        if unknown:
            raise UsageError(f"The source jetstream has no option {unknown[0]!r}. It has: {', '.join(names.values())}.")
        given = {names[name.lower()]: value for name, value in options.items() if name.lower() in names}
        if not given.get("stream"):
            raise UsageError('The source jetstream needs to know the stream. Add `.option("stream", "<app>")`.')
        if not _STREAM.fullmatch(given["stream"]):
            raise UsageError(f"{given['stream']!r} cannot be the name of a stream. Give the app's name.")
        if "@" in given.get("servers", ""):
            raise UsageError("A password in `servers` would show in Spark's plans. Name `user` and `passwordFile`.")
        return cls(
            stream=given["stream"],
            connection={name: value for name, value in given.items() if name not in _SOURCE_OPTIONS},
            columns=parse_columns(given["columns"]) if "columns" in given else STORED,
            subject=_subject(given),
            first=_number(given, "fromPosition"),
            last=_number(given, "toPosition"),
            partitions=_number(given, "partitions"),
            positions_per_trigger=_number(given, "maxPositionsPerTrigger") or POSITIONS_PER_TRIGGER,
            push_filters=_flag(given, "pushFilters"),
        )

    def _settings(self) -> Settings:
        """Return the settings of the server to read from, with the secrets read from this machine's files."""
        overrides: dict[str, Any] = {}
        for name, value in self.connection.items():
            if name in _PATHS:
                overrides[_PATHS[name]] = Path(value)
            elif name in _FILES:
                overrides[_FILES[name]] = _secret(name, value)
            else:
                overrides[_TEXTS[name]] = value
        settings = Settings.load(cast("SettingsOverrides", overrides))
        return settings.for_log() if _SERVERS & overrides.keys() else settings

    def endpoint(self) -> Endpoint:
        """Return the endpoint of the server to read from."""
        return Endpoint.of(self._settings().for_reads()).with_name(_CONNECTION)

    def open(self) -> NatsConnection:
        """Connect to the server to read from, and compare a mirror with the log first; raises `LogUnusable`."""
        settings = self._settings()
        if settings.read_from is not None:
            readable_log(settings, self.stream, _CONNECTION)
        return NatsConnection.open(Endpoint.of(settings.for_reads()).with_name(_CONNECTION))

    def predecessors(self) -> PredecessorReader:
        """Return a reader with which a task looks up an event's predecessor; the caller closes it."""
        return PredecessorReader(self.endpoint(), self.stream)


def connection_options(settings: Settings, secrets: Path) -> dict[str, str]:
    """Return the options for the server of `settings`; a password or a token is sealed in the folder `secrets`."""
    endpoint = Endpoint.of(settings.for_reads())
    check_picklable(endpoint)
    options = {
        "servers": ",".join(endpoint.servers),
        "inboxPrefix": endpoint.inbox_prefix,
        "jetstreamPrefix": endpoint.jetstream_prefix,
    }
    if endpoint.user is not None:
        options["user"] = endpoint.user
    for option, name in _PATHS.items():
        path: Path | None = getattr(endpoint, name)
        if path is not None:
            options[option] = str(path.absolute())
    for option, name in _FILES.items():
        secret: str | None = getattr(endpoint, name)
        if secret is not None:
            options[option] = seal(secrets, option, secret)
    return options


def seal(folder: Path, kind: str, secret: str) -> str:
    """Encrypt a secret into a new file in `folder`, with a random name, and return the reference: path and key."""
    key = random(SecretBox.KEY_SIZE)
    path = folder / f"{kind}-{token_hex(8)}"
    path.touch(mode=0o600)
    path.write_bytes(SecretBox(key).encrypt(secret.encode()))
    return f"{path}#{key.hex()}"


def is_sealed(reference: str) -> bool:
    """Tell whether a reference comes from `seal`; otherwise it is a path."""
    return _SEALED.fullmatch(reference) is not None


def unseal(reference: str) -> str:
    """Return the secret of a reference from `seal`, or of a plain file without its line end; raises `OSError`."""
    match = _SEALED.fullmatch(reference)
    if match is None:
        return _file_of_session(reference).read_text().strip("\r\n")
    return SecretBox(bytes.fromhex(match["key"])).decrypt(_file_of_session(match["path"]).read_bytes()).decode()


def _file_of_session(name: str) -> Path:
    """Return the path of a driver's file on this machine: the file itself, or the copy that came with the session."""
    path = Path(name)
    if path.exists():
        return path
    from pyspark import SparkFiles

    try:
        return Path(SparkFiles.get(path.name))
    except AssertionError:  # there is no session in this process
        return path


def _secret(option: str, reference: str) -> str:
    try:
        return unseal(reference)
    except OSError as error:
        # The message leaves the path out, because somebody may have given the secret instead of a path.
        raise UsageError(f"{option} names a file that cannot be read: {error.strerror}. Give a readable one.") from None


def _subject(options: Mapping[str, str]) -> str | None:
    """Return the subject of the aggregate in the options, or the wildcard of its type; None without one."""
    aggregate, aggregate_id = options.get("aggregate"), options.get("id")
    if aggregate is None:
        if aggregate_id is not None:
            raise UsageError("`id` is one aggregate's. Name that too, as `aggregate`.")
        return None
    if not is_name(aggregate):
        raise UsageError(f"{aggregate!r} is no aggregate: names are [a-z][a-z0-9_]*. Give the name of a declared one.")
    if aggregate_id is None:
        return f"{options['stream']}.{aggregate}.*"
    return subject_of(options["stream"], aggregate, aggregate_id)


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    counts = name in ("partitions", "maxPositionsPerTrigger")
    if not (text.isascii() and text.isdigit() and len(text) < 19) or (counts and int(text) < 1):
        raise UsageError(f"{name} is {text!r}, which is not a number that fits. Give a whole number.")
    return int(text)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise UsageError(f"{name} is {text!r}. Give true or false.")
    return text == "true"
