"""The commands for bulk work over the log, on Spark or in this process.

They are `eventjet rebuild`, `verify`, `snapshots build`, `archive`, `restore`, `audit` and `pipeline`.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast
from urllib.parse import unquote

import typer

from eventjet.cli.output import ANSWER_IS_NO, Answer, Block, Lines, Table, note
from eventjet.cli.running import finished, running_program
from eventjet.cli.target import (
    AggregateArgument,
    AppTarget,
    argument,
    on_app,
    option,
    switch,
    without_token,
)
from eventjet.errors import EventjetError, Forbidden, StoreUnavailable, Unreachable, UsageError
from eventjet.runtime import run_async

if TYPE_CHECKING:
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild.plan import EngineChoice

EngineOption = Annotated[
    str,
    option(
        "--engine",
        "auto|spark|local",
        "Spark, or this process alone without a JVM; auto: Spark for a cluster or a large log.",
    ),
]
MasterOption = Annotated[
    str | None,
    option("--master", "URL", "Spark's; else SPARK_REMOTE, else all cores of this machine.", callback=without_token),
]
FromArchiveOption = Annotated[
    str | None, option("--from-archive", "URL", "Read the past from an archive, as far as that goes.")
]
NoShipOption = Annotated[bool, switch("--no-ship", "Do not send the app's package to Spark: it is installed there.")]
ProjectionsArgument = Annotated[list[str], argument("PROJECTION", "Which ones.", "projections")]
UrlArgument = Annotated[str, argument("URL", "A folder, or the URL of any Hadoop file system.")]

_PIPELINE_SPECS = ("spark-pipeline.yml", "spark-pipeline.yaml")
_FOLDER_OF_TABLES = re.compile(
    r"(?:storage:\s*|file://|databaseName=)(?:file://)?(/[^\s;]*)/(?:storage|catalog|warehouse)\b"
)
_OWN_ERROR = re.compile(r"eventjet\.errors\.[\w.]+: (?P<message>.+)")
_OTHER_ERROR = re.compile(r"(?:[a-z]\w*\.)*[A-Z]\w*(?:Error|Exception): (?P<message>.+)")
_CAUSES = {
    "Timed out while waiting for the Python worker to connect back": (
        "This machine was too busy: Spark waits 10 s for a Python that it starts, which no setting changes. Run it "
        "again."
    ),
    "java.net.BindException": (
        "Another pipeline runs on this machine: a local Spark takes port 15002. Run this one when that has ended."
    ),
    "Another instance of Derby may have": "Another run of this pipeline is at work. Run it again when that has ended.",
}
"""Text in what Spark prints → the reason in words."""

snapshots = typer.Typer(name="snapshots", help="Folded states that are kept beside the log.", no_args_is_help=True)


@on_app()
def rebuild(
    at: AppTarget,
    projections: ProjectionsArgument,
    engine: EngineOption = "auto",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
    dry_run: Annotated[bool, switch("--dry-run", "Show the plan and what would refuse it; change nothing.")] = False,
) -> Answer:
    """Make read models again from the log while the live ones serve, and swap them in.

    Ctrl-C, or a fault anywhere, leaves the live ones as they are.
    """
    from eventjet.operations.reports import preview_lines, preview_value, rebuild_lines
    from eventjet.rebuild import preview
    from eventjet.rebuild import rebuild as run

    options, names = _engine_options(engine, master, no_ship), at.chosen(projections)
    if dry_run:
        planned = run_async(preview(at.ref, names, at.settings, engine=options, from_archive=from_archive))
        return Answer(preview_value(planned), preview_lines(planned), ok=not planned.refusals)
    work = partial(run, at.ref, names, at.settings, engine=options, from_archive=from_archive)
    report = finished("No live read model was changed but by a swap that was complete.", work)
    return Answer(report, rebuild_lines(report))


@on_app()
def verify(
    at: AppTarget,
    projections: ProjectionsArgument,
    engine: EngineOption = "auto",
    master: MasterOption = None,
    from_archive: FromArchiveOption = None,
    no_ship: NoShipOption = False,
) -> Answer:
    """Compare read models with the log, row by row; exit status 1 when any differs or cannot be verified.

    Workers, commands and readers go on meanwhile. The first differences are named, with the position since which
    the row is not what the log says. Of several read models one after the other is verified, whatever comes of it.
    """
    from eventjet.operations.reports import verify_lines, verify_value
    from eventjet.rebuild import verify as run

    options, names, lines = _engine_options(engine, master, no_ship), at.chosen(projections), list[Block]()
    values: list[dict[str, object]] = []
    rows: list[tuple[object, ...]] = []
    is_fine = True
    for name in names:
        work = partial(run, at.ref, name, at.settings, engine=options, from_archive=from_archive)
        try:
            report = finished("Nothing was changed.", work)
        except EventjetError as error:
            if len(names) == 1 or isinstance(error, Unreachable | StoreUnavailable | Forbidden):
                raise  # what all of them need is away
            is_fine = False
            lines.append(f"{name} could not be verified: {error}")
            values.append({"projection": name, "error": str(error)})
            rows.append((name, None, None, "not verified"))
            continue
        is_fine = is_fine and not report.differences
        private = at.app().projections[name].is_private
        lines += verify_lines(report, private=private)
        values.append(verify_value(report, private=private))
        rows.append((name, report.position, report.rows, report.differences))
    if len(names) == 1:
        return Answer(values[0], lines, ok=is_fine)
    summary = Table(("verified", "position", "rows", "differences"), rows)
    return Answer({"projections": values}, [*lines, Lines([""]), summary], ok=is_fine)


@snapshots.command()
@on_app(database=False)
def build(
    at: AppTarget,
    aggregate: AggregateArgument,
    min_events: Annotated[
        int | None, option("--min-events", "N", "Only aggregates with so many; default: its snapshot_every.", min=1)
    ] = None,
    engine: EngineOption = "auto",
    master: MasterOption = None,
) -> Answer:
    """Write the snapshots of all aggregates of a type from one reading of the log.

    Commands go on meanwhile, and no snapshot takes the place of a newer one. Exit status 1 when a history is broken.
    """
    from dataclasses import asdict

    from eventjet.operations.reports import snapshot_lines
    from eventjet.rebuild import build_snapshots

    options = _engine_options(engine, master)
    work = partial(build_snapshots, at.ref, aggregate, at.settings, engine=options, min_events=min_events)
    report = finished("Snapshots written so far are kept; run it again for the others.", work)
    value = asdict(report)
    tally = value.pop("tally")
    return Answer(value | tally, snapshot_lines(report), ok=not report.tally.broken)


@on_app(database=False)
def archive(
    at: AppTarget,
    url: UrlArgument,
    to: Annotated[int | None, option("--to", "POSITION", "The last to archive; default: all there is.", min=1)] = None,
    segment_events: Annotated[
        int, option("--segment-events", "N", "Events a segment has, up to the end of a save.", min=1)
    ] = 1_000_000,
    master: MasterOption = None,
) -> Answer:
    """Seal what the archive at URL does not have yet into Parquet files, each read back before it counts.

    Stopped at any moment, the next run goes on after the last sealed segment. One run at a time.
    """
    from eventjet.operations.reports import archive_lines, archive_value
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import archive as run

    engine = EngineOptions(master=master)
    work = partial(run, at.ref, url, at.settings, to=to, segment_events=segment_events, engine=engine)
    report = finished("What was sealed stays sealed; the next run goes on after it.", work)
    return Answer(archive_value(report), archive_lines(report), ok=not report.bodies.missing)


@on_app(database=False)
def restore(at: AppTarget, url: UrlArgument, master: MasterOption = None) -> Answer:
    """Publish an archive into an empty stream: the same events at the same positions, so that read models go on.

    Stop what works on the app's log first. Run it again after Ctrl-C or a fault, and it goes on where it ended.
    """
    from eventjet.operations.reports import restore_lines
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import restore as run

    at.app()  # Report a fault in the app before anything starts.
    work = partial(run, at.ref, url, at.settings, engine=EngineOptions(master=master))
    report = finished("What was restored stays; run it again and it goes on there.", work)
    return Answer(report, restore_lines(report), ok=not (report.bodies.missing or report.torn))


@on_app(database=False)
def audit(
    at: AppTarget,
    archive: Annotated[
        str | None, option("--archive", "URL", "Compare with an archive, and say what it has that is gone.")
    ] = None,
    examples: Annotated[int, option("--examples", "N", "Findings of each kind to show; all are counted.", min=0)] = 5,
    master: MasterOption = None,
) -> Answer:
    """Walk the whole log, and tell what is missing, broken, unreadable or not where it belongs; then exit status 1.

    Only reads, so everything else goes on meanwhile.
    """
    from eventjet.operations.reports import audit_lines, audit_value
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import audit as run

    has_claims = any(info.unique for info in at.app().aggregates.values())  # and a fault in the app is reported first
    work = partial(run, at.ref, at.settings, archive=archive, engine=EngineOptions(master=master), examples=examples)
    report = finished("Nothing was changed.", work)
    return Answer(audit_value(report), audit_lines(report, has_claims=has_claims), ok=report.sound)


def pipeline(
    folder: Annotated[Path, argument("[FOLDER]", "The one with spark-pipeline.yml.")] = Path("pipeline"),
    dry_run: Annotated[bool, switch("--dry-run", "Check the definitions, and change nothing.")] = False,
    full_refresh: Annotated[bool, switch("--full-refresh", "Empty every table, and fill it from its start.")] = False,
) -> None:
    """Run a pipeline on Spark: `spark-pipelines run`, with a Java, this Python and the settings in FOLDER/conf.

    Stopped at any moment, the next run goes on after the last batch that is in the tables.
    """
    from eventjet.spark.session import program_environment

    spec = next((spec for spec in map(folder.joinpath, _PIPELINE_SPECS) if spec.is_file()), None)
    if spec is None:
        here = any(map(os.path.isfile, _PIPELINE_SPECS))
        raise UsageError(
            f"There is no {_PIPELINE_SPECS[0]} in {folder}. "
            + (
                "One is in the current folder: run this in the project's folder, the one above."
                if here
                else "Name the folder that has it, or make a project with one: `eventjet new NAME --pipeline`."
            )
        )
    if dry_run and full_refresh:
        raise UsageError("--dry-run changes nothing, and --full-refresh empties tables. Leave one of them out.")
    _check_folder_of_tables(spec)
    with program_environment(folder.resolve() / "conf") as (programs, environ):
        words = ["dry-run"] if dry_run else ["run", *(["--full-refresh-all"] if full_refresh else [])]
        command = [str(programs / "spark-pipelines"), *words, "--spec", str(spec)]
        own_error = cause = other_error = ""
        try:
            with running_program(command, environ) as process:
                for line in process.stdout or ():
                    print(line, end="", flush=True)
                    if (error := _OWN_ERROR.match(line)) is not None:
                        own_error = error["message"]
                    elif (error := _OTHER_ERROR.match(line)) is not None:
                        other_error = other_error or error["message"]
                    cause = cause or next((words for text, words in _CAUSES.items() if text in line), "")
        except KeyboardInterrupt:
            note("Interrupted. The next run goes on after the last batch that is in the tables.")
            raise
    if process.returncode:
        # What Spark prints of an error ends with the many lines of its own stack.
        note(f"eventjet: The pipeline has not finished. {own_error or cause or other_error}".rstrip())
        raise typer.Exit(ANSWER_IS_NO)


def _check_folder_of_tables(spec: Path) -> None:
    """Raise `UsageError` for tables in the folder of another copy of the project: Spark takes no relative paths."""
    here = spec.parent.resolve()
    for file in (spec, spec.parent / "conf/spark-defaults.conf"):
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        for named in map(unquote, _FOLDER_OF_TABLES.findall(text)):
            tables = Path(named)
            if tables.name == here.name and tables.resolve() != here:
                raise UsageError(
                    f"{file.name} names tables in {tables}, and this pipeline is in {here}: the project was moved or "
                    f"copied, and a run would write into the other one. Write this folder into {spec.name} and "
                    "conf/spark-defaults.conf."
                )


def _engine_options(name: str, master: str | None, no_ship: bool = False) -> EngineOptions:
    """Return the options of the engine of this name. Raises `UsageError` for options that contradict each other."""
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild.job import options_of

    for flag, is_given in (("--master", master is not None), ("--no-ship", no_ship)):
        if name == "local" and is_given:
            raise UsageError(f"{flag} is Spark's, and --engine local runs without it. Leave one of them out.")
    return options_of(EngineOptions(cast("EngineChoice", name), master, ship=not no_ship))
