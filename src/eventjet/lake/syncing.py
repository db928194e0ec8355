"""`sync` brings the tables of a lake to a position of the log, and `status` says how far they are.

The log is read once, for all tables. Each table has its own position, in the commit of its rows, and takes only what is
beyond it. So a run may be killed anywhere: the next one begins at the table that is furthest behind.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any, TypeAlias

from eventjet import failpoints
from eventjet.codec.headers import MSG_ID, RawRecord, header, recorded_at
from eventjet.errors import LakeRefused, UndecodableEvent, UsageError
from eventjet.jetstream.api import message_at
from eventjet.jetstream.connection import ask_once
from eventjet.lake.evolution import changes
from eventjet.lake.store import Mark, OpenTable, Origin, Store, event_digest, open_store
from eventjet.lake.tables import (
    LakeTable,
    RowReader,
    first_difference,
    in_declared_order,
    read_models_of,
    tables_of,
)
from eventjet.log.integrity import earlier_logs, succession_fault
from eventjet.projections.app_ref import Application, AppRef
from eventjet.rebuild.job import Job, in_job
from eventjet.rebuild.progress import Phase, Report
from eventjet.runtime import read_ahead, uncollected
from eventjet.settings import Settings
from eventjet.spark.columns import pyarrow

BATCH_EVENTS = 100_000
"""The default of how many positions are read before the tables that have new rows are committed."""
_READ_EVENTS = 2_000
"""The maximum number of records that are made to rows at a time."""
_BATCH_BYTES = 64_000_000
"""Bytes of headers and bodies after which a batch ends earlier."""
RecordAt: TypeAlias = Callable[[int], RawRecord | None]
"""Reads the log's record at a position; None if the log does not have it any more."""
_IDLE_BATCHES = 10
"""After so many batches without rows a table moves all the same, so that a killed run is not read again as a whole."""


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """One table of a lake after a sync or an export."""

    name: str
    event_type: str | None
    """The wire name of its events; None for the table of all records, and for a read model."""
    revision: int | None
    """The revision of the projection whose rows it has; None for a table of events."""
    position: int
    rows: int
    """How many rows were written."""
    created: bool
    widened: bool
    """Whether columns were added, or digits of decimals."""


@dataclass(frozen=True, slots=True)
class LakeReport:
    """What a sync or an export did."""

    url: str
    format: str
    stream: str
    log: str
    """The identity of the log."""
    position: int
    """Every table has at least what the log has up to this position; a read model is as of this position."""
    events: int
    """How many positions were read."""
    tables: tuple[WrittenTable, ...]
    seconds: Mapping[str, float]
    """Wall time by phase."""
    undeclared: tuple[str, ...] = ()
    """Tables of this log that are of no event and no projection of the app, which nothing keeps up to date."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of a lake as it is."""

    name: str
    event_type: str | None
    position: int | None
    """None for a table that no run has made yet."""
    behind: int
    """How many positions the log is ahead."""
    recorded_at: datetime | None
    """When the last event was recorded that the table may have; None if the log does not have it any more."""
    rows: int
    personal: bool
    is_read_model: bool = False
    """Whether it has the rows of the projection of its name, as of the position."""


@dataclass(frozen=True, slots=True)
class LakeStatus:
    """The tables of a lake, beside the log."""

    url: str
    format: str
    stream: str
    last: int
    """Position of the log's last event; 0 in an empty log."""
    tables: tuple[TableStatus, ...]
    undeclared: tuple[str, ...] = ()
    """Tables of this log that are of no event and no projection of the app, which nothing keeps up to date."""


@dataclass(slots=True)
class OpenForWriting:
    """A table that a run works on, with its rows that are not committed yet."""

    declared: LakeTable
    stored: OpenTable
    created: bool = False
    widened: bool = False
    added: int = 0
    pending: list[Any] = field(default_factory=list[Any])

    def commit(self, last: RawRecord) -> None:
        """Commit the pending rows, which are all up to the record `last`."""
        parts, self.pending = self.pending, []
        rows = pyarrow().concat_tables(parts) if parts else self.declared.batch([])
        row = rows.column(0)[-1].as_py() if rows.num_rows else self.stored.mark.row
        self.write(rows, mark_at(last, row, self.declared.event_schema))

    def write(self, rows: Any, mark: Mark, *, replacing: bool = False) -> None:
        """Commit rows as `OpenTable.append` does."""
        self.stored.append(rows, mark, replacing=replacing)
        self.added += rows.num_rows
        failpoints.reach("lake.committed")

    def written(self) -> WrittenTable:
        """Return what this run did."""
        declared, resolved = self.declared, self.declared.read_model
        return WrittenTable(
            declared.name,
            declared.type_name,
            None if resolved is None else resolved.revision,
            self.stored.mark.position,
            self.added,
            self.created,
            self.widened,
        )


