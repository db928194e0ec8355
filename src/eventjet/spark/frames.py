"""`events` returns the whole log as a DataFrame, or one event type with a column for each of its fields.

The frame has the positions of the log when `events` was called: nothing is read before an action needs it, and every
action reads the same positions. Passwords and tokens are not in the plan, but in files that only this user can read,
which are removed when this process ends.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from eventjet.codec.headers import TYPE, header
from eventjet.codec.records import Decoder
from eventjet.domain.aggregate import event_info
from eventjet.domain.moment import in_utc
from eventjet.errors import UsageError
from eventjet.log.mirror import readable_log
from eventjet.projections.app_ref import Application, AppRef
from eventjet.settings import Settings
from eventjet.spark.columns import Form, forms_of, quoted, records_of
from eventjet.spark.event_rows import batch_of, recorded_columns, recorded_row, stored_columns, stored_row
from eventjet.spark.session import running_session, scratch_folder
from eventjet.spark.source import connection_options


def events(
    spark: SparkSession,
    app: Application | AppRef,
    event: type | None = None,
    *,
    as_of: datetime | int | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """Return the log as a DataFrame: as it is now, or up to a time or a position.

    `as_of` is a time with its zone (events recorded until then) or a position, both included. `settings` default to
    `EVENTJET_*`.

    With an `event` class, the frame has only its events, upcast to the current schema, with a column for each field; a
    field whose name another column has is called `event_<name>`. An event that cannot be decoded, or that has a value
    for which its column has no place, fails the query with an error that names the event.

    Raises `UsageError` and `Unreachable`.
    """
    # Imported here because only the driver needs it: the tasks below load this module in every worker.
    from eventjet.spark.running import send_files, shipped

    application = app.load() if isinstance(app, AppRef) else app
    settings = settings or Settings.load()
    started = running_session(spark)
    until = _time_of(as_of)
    _, state = readable_log(settings, application.name, "eventjet-spark")
    first, last = max(state.first, 1), state.last
    if isinstance(as_of, int):
        if not 0 <= as_of <= last:
            raise UsageError(f"The log ends at position {last}; {as_of} is not in it. Give one that is.")
        last = as_of
    connection, secrets = log_connection(settings)
    send_files(secrets, started)
    options = {**connection, "stream": application.name, "fromPosition": str(first), "toPosition": str(last)}
    raw: Any = spark.read.format("jetstream").options(**options).load()
    if event is None:
        return raw.mapInArrow(StoredTask(until), ddl_of(stored_columns()))
    if event not in application.catalog:
        raise UsageError(
            f"{event!r} is not an event of {application.name!r}. Name a class that one of its aggregates folds."
        )
    info = event_info(event)
    reference = shipped(started, app if isinstance(app, AppRef) else AppRef.of(app), process_folder())
    task = RecordedTask(reference, info.name, info.schema, until)
    return raw.mapInArrow(task, ddl_of(recorded_columns(event)))


def _time_of(as_of: datetime | int | None) -> datetime | None:
    if not isinstance(as_of, datetime):
        return None
    if as_of.utcoffset() is None or as_of > datetime.now(UTC):
        raise UsageError(f"{as_of.isoformat()} is in the future or has no time zone. Give a past time with its zone.")
    return in_utc(as_of)


@lru_cache(maxsize=100)
def log_connection(settings: Settings) -> tuple[Mapping[str, str], Path]:
    """Return (options of the source `jetstream`, the folder of the sealed secrets that they name)."""
    secrets = Path(mkdtemp(dir=process_folder()))
    return connection_options(settings, secrets), secrets


@cache
def process_folder() -> Path:
    """Return a private folder that is removed when this process ends, because a frame may be used until then."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch_folder())


def ddl_of(columns: Mapping[str, Form]) -> str:
    """Return columns as Spark's DDL."""
    return ", ".join(f"{quoted(name)} {form.ddl}" for name, form in columns.items())


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A Spark task that makes rows of stored records; it needs no application, and no content of a record raises."""

    until: datetime | None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        columns = stored_columns()
        for batch in batches:
            rows = [stored_row(record) for record in records_of(batch)]
            if self.until is not None:
                rows = [row for row in rows if row[1] is not None and row[1] <= self.until]
            if rows:
                yield batch_of(rows, columns)


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A Spark task that makes rows of the events of one type, which the application's own code decodes."""

    app: AppRef
    type_name: str
    schema: int
    until: datetime | None = None
    left_out: frozenset[str] = frozenset()
    """The fields that get no column."""
    skipped: Mapping[int, str] = field(default_factory=dict[int, str])
    """The positions with a skip marker, and the reasons."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        catalog = self.app.load().catalog.of_log(self.skipped)
        resolved = catalog.resolve(self.type_name, self.schema)
        if resolved is None:
            raise UsageError(
                f"The app where this task runs does not declare {self.type_name!r} schema {self.schema}. "
                "Install the same version there."
            )
        event_type, info = resolved.event.event_type, resolved.event.info
        decode = Decoder(catalog, (event_type,))
        columns = recorded_columns(event_type, self.left_out)
        forms = {name: form for name, form in forms_of(event_type).items() if name not in self.left_out}
        # Records are selected by name only: a newer schema of this event must fail the query, not be skipped.
        names = {info.name, *info.formerly}
        for batch in batches:
            selected = (record for record in records_of(batch) if header(record[3], TYPE) in names)
            events = [event for record in selected if (event := decode(record)) is not None]
            if self.until is not None:
                events = [event for event in events if event.recorded_at <= self.until]
            if events:
                yield batch_of([recorded_row(event, forms) for event in events], columns)
