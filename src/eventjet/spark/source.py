"""The data source `jetstream`: a range of the log as a DataFrame of raw records.

`spark.read.format("jetstream")` finds it without registration, through the module `pyspark_eventjet`. The positions
each task reads are fixed when the query is planned, so a task that is tried again reads the same events; a position
that is missing fails the query. Options:

* `stream` — the app's name; `servers` — NATS URLs separated by commas, without userinfo
* `fromPosition`, `toPosition` — both included; default: all there is when the query is planned
* `partitions` — how many ranges; default: one for each 100,000 positions, two at least
* `user`, `passwordFile`, `tokenFile`, `credentials`, `nkey`, `tlsCa`, `tlsCert`, `tlsKey` — credentials by path, each
  read where a task runs; no secret is part of a plan. The first two files may come with the session (`addArtifacts`)

What no option names is taken from `EVENTJET_*` where the task runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from eventjet.errors import UsageError
from eventjet.settings import Settings
from eventjet.spark.ranges import range_count, split
from eventjet.spark.session import session_file
from eventjet.wire import Endpoint, read_range, stream_state

if TYPE_CHECKING:
    from eventjet.codec.envelope import RawRecord

SCHEMA = "position bigint, time_ns bigint, subject string, headers binary, body binary"
"""A record as it is stored; `time_ns` counts from 1970, `headers` is the raw block."""

BATCH = 1_000
"""Records an Arrow batch; a record may be nearly a megabyte."""

_PATHS = {"credentials": "credentials", "nkey": "nkey", "tlsCa": "tls_ca", "tlsCert": "tls_cert", "tlsKey": "tls_key"}
_FILES = {"passwordFile": "password", "tokenFile": "token"}
_PLAIN = {"servers": "servers", "user": "user"}
_OTHER = ("stream", "fromPosition", "toPosition", "partitions")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options, checked; it holds names and paths only and can be pickled."""

    stream: str
    connection: Mapping[str, str]
    """Options that say where the server is and how to prove who we are."""
    first: int | None = None
    last: int | None = None
    partitions: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> LogOptions:
        """Names in any case, as Spark has it; raises `UsageError`."""
        names = {name.lower(): name for name in (*_PATHS, *_FILES, *_PLAIN, *_OTHER)}
        unknown = [name for name in options if name.lower() not in names and name.lower() != "path"]
        if unknown:
            raise UsageError(f"The source jetstream has no option {unknown[0]!r}. It has: {', '.join(names.values())}.")
        given = {names[name.lower()]: value for name, value in options.items() if name.lower() in names}
        if not given.get("stream"):
            raise UsageError('The source jetstream needs to know the stream. Add `.option("stream", "<app>")`.')
        if "@" in given.get("servers", ""):
            raise UsageError("A password in `servers` would show in Spark's plans. Name `user` and `passwordFile`.")
        return cls(
            stream=given["stream"],
            connection={name: value for name, value in given.items() if name not in _OTHER},
            first=_number(given, "fromPosition"),
            last=_number(given, "toPosition"),
            partitions=_number(given, "partitions"),
        )

    def endpoint(self) -> Endpoint:
        """Where the server is, with the secrets that this machine has."""
        overrides: dict[str, Any] = {_PLAIN[name]: value for name, value in self.connection.items() if name in _PLAIN}
        for name, value in self.connection.items():
            if name in _PATHS:
                overrides[_PATHS[name]] = Path(value)
            elif name in _FILES:
                overrides[_FILES[name]] = _secret(name, Path(value))
        return Endpoint.of(Settings.load(overrides)).with_name("eventjet-spark")


@dataclass
class RangePartition(InputPartition):
    """Positions `start` <= position < `end`."""

    start: int
    end: int


class JetStreamReader(DataSourceReader):
    """Plans ranges once, reads each through a consumer of its own."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def partitions(self) -> list[RangePartition]:
        state = stream_state(self._options.endpoint(), self._options.stream)
        options = self._options
        first = max(state.first, 1) if options.first is None else options.first
        last = state.last if options.last is None else options.last
        count = options.partitions or range_count(last - first + 1, at_least=2)
        parts = [RangePartition(part.start, part.end) for part in split(first, last, count)]
        return parts or [RangePartition(1, 1)]

    def read(self, partition: Any) -> Iterator[Any]:
        options = self._options
        for records in read_range(options.endpoint(), options.stream, partition.start, partition.end, batch=BATCH):
            yield arrow_batch(records)


class JetStreamSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 - Spark names it
        return JetStreamReader(LogOptions.parse(dict(self.options)))


def arrow_batch(records: list[RawRecord]) -> Any:
    """Records as one Arrow batch in `SCHEMA`: bytes stay bytes until a fold decodes them."""
    arrow: Any = import_module("pyarrow")
    position, time_ns, subject, headers, body = zip(*records, strict=True)
    return arrow.RecordBatch.from_arrays(
        [
            arrow.array(position, arrow.int64()),
            arrow.array(time_ns, arrow.int64()),
            arrow.array(subject, arrow.binary()).cast(arrow.string()),
            arrow.array(headers, arrow.binary()),
            arrow.array(body, arrow.binary()),
        ],
        names=["position", "time_ns", "subject", "headers", "body"],
    )


def connection_options(settings: Settings, secrets: Path) -> dict[str, str]:
    """The options that reach the same server as `settings` do; a password or a token goes into a file of `secrets`."""
    endpoint = Endpoint.of(settings)
    found = {"servers": ",".join(endpoint.servers), "user": endpoint.user}
    found |= {option: _absolute(getattr(endpoint, name)) for option, name in _PATHS.items()}
    found |= {option: _kept(secrets, option, getattr(endpoint, name)) for option, name in _FILES.items()}
    return {name: value for name, value in found.items() if value is not None}


def write_secret(folder: Path, kind: str, secret: str) -> Path:
    """A file only this user can read, under a name no other session has; it is empty until its mode is set."""
    path = folder / f"{kind}-{token_hex(8)}"
    path.touch(mode=0o600)
    path.write_text(secret)
    return path


def _kept(secrets: Path, option: str, secret: str | None) -> str | None:
    return None if secret is None else str(write_secret(secrets, option, secret))


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _secret(option: str, path: Path) -> str:
    try:
        return session_file(path).read_text().strip("\r\n")
    except OSError as error:
        raise UsageError(
            f"{option} names {path}, which cannot be read: {error.strerror}. Give a readable file."
        ) from None


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or (name == "partitions" and int(text) < 1):
        raise UsageError(f"{name} is {text!r}, which is not a number that fits. Give a whole number.")
    return int(text)