def report_of(
    job: Job,
    url: str,
    table_format: str,
    opened: Sequence[OpenForWriting],
    events: int,
    undeclared: tuple[str, ...] = (),
) -> LakeReport:
    """Return the report of a run that has read so many positions."""
    log, tables = job.log, tuple(each.written() for each in opened)
    position = min(table.position for table in tables)
    seconds = job.watch.seconds
    return LakeReport(url, table_format, log.stream, log.identity, position, events, tables, seconds, undeclared)


async def sync(
    app: Application | AppRef,
    url: str,
    settings: Settings,
    *,
    table_format: str = "delta",
    catalog: str | None = None,
    personal: bool = False,
    to: int | None = None,
    from_archive: str | None = None,
    batch_events: int = BATCH_EVENTS,
    progress: Report | None = None,
) -> LakeReport:
    """Bring the tables of the lake at `url` to position `to` (default: the log's last position now).

    Every event is in every table that has a place for it exactly once, whenever a run is cancelled or killed: a table's
    position is in the commit of its rows. A second run at the same time ends with `LakeFenced`.

    `url` is a local folder, or the URL of a storage that the format's package knows. `catalog` is the name of an
    Iceberg catalog in pyiceberg's configuration. `personal` puts personal fields into the tables. `from_archive` is
    the URL of an archive from which the past is read. `batch_events` is how many positions are read into memory at
    most before the tables are committed. `progress` is called from another thread.

    Raises `LakeRefused` for a table of another log, or of columns that are not the app's any more, before anything is
    written; `LogIncomplete`, `UnknownEvent`, `UndecodableEvent`, `Unreachable` and `UsageError`.

    ```python
    report = await sync(bank, "lake", Settings.load())
    assert report.position == 40
    ```
    """
    if batch_events < 1:
        raise UsageError(f"A batch of {batch_events} events cannot be. Give 1 or more.")

    def work(job: Job) -> LakeReport:
        end = end_of(job, to)
        with open_store(url, table_format, job.log.stream, catalog) as store:
            opened = open_tables(job, store, url, tables_of(job.app.catalog, personal=personal), personal=personal)
            events = _follow(job, opened, end, batch_events, personal=personal)
            undeclared = _undeclared(job, store)
        return report_of(job, url, table_format, opened, events, undeclared)

    return await in_job(app, settings, "local", work, from_archive=from_archive, progress=progress)


async def status(
    app: Application | AppRef, url: str, settings: Settings, *, table_format: str = "delta", catalog: str | None = None
) -> LakeStatus:
    """Return how far each table of a lake is, and the read models that it has.

    Raises `LakeRefused` for a table of another log.
    """

    def work(job: Job) -> LakeStatus:
        log = job.log
        record_at = record_reader(job)
        with open_store(url, table_format, log.stream, catalog) as store:
            tables = [
                (declared, store.table(declared.name))
                for declared in (*tables_of(job.app.catalog, personal=True), *read_models_of(job.app))
            ]
            statuses = tuple(
                _status(job, record_at, declared, stored, url)
                for declared, stored in tables
                if stored is not None or declared.read_model is None
            )
            undeclared = _undeclared(job, store)
        return LakeStatus(url, table_format, log.stream, log.last, statuses, undeclared)

    return await in_job(app, settings, "local", work)


def _undeclared(job: Job, store: Store) -> tuple[str, ...]:
    """Return the names of tables of this log that are of no event and no projection of the app."""
    declared = {table.name for table in (*tables_of(job.app.catalog, personal=True), *read_models_of(job.app))}
    names: list[str] = []
    for name in sorted({*store.names()} - declared):
        with suppress(LakeRefused):  # somebody else's
            stored = store.table(name)
            if stored is not None and stored.origin.stream == job.log.stream:
                names.append(name)
    return tuple(names)


def record_reader(job: Job) -> RecordAt:
    """Return a function that reads each position of the log once, since the tables of a lake are mostly at the same."""

    @cache
    def record_at(position: int) -> RawRecord | None:
        return ask_once(job.log.endpoint, message_at(job.log.stream, position))

    return record_at


