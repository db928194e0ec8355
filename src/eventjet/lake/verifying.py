"""`verify` compares the tables of a lake with the log, range by range, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eventjet.errors import LakeRefused
from eventjet.lake.evolution import changes
from eventjet.lake.read_models import fold_rows
from eventjet.lake.store import OpenTable, Store, open_store
from eventjet.lake.syncing import BATCH_EVENTS, check_same_log, in_batches, made_again, record_reader
from eventjet.lake.tables import (
    EVENTS,
    LakeTable,
    RowReader,
    first_difference,
    in_declared_order,
    read_models_of,
    tables_of,
)
from eventjet.projections.app_ref import Application, AppRef
from eventjet.rebuild.job import Job, in_job
from eventjet.rebuild.progress import Report
from eventjet.settings import Settings
from eventjet.spark.columns import pyarrow


@dataclass(frozen=True, slots=True)
class RangeDifference:
    """The first range of positions in which a table is not what the log says; of a read model, all positions."""

    first: int
    last: int
    expected: int
    """How many rows the log gives in the range."""
    rows: int
    """How many rows the table has there."""
    position: int
    """The first position that differs; of a read model, the position of its table."""
    reason: str
    """In words; no values are shown but keys of rows that are not personal."""


@dataclass(frozen=True, slots=True)
class VerifiedTable:
    """One table, and its first difference from the log."""

    name: str
    event_type: str | None
    """The wire name of its events; None for the table of all records, and for a read model."""
    position: int
    rows: int
    """How many rows were compared."""
    ranges: int
    difference: RangeDifference | None
    is_read_model: bool = False
    """Whether it has the rows of the projection of its name, as of the position."""


@dataclass(frozen=True, slots=True)
class LakeVerification:
    """The outcome of a verification: each table up to its own position."""

    url: str
    format: str
    stream: str
    tables: tuple[VerifiedTable, ...]
    seconds: Mapping[str, float]
    """Wall time by phase."""

    @property
    def sound(self) -> bool:
        """Whether no table differs."""
        return all(table.difference is None for table in self.tables)


async def verify(
    app: Application | AppRef,
    url: str,
    settings: Settings,
    *,
    table_format: str = "delta",
    catalog: str | None = None,
    from_archive: str | None = None,
    range_events: int = BATCH_EVENTS,
    progress: Report | None = None,
) -> LakeVerification:
    """Compare each table of a lake with the log, up to the table's position: counts, positions and every value.

    Read models that are in the lake are folded again, as of the positions of their tables, and compared row by row.
    Of each table the first range that differs is named, and then the table is not read on. `range_events` is how many
    positions a range has at most. Syncs, writers and workers may go on meanwhile. `progress` is called from another
    thread.

    Raises `LakeRefused` for tables of another log, for a table whose columns are not the app's, and for a lake without
    tables; `LogIncomplete`, `Unreachable` and `UsageError`.
    """

    def work(job: Job) -> LakeVerification:
        job.source.check_integrity(job.log.state)
        with open_store(url, table_format, job.log.stream, catalog) as store:
            events, read_models = _open_tables(job, store, url)
            if events:
                _compare(job, events, range_events)
            for position in {each.stored.mark.position for each in read_models}:
                _compare_read_models(job, [each for each in read_models if each.stored.mark.position == position])
        tables = tuple(each.verified() for each in (*events, *read_models))
        return LakeVerification(url, table_format, job.log.stream, tables, job.watch.seconds)

    return await in_job(app, settings, "local", work, from_archive=from_archive, progress=progress)


@dataclass(slots=True)
class _Compared:
    """A table that is compared, with the rows of the current range that the log gives."""

    declared: LakeTable
    stored: OpenTable
    rows: int = 0
    ranges: int = 0
    difference: RangeDifference | None = None
    expected: list[Any] = field(default_factory=list[Any])

    def compare(self, first: int, last: int) -> None:
        """Compare the range from `first` to `last`; after a difference, nothing more."""
        parts, self.expected = self.expected, []
        last = min(last, self.stored.mark.position)
        if first > last or self.difference is not None:
            return
        schema = self.declared.schema
        expected = pyarrow().concat_tables([schema.empty_table(), *parts]).combine_chunks()
        stored = in_declared_order(self.declared, self.stored.read(first, last))
        self.rows += expected.num_rows
        self.ranges += 1
        if (difference := first_difference(expected, stored, self.declared.key)) is not None:
            (position,), reason = difference
            self.difference = RangeDifference(first, last, expected.num_rows, stored.num_rows, position, reason)

    def compare_read_model(self, first: int, expected: Any) -> None:
        """Compare all rows with those that the log gives, whose events begin at position `first`."""
        stored, position = in_declared_order(self.declared, self.stored.read_all()), self.stored.mark.position
        self.rows, self.ranges = expected.num_rows, 1
        if (difference := first_difference(expected.combine_chunks(), stored, self.declared.key)) is not None:
            key, reason = difference
            read_model = self.declared.read_model
            if read_model is not None and not read_model.is_private:
                reason = f"{reason} (key {', '.join(map(str, key))})"
            reason += "; if the projection was changed since the export, run `eventjet lake export` again"
            self.difference = RangeDifference(first, position, expected.num_rows, stored.num_rows, position, reason)

    def finish(self, first: int) -> None:
        """Compare the number of all rows, since some may be outside every range; the ranges began at `first`."""
        position = self.stored.mark.position
        if self.difference is not None or (count := self.stored.row_count) == self.rows:
            return
        if first > 1 and (before := self.stored.read(1, first - 1).num_rows):
            reason = f"the log has nothing to compare with, since it begins at {first:,}; name an archive of its past"
            self.difference = RangeDifference(1, first - 1, 0, before, 1, f"{reason} with `--from-archive`")
            return
        reason = f"it has {count:,} rows in all, and some of them are outside the positions up to {position:,}"
        self.difference = RangeDifference(position + 1, position + 1, self.rows, count, position + 1, reason)

    def verified(self) -> VerifiedTable:
        """Return the outcome."""
        declared, position = self.declared, self.stored.mark.position
        is_read_model = declared.read_model is not None
        rows, ranges = self.rows, self.ranges
        return VerifiedTable(
            declared.name, declared.type_name, position, rows, ranges, self.difference, is_read_model=is_read_model
        )


def _open_tables(job: Job, store: Store, url: str) -> tuple[list[_Compared], list[_Compared]]:
    """Return the tables of events, and those of read models."""
    compared: list[_Compared] = []
    read_models, record_at = read_models_of(job.app), record_reader(job)
    with_personal, without = (
        [*tables_of(job.app.catalog, personal=personal), *read_models] for personal in (True, False)
    )
    for declared, limited in zip(with_personal, without, strict=True):
        stored = store.table(declared.name)
        if stored is None:
            continue
        check_same_log(job, record_at, stored, declared, url)
        table = declared if stored.origin.personal else limited
        _, refusals = changes(table, stored.schema, widens_decimals=store.widens_decimals)
        if refusals:
            raise LakeRefused(url, stored.name, "; ".join(refusals), made_again(store, declared))
        compared.append(_Compared(table, stored))
    if not compared:
        raise LakeRefused(url, EVENTS, "there is no such table", "`eventjet lake sync` makes it. Or give its --format.")
    by_kind = [[each for each in compared if (each.declared.read_model is not None) == kind] for kind in (False, True)]
    return by_kind[0], by_kind[1]


def _compare_read_models(job: Job, compared: Sequence[_Compared]) -> None:
    """Compare read models of one position."""
    tables, _ = fold_rows(job, [each.declared for each in compared], compared[0].stored.mark.position, "compare")
    for each, expected in zip(compared, tables, strict=True):
        each.compare_read_model(job.source.first, expected)


def _compare(job: Job, compared: Sequence[_Compared], range_events: int) -> None:
    first = start = job.source.first
    end = max(each.stored.mark.position for each in compared)
    personal = next((each.stored.origin.personal for each in compared if each.declared.name == EVENTS), False)
    reader = RowReader(job.catalog, [each.declared for each in compared], personal=personal)
    if start <= end:
        with in_batches(job, start, end, range_events, "compare") as batches:
            for records, is_full in batches:
                last = records[-1][0]
                rows = reader.rows(records, {each.declared.name: 0 for each in compared if each.difference is None})
                for each in compared:
                    limit = each.stored.mark.position
                    if new_rows := [row for row in rows.get(each.declared.name, ()) if row[0] <= limit]:
                        each.expected.append(each.declared.batch(new_rows))
                if is_full or last == end:
                    for each in compared:
                        each.compare(first, last)
                    first = last + 1
    for each in compared:
        each.finish(start)
