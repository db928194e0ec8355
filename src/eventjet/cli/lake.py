"""The commands `eventjet lake …`: tables in a lakehouse, at a position of the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.bulk import FromArchiveOption
from eventjet.cli.output import Answer, Block, Table
from eventjet.cli.running import finished
from eventjet.cli.target import AppTarget, argument, on_app, option, switch
from eventjet.runtime import run_async
from eventjet.text import counted, listed, spent

if TYPE_CHECKING:
    from eventjet.lake import LakeReport, LakeVerification

UrlArgument = Annotated[str, argument("URL", "A folder, or the URL of one in an object store.")]
FormatOption = Annotated[str, option("--format", "delta|iceberg", "The format of the tables.")]
CatalogOption = Annotated[
    str | None,
    option("--catalog", "NAME", "Iceberg's, of pyiceberg's configuration; else catalog.db in the folder."),
]

ToOption = Annotated[int | None, option("--to", "POSITION", "The last to take; default: all there is.", min=0)]
PersonalOption = Annotated[bool, switch("--personal", "With the fields that are marked personal.")]

lake = typer.Typer(name="lake", help="Tables in a lakehouse, at a position of the log.", no_args_is_help=True)


@lake.command()
@on_app(database=False)
def sync(
    at: AppTarget,
    url: UrlArgument,
    table_format: FormatOption = "delta",
    catalog: CatalogOption = None,
    to: ToOption = None,
    personal: PersonalOption = False,
    from_archive: FromArchiveOption = None,
    batch_events: Annotated[
        int, option("--batch-events", "N", "Events in memory at most, before tables are committed.", min=1)
    ] = 100_000,
) -> Answer:
    """Append to the tables at URL what they lack of the log: `events`, and one table for each event type.

    Each event is in them exactly once: a table's position is in the commit of its rows. Stopped at any moment, the next
    run goes on there. One run at a time; a second one is stopped by the first commit that it loses.
    """
    from eventjet.lake import sync as run

    options = {"table_format": table_format, "catalog": catalog, "personal": personal, "to": to}
    work = partial(run, at.ref, url, at.settings, **options, from_archive=from_archive, batch_events=batch_events)
    report = finished("What was committed stays; the next run goes on there.", work)
    return Answer(report, _sync_blocks(report))


@lake.command()
@on_app(database=False)
def export(
    at: AppTarget,
    url: UrlArgument,
    projections: Annotated[list[str], argument("PROJECTION...", "Which ones.", "projections")],
    table_format: FormatOption = "delta",
    catalog: CatalogOption = None,
    to: ToOption = None,
    personal: PersonalOption = False,
    from_archive: FromArchiveOption = None,
) -> Answer:
    """Write the rows of read models, as of a position of the log, into tables at URL.

    The rows are folded from the log, without a database, and replace those of the table in one commit, which has the
    position. A table is named as its projection.
    """
    from eventjet.lake import export as run

    options = {"table_format": table_format, "catalog": catalog, "personal": personal, "to": to}
    work = partial(run, at.ref, url, at.settings, projections, **options, from_archive=from_archive)
    report = finished("A table has its earlier rows or the new ones, whole.", work)
    return Answer(report, _export_blocks(report))


@lake.command()
@on_app(database=False)
def status(
    at: AppTarget, url: UrlArgument, table_format: FormatOption = "delta", catalog: CatalogOption = None
) -> Answer:
    """Show the position of each table, how many events the log is ahead, and when its last event was recorded."""
    from eventjet.lake import status as read

    result = run_async(read(at.ref, url, at.settings, table_format=table_format, catalog=catalog))
    rows = [
        (
            table.name,
            table.position,
            table.behind,
            None if table.recorded_at is None else f"{table.recorded_at:%Y-%m-%d %H:%M:%S}",
            table.rows,
        )
        for table in result.tables
    ]
    # A time is written as in other answers.
    tables = [
        {**asdict(table), "recorded_at": table.recorded_at and table.recorded_at.isoformat()} for table in result.tables
    ]
    value = {**asdict(result), "tables": tables}
    shown: list[Block] = [Table(("table", "position", "behind", "last event (UTC)", "rows"), rows)]
    if all(table.position is None for table in result.tables):
        shown.append(
            f"There are no {table_format} tables yet; `eventjet lake sync` makes them. Or give their `--format`."
        )
    shown += _undeclared(result.undeclared)
    return Answer(value, shown)


@lake.command()
@on_app(database=False)
def verify(
    at: AppTarget,
    url: UrlArgument,
    table_format: FormatOption = "delta",
    catalog: CatalogOption = None,
    from_archive: FromArchiveOption = None,
    range_events: Annotated[int, option("--range-events", "N", "Positions in a range.", min=1)] = 100_000,
) -> Answer:
    """Compare the tables with the log, range by range: counts, positions and values; exit status 1 when any differs.

    The first range that differs is named for each table. Nothing is changed, and syncs go on meanwhile.
    """
    from eventjet.lake import verify as run

    options = {"table_format": table_format, "catalog": catalog, "from_archive": from_archive}
    work = partial(run, at.ref, url, at.settings, **options, range_events=range_events)
    report = finished("Nothing was changed.", work)
    return Answer({**asdict(report), "sound": report.sound}, _verify_blocks(report), ok=report.sound)


def _undeclared(names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence about tables that are of nothing that the app declares."""
    if names:
        yield (
            f"The app declares no event and no projection for {listed(names)}, so nothing keeps it up to date. If an "
            "event was renamed, its events are in the table of its new name. Delete what nobody reads any more."
        )


def _sync_blocks(report: LakeReport) -> Iterator[Block]:
    added = sum(table.rows for table in report.tables)
    done = "" if added else "Up to date: "
    yield f"{done}{report.url} holds {report.stream} up to position {report.position:,}"
    for table in report.tables:
        if table.widened:
            yield f"{table.name} has more columns, or more digits in one, than before."
    if added:
        yield Table(("table", "rows added"), [(table.name, table.rows) for table in report.tables])
        yield f"{counted(report.events, 'event')} read: {spent(report.seconds)}"
    yield from _undeclared(report.undeclared)


def _export_blocks(report: LakeReport) -> Iterator[Block]:
    yield Table(("table", "position", "rows"), [(table.name, report.position, table.rows) for table in report.tables])
    yield f"{counted(report.events, 'event')} read: {spent(report.seconds)}"


def _verify_blocks(report: LakeVerification) -> Iterator[Block]:
    rows = [
        (table.name, table.position, table.rows, "differs" if table.difference else "as the log")
        for table in report.tables
    ]
    yield Table(("table", "position", "rows compared", ""), rows)
    for table in report.tables:
        difference = table.difference
        if difference is not None and table.is_read_model:
            yield (
                f"{table.name} has {difference.rows:,} rows, and the log gives {difference.expected:,} up to position "
                f"{difference.position:,}: {difference.reason}."
            )
        elif difference is not None:
            yield (
                f"{table.name}: positions {difference.first:,} to {difference.last:,} have {difference.rows:,} rows, "
                f"and the log gives {difference.expected:,}. At position {difference.position:,}, {difference.reason}."
            )