def _status(job: Job, record_at: RecordAt, declared: LakeTable, stored: OpenTable | None, url: str) -> TableStatus:
    name, type_name, last = declared.name, declared.type_name, job.log.last
    if stored is None:
        return TableStatus(name, type_name, None, last, None, 0, personal=False)
    check_same_log(job, record_at, stored, declared, url)
    position, personal, is_read_model = stored.mark.position, stored.origin.personal, declared.read_model is not None
    behind, at, rows = max(0, last - position), _time_of(record_at(position) if position else None), stored.row_count
    return TableStatus(name, type_name, position, behind, at, rows, personal=personal, is_read_model=is_read_model)


def end_of(job: Job, to: int | None) -> int:
    """Return the position up to which a run goes; raises `UsageError` for one that the log does not have."""
    last = job.log.state.last
    if to is not None and not 0 <= to <= last:
        raise UsageError(f"The log {job.log.stream!r} ends at position {last:,}. Name one that it has, not {to:,}.")
    return last if to is None else to


def mark_at(last: RawRecord, row: int = 0, schema: int = 0) -> Mark:
    """Return the mark of a table that has all up to the record `last`; `row` is the position of its last row."""
    return Mark(last[0], event_digest(header(last[3], MSG_ID)), row, schema)


def check_same_log(job: Job, record_at: RecordAt, stored: OpenTable, declared: LakeTable, url: str) -> None:
    """Raise `LakeRefused` unless a table is of this log's past, and has what is declared under its name."""
    log, origin, mark = job.log, stored.origin, stored.mark
    another = "Name the URL of a lake of this log, or an empty folder, which gets all of this one."
    continued = origin.log in earlier_logs(log.state)
    if origin.stream != log.stream or not (continued or origin.log == log.identity):
        reason = f"it is of the log {origin.log} of {origin.stream!r}, and {log.stream!r} is the log {log.identity}"
        raise LakeRefused(url, stored.name, reason, another)
    # A sync may have gone on since this job asked for the log's state.
    last = log.state.last if mark.position <= log.state.last else log.now().last
    # A table keeps the identity that it was made with. Beyond the end of a promoted mirror, the event at the mark says
    # whether the rows are of this log: no other log has an event with this id.
    is_compared = mark.event and log.first <= mark.position <= last
    if not is_compared and (fault := succession_fault(log.state, origin.log, mark.position)):
        raise LakeRefused(url, stored.name, fault, another)
    if origin.content != declared.content:
        kind = "" if origin.content.startswith("projection ") else "the events "
        raise LakeRefused(url, stored.name, f"it has {kind}{origin.content or 'of all types'}", another)
    if mark.position > last:
        reason = f"it is at position {mark.position:,}, and the log ends at {last:,}"
        if log.state.mirror is not None:
            remedy = (
                "`eventjet mirror status` says how far the mirror is behind; unset EVENTJET_READ_FROM to read the log."
            )
            raise LakeRefused(url, stored.name, f"{reason} in the mirror that EVENTJET_READ_FROM names", remedy)
        remedy = f"Give the log its end back, as `eventjet restore` can. {another}"
        raise LakeRefused(url, stored.name, f"{reason}, so the log has lost its end", remedy)
    if mark.event and mark.position >= log.first:
        record = record_at(mark.position)
        event_id = None if record is None else header(record[3], MSG_ID)
        if event_digest(event_id) != mark.event:
            reason = (
                f"the log has the event {event_id or 'nothing'} at position {mark.position:,}, and not the one up to "
                "which the table was written, so their pasts differ"
            )
            raise LakeRefused(url, stored.name, reason, another)


def made_again(store: Store, declared: LakeTable) -> str:
    """Return in words how a table is made again."""
    command = "sync" if declared.read_model is None else "export"
    return (
        f"To have it made again from the log, {store.dropping(declared.name)}, and run `eventjet lake {command}` again."
    )


