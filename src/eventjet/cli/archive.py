"""`eventjet archive` and `eventjet restore`: the log's past as Parquet files, written and published again."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.rebuild import MasterOption
from eventjet.cli.running import finished
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, say
from eventjet.shown import counted

if TYPE_CHECKING:
    from eventjet.archive.reading import Segment
    from eventjet.rebuild import ArchiveReport, Restored

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="A folder, or the URL of any Hadoop file system.")]


@on_app(database=False, jvm=True)
def archive(
    at: AppTarget,
    url: UrlArgument,
    to: Annotated[
        int | None, typer.Option("--to", metavar="POSITION", min=1, help="The last to archive; default: all there is.")
    ] = None,
    segment_events: Annotated[
        int, typer.Option("--segment-events", metavar="N", min=1, help="Events a segment holds at most.")
    ] = 1_000_000,
    master: MasterOption = None,
) -> Answer:
    """Seal what the archive at URL does not have yet into Parquet files, each read back before it counts.

    Stopped at any moment, the next run goes on after the last sealed segment. One run at a time.
    """
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import archive as write

    work = partial(
        write, at.ref, url, at.settings, to=to, segment_events=segment_events, engine=EngineOptions(master=master)
    )
    report = finished("What was sealed stays sealed; the next run goes on after it.", work)
    value = {**asdict(report), "sealed": [_as_json(segment) for segment in report.sealed]}
    return Answer(value, lambda: _print_archived(report))


def _as_json(segment: Segment) -> dict[str, int]:
    told = {"first": segment.first, "last": segment.last, "events": segment.events}
    return {**told, "files": len(segment.files), "bytes": _size(segment)}


def _size(segment: Segment) -> int:
    return sum(file.bytes for file in segment.files)


def _print_archived(report: ArchiveReport) -> None:
    if not report.events:
        say(f"The log {report.stream} has no events, so there is nothing to archive.")
        return
    for segment in report.sealed:
        events, files = counted(segment.events, "event"), counted(len(segment.files), "file")
        say(f"sealed {segment.first:,} to {segment.last:,}: {events} in {files}, {_size(segment) / 1e6:,.1f} MB")
    done = "" if report.sealed else "Up to date: "
    say(f"{done}{report.url} holds positions {report.first:,} to {report.last:,} of {report.stream}")
    if report.sealed:
        say("; ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items()))


@on_app(database=False, jvm=True)
def restore(at: AppTarget, url: UrlArgument, master: MasterOption = None) -> Answer:
    """Publish an archive into an empty stream: the same events at the same positions, so that read models go on.

    Stop what works on the app's log first. Run it again after Ctrl-C or a fault, and it goes on where it ended.
    """
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import restore as publish

    at.app()  # A fault in it is best told before anything starts.
    report = finished(
        "What was restored stays; run it again and it goes on there.",
        partial(publish, at.ref, url, at.settings, engine=EngineOptions(master=master)),
    )
    return Answer(report, lambda: _print_restored(report))


def _print_restored(report: Restored) -> None:
    events = counted(report.events, "event")
    say(f"{report.stream} is restored: {events} at positions {report.first:,} to {report.last:,}, log {report.log}")
    before = report.events - report.published
    if before:
        say(f"{counted(before, 'event')} of them were there before.")
    seconds = report.seconds["publish"]
    pace = f" ({report.published / seconds:,.0f} events/s)" if report.published and seconds else ""
    say(f"published in {seconds:.1f} s{pace}, compared with the archive in {report.seconds['compare']:.1f} s")
