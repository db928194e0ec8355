"""`events`: the log as a DataFrame, whole and as it is stored, or one event type with a column for each of its fields.

The frame is the log as it was when `events` was called: nothing is read before an action asks for it, and every action
reads the same positions. Passwords and tokens stay out of the plan; they are kept in files that only this user can
read, which go when this process ends.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from eventjet.domain.event import event_info
from eventjet.errors import StreamMissing, UsageError
from eventjet.nats.api import stream_info
from eventjet.nats.connection import ask_once
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import AppRef
from eventjet.projections.application import Application
from eventjet.settings import Settings
from eventjet.spark.frame_tasks import RecordedTask, StoredTask, ddl_of, recorded_columns, stored_columns
from eventjet.spark.options import connection_options
from eventjet.spark.packaging import send_files, shipped
from eventjet.spark.scratch import scratch_folder
from eventjet.spark.session import Started, found_session
from eventjet.store.topology import missing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def events(
    spark: SparkSession,
    app: Application | AppRef,
    event: type | None = None,
    *,
    as_of: datetime | int | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """The log as it is now, or as of a time (events recorded until then) or a position, both included.

    With an `event` class: its events alone, upcast to its current schema, a column for each field; a field whose name
    another column has is called `event_<name>`. Then an event that cannot be read as such, or has a value that its
    column cannot hold, fails the query and is named. `settings` default to `EVENTJET_*`. Raises `UsageError` and
    `Unreachable`.
    """
    wired = app.load() if isinstance(app, AppRef) else app
    settings = settings or Settings.load()
    started = found_session(spark)
    until = _time_of(as_of)
    first, last = _ends(settings, wired.name)
    if isinstance(as_of, int):
        last = _position_of(as_of, last)
    raw: Any = raw_events(started, wired.name, settings, first, last)
    if event is None:
        return raw.mapInArrow(StoredTask(until), ddl_of(stored_columns()))
    if event not in wired.catalog:
        raise UsageError(f"{event!r} is not an event of {wired.name!r}. Name a class that one of its aggregates folds.")
    info = event_info(event)
    reference = shipped(started, app if isinstance(app, AppRef) else AppRef.of(app), _kept_folder())
    task = RecordedTask(reference, info.name, info.schema, until)
    return raw.mapInArrow(task, ddl_of(recorded_columns(event)))


def raw_events(started: Started, stream: str, settings: Settings, first: int, last: int) -> DataFrame:
    """The records from `first` to `last` in the source's `SCHEMA`."""
    connection, secrets = _connection(settings)
    send_files(secrets, started)
    options = {**connection, "stream": stream, "fromPosition": str(first), "toPosition": str(last)}
    return started.spark.read.format("jetstream").options(**options).load()


def _time_of(as_of: datetime | int | None) -> datetime | None:
    if not isinstance(as_of, datetime):
        return None
    if as_of.tzinfo is None or as_of > datetime.now(UTC):
        raise UsageError(f"{as_of.isoformat()} is in the future or has no time zone. Give a past time with its zone.")
    return as_of.astimezone(UTC)


def _position_of(as_of: int, last: int) -> int:
    if not 0 <= as_of <= last:
        raise UsageError(f"The log ends at position {last}; {as_of} is not in it. Give one that is.")
    return as_of


def _ends(settings: Settings, stream: str) -> tuple[int, int]:
    """The first and the last position of the log."""
    try:
        state = ask_once(Endpoint.of(settings).with_name("eventjet-spark"), stream_info(stream))
    except StreamMissing:
        raise missing(stream) from None
    return max(state.first, 1), state.last


@lru_cache(maxsize=100)
def _connection(settings: Settings) -> tuple[Mapping[str, str], Path]:
    """(options of the source, the folder of the secrets that they name)."""
    secrets = Path(mkdtemp(dir=_kept_folder()))
    return connection_options(settings, secrets), secrets


@cache
def _kept_folder() -> Path:
    """A private folder for as long as this process lives: a frame may be asked at any time."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch_folder())