def open_tables(
    job: Job, store: Store, url: str, declared_tables: Sequence[LakeTable], *, personal: bool
) -> list[OpenForWriting]:
    """Open, create and widen the tables; nothing is changed if any of them is refused before.

    A table that the format cannot widen is refused when those before it have been widened.
    """
    with job.watch.phase("check"):
        job.source.check_integrity(job.log.state)
        archive = job.source.archive
        record_at = record_reader(job)
        tables = [(declared, store.table(declared.name)) for declared in declared_tables]
        to_widen: list[tuple[OpenTable, LakeTable]] = []
        for declared, stored in tables:
            if stored is not None and _check(job, store, url, record_at, declared, stored, personal=personal):
                to_widen.append((stored, declared))
        of_other_schema = [
            (stored, declared)
            for declared, stored in tables
            if stored is not None and stored.mark.row and (stored.mark.schema or 1) != (declared.event_schema or 1)
        ]
        reads_all = bool(to_widen or of_other_schema)
        starts = [
            job.source.first if stored is None or declared.read_model or reads_all else stored.mark.position + 1
            for declared, stored in tables
        ]
        if archive is not None and min(starts) <= job.source.archived:
            archive.check(min(starts), job.source.archived)
        store.check_commits()
    for stored, declared in to_widen:
        _check_new_columns(job, store, url, declared, stored)
    for stored, declared in of_other_schema:
        _check_rows(job, store, url, declared, stored)
    for stored, declared in to_widen:
        stored.widen(declared.schema)
        if (left := changes(declared, stored.schema, widens_decimals=False)) != (False, []):
            reason = "; ".join(left[1]) or "it lacks a column"
            raise LakeRefused(url, stored.name, f"the format did not widen it: {reason}", made_again(store, declared))
    for stored, declared in of_other_schema:
        stored.append(declared.schema.empty_table(), replace(stored.mark, schema=declared.event_schema))
    origin = (job.log.stream, job.log.identity)
    opened: list[OpenForWriting] = []
    for declared, stored in tables:
        if stored is None:
            start = Mark(job.source.first - 1, 0, 0, declared.event_schema)
            whose = Origin(*origin, declared.content, _has_personal(declared, personal))
            stored_now = store.create(declared.name, declared.schema, whose, start)
            failpoints.reach("lake.created")
            opened.append(OpenForWriting(declared, stored_now, created=True))
        else:
            opened.append(OpenForWriting(declared, stored, widened=any(each is stored for each, _ in to_widen)))
    return opened


def _has_personal(declared: LakeTable, wanted: bool) -> bool:
    """Return whether a table has personal fields: a read model all of its columns, others those that are wanted."""
    return wanted if declared.read_model is None else declared.read_model.is_private


def _check(
    job: Job, store: Store, url: str, record_at: RecordAt, declared: LakeTable, stored: OpenTable, *, personal: bool
) -> bool:
    """Return whether a table has to be widened; raises `LakeRefused` for one that cannot be gone on with."""
    check_same_log(job, record_at, stored, declared, url)
    again = made_again(store, declared)
    if stored.origin.personal != _has_personal(declared, personal):
        what, verb = ("has", "Give") if stored.origin.personal else ("does not have", "Leave out")
        reason = f"it {what} the personal fields, and this run is asked for the opposite"
        raise LakeRefused(url, stored.name, reason, f"{verb} `--personal`, as the run did that made it. {again}")
    first, position = job.source.first, stored.mark.position
    if declared.read_model is None and position + 1 < first:
        reason = (
            f"it is at position {position:,}, and the log begins at {first:,}, so the events between are gone from it"
        )
        remedy = "Name an archive that has them with `--from-archive`; without one, a table that is made again has the"
        raise LakeRefused(url, stored.name, reason, f"{remedy} events from there on only. {again}")
    if declared.read_model is None and stored.last_row < stored.mark.row:
        reason = (
            f"it ends with the row of position {stored.last_row:,}, and its last sync left one at "
            f"{stored.mark.row:,}, so rows were deleted or an older version was restored"
        )
        raise LakeRefused(url, stored.name, reason, again)
    is_wider, refusals = changes(declared, stored.schema, widens_decimals=store.widens_decimals)
    if refusals:
        raise LakeRefused(url, stored.name, "; ".join(refusals), again)
    return is_wider


def _check_new_columns(job: Job, store: Store, url: str, declared: LakeTable, stored: OpenTable) -> None:
    """Raise `LakeRefused` unless a table's rows would have null in the columns that it lacks.

    An upcaster may give a value to earlier events, and events of the new class may have been written by an older
    version of the app, which does not know the field. So the events of the table are read again.
    """
    names, columns = stored.schema.names, list(declared.columns)
    places = [place for place, name in enumerate(columns) if name not in names]
    if declared.read_model is not None or not places or not stored.mark.row:
        return
    again, first, last = made_again(store, declared), job.source.first, stored.mark.row
    if _begins_before(stored, first):
        reason = (
            f"the column {columns[places[0]]} is new, and the log begins at {first:,}, after rows that lack its value"
        )
        raise LakeRefused(url, stored.name, reason, f"Name an archive of them with `--from-archive`. {again}")
    reader = RowReader(job.catalog, [declared], personal=stored.origin.personal)
    with in_batches(job, first, last, BATCH_EVENTS, "check") as batches:
        for records, _ in batches:
            for row in reader.rows(records, {declared.name: 0})[declared.name]:
                if place := next((place for place in places if row[place] is not None), None):
                    reason = (
                        f"the column {columns[place]} is new, and the event at position {row[0]:,} has a value for it"
                    )
                    raise LakeRefused(url, stored.name, f"{reason}, which its row would lack", again)


