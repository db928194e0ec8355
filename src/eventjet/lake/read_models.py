"""`export` writes the rows of read models, as of one position of the log, into tables of a lake.

The rows are folded from the log as a rebuild folds them, without a database, and replace those of the table in the
commit that has the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eventjet import failpoints
from eventjet.codec.headers import RawRecord
from eventjet.errors import UsageError
from eventjet.lake.store import Mark, open_store
from eventjet.lake.syncing import BATCH_EVENTS, LakeReport, end_of, in_batches, mark_at, open_tables, report_of
from eventjet.lake.tables import LakeTable, read_models_of
from eventjet.projections.app_ref import Application, AppRef, projections_of
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.rebuild.folding import Folding, Foldings
from eventjet.rebuild.job import Job, in_job
from eventjet.rebuild.progress import Phase, Report
from eventjet.settings import Settings
from eventjet.spark.columns import pyarrow
from eventjet.spark.event_rows import ROW_VALUES


async def export(
    app: Application | AppRef,
    url: str,
    settings: Settings,
    names: Sequence[str],
    *,
    table_format: str = "delta",
    catalog: str | None = None,
    personal: bool = False,
    to: int | None = None,
    from_archive: str | None = None,
    progress: Report | None = None,
) -> LakeReport:
    """Write the rows of the projections `names`, as of position `to` (default: the log's last one now), into tables.

    A table is named as its projection. Its rows are replaced in one commit, which has the position, so readers see the
    rows of one position whole, and earlier versions of the table keep theirs. The log is read from its first event, and
    the rows are folded in the memory of this process; no database is needed. The other arguments are those of `sync`.

    Raises `UsageError` for a SQL projection, for one with personal data without `personal`, and for one that has the
    name of a table of events; `LakeRefused`, `LakeFenced`, `LogIncomplete`, `Unreachable`; and the errors of the
    application's own code about an event, of projections that quarantine, too.

    ```python
    report = await export(bank, "lake", Settings.load(), ["balances"], to=40)
    assert report.position == 40
    ```
    """

    def work(job: Job) -> LakeReport:
        end = end_of(job, to)
        with open_store(url, table_format, job.log.stream, catalog) as store:
            opened = open_tables(job, store, url, _tables(job.app, names, personal=personal), personal=personal)
            tables, last = fold_rows(job, [each.declared for each in opened], end)
            mark = Mark(end, 0, 0) if last is None else mark_at(last)
            failpoints.reach("lake.read")
            for each, rows in zip(opened, tables, strict=True):
                each.write(rows, mark, replacing=True)
        return report_of(job, url, table_format, opened, max(0, end - job.source.first + 1))

    def check(app: Application) -> object:
        return _tables(app, names, personal=personal)

    return await in_job(app, settings, "local", work, check=check, from_archive=from_archive, progress=progress)


def fold_rows(
    job: Job, tables: Sequence[LakeTable], position: int, phase: Phase = "load"
) -> tuple[list[Any], RawRecord | None]:
    """Return the rows of read models as of a position, as Arrow tables in the order of the keys, and the last record.

    An event that cannot be folded raises also for a projection that quarantines, since only the database knows what was
    decided about it.
    """
    projections = [table.read_model for table in tables if table.read_model is not None]
    foldings = [Folding(replace(resolved, on_error="stop"), ROW_VALUES, {}) for resolved in projections]
    parts: list[list[Any]] = [[] for _ in tables]
    last: RawRecord | None = None
    if position >= job.source.first:
        read = in_batches(job, job.source.first, position, BATCH_EVENTS, phase)
        with job.earlier() as earlier, read as batches:
            fold = Foldings(foldings, job.catalog, earlier)
            for records, _ in batches:
                fold.take(records)
                last = records[-1]
                for table, folding, drained in zip(tables, foldings, parts, strict=True):
                    if folding.is_due():
                        drained.append(_batch(table, folding))
    for table, folding, drained in zip(tables, foldings, parts, strict=True):
        drained.append(_batch(table, folding))
    ordered = [
        pyarrow().concat_tables(drained).sort_by([(name, "ascending") for name in table.key])
        for table, drained in zip(tables, parts, strict=True)
    ]
    return ordered, last


def _batch(table: LakeTable, folding: Folding) -> Any:
    try:
        return table.batch(folding.drain())
    except ValueError as error:
        raise UsageError(
            f"A value in a row of {table.name} has no place in a column of the lake: {error}. Declare the digits of "
            "its decimals, as in `Numeric(12, 2)`, at most 38."
        ) from None


def _tables(app: Application, names: Sequence[str], *, personal: bool) -> list[LakeTable]:
    """Return the tables of these projections; raises `UsageError` for one that cannot have a table."""
    if not names:
        raise UsageError(f"Name what to export. {app.name!r} has {', '.join(app.projections) or 'no projections'}.")
    tables = {table.name: table for table in read_models_of(app)}
    for resolved in projections_of(app, names):
        if isinstance(resolved, ResolvedSql):
            raise UsageError(
                f"{resolved.name} cannot be exported, since its handlers write SQL and need its database. Copy its "
                "tables from there, or write it as a fold."
            )
        if resolved.name not in tables:
            raise UsageError(
                f"{resolved.name!r} would be the table of events and the table of a projection. Rename the projection."
            )
        if resolved.is_private and not personal:
            raise UsageError(
                f"{resolved.name} has personal data, and what is in a lake stays there. Give `--personal` if it may."
            )
    return [tables[name] for name in dict.fromkeys(names)]