def _check_rows(job: Job, store: Store, url: str, declared: LakeTable, stored: OpenTable) -> None:
    """Raise `LakeRefused` unless a table's rows, upcast to another schema, are what the events give at today's."""
    again, first, last = made_again(store, declared), job.source.first, stored.mark.row
    before, today = stored.mark.schema or 1, declared.event_schema
    schemas = f"its rows are upcast to schema {before} of {declared.type_name!r}, which is at schema {today} now"
    if _begins_before(stored, first):
        reason = f"{schemas}, and the log begins at {first:,}, after rows with which it cannot be compared"
        raise LakeRefused(url, stored.name, reason, f"Name an archive of them with `--from-archive`. {again}")
    reader = RowReader(job.catalog, [declared], personal=stored.origin.personal)
    start, parts = first, [declared.schema.empty_table()]
    with in_batches(job, first, last, BATCH_EVENTS, "check") as batches:
        for records, is_full in batches:
            parts.append(declared.batch(reader.rows(records, {declared.name: 0})[declared.name]))
            if is_full or records[-1][0] == last:
                expected = pyarrow().concat_tables(parts).combine_chunks()
                rows = in_declared_order(declared, stored.read(start, records[-1][0]))
                if difference := first_difference(expected, rows, declared.key):
                    (position,), what = difference
                    reason = f"{schemas}, and at position {position:,} {what}"
                    raise LakeRefused(url, stored.name, reason, again)
                start, parts = records[-1][0] + 1, [declared.schema.empty_table()]


def _begins_before(stored: OpenTable, first: int) -> bool:
    """Return whether a table has rows from before the log's first position."""
    return first > 1 and bool(stored.read(1, first - 1).num_rows)


def _follow(job: Job, opened: Sequence[OpenForWriting], end: int, batch_events: int, *, personal: bool) -> int:
    """Append the rows up to position `end`, and return how many positions were read."""
    behind = [each for each in opened if each.stored.mark.position < end]
    if not behind:
        return 0
    start = min(each.stored.mark.position for each in behind) + 1
    reader = RowReader(job.catalog, [each.declared for each in behind], personal=personal)
    after = {each.declared.name: each.stored.mark.position for each in behind}
    with in_batches(job, start, end, batch_events) as batches:
        for records, is_full in batches:
            rows = reader.rows(records, after)
            for each in behind:
                if new_rows := rows[each.declared.name]:
                    each.pending.append(each.declared.batch(new_rows))
            last = records[-1]
            if is_full or last[0] == end:
                failpoints.reach("lake.read")
                idle_before = end if last[0] == end else last[0] - _IDLE_BATCHES * batch_events
                for each in behind:
                    if each.pending or each.stored.mark.position < idle_before:
                        each.commit(last)
    return end - start + 1


@contextmanager
def in_batches(
    job: Job, start: int, end: int, batch_events: int, phase: Phase = "load"
) -> Generator[Iterator[tuple[list[RawRecord], bool]]]:
    """Yield an iterator over the records from `start` to `end` in short lists, each with whether it fills a batch."""
    watch, total = job.watch, end - start + 1
    length = batch_events // -(-batch_events // _READ_EVENTS)
    records = job.source.records(start, end + 1, batch=length)
    with watch.phase(phase, total), uncollected(), closing(read_ahead(records, watch.check)) as ahead:

        def batches() -> Iterator[tuple[list[RawRecord], bool]]:
            count = size = 0
            for records in ahead:
                count += len(records)
                size += sum(len(record[3]) + len(record[4]) for record in records)
                is_full = count + length > batch_events or size >= _BATCH_BYTES
                if is_full:
                    count = size = 0
                yield records, is_full
                watch.report(phase, records[-1][0] - start + 1, total)

        yield batches()


def _time_of(record: RawRecord | None) -> datetime | None:
    try:
        return None if record is None else recorded_at(record)
    except UndecodableEvent:
        return None
