"""`eventjet archive`: seal the log's past into Parquet files that rebuilds, restores and analyses read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.interrupts import finished
from eventjet.cli.rebuild import MasterOption
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import counted, print_json, say

if TYPE_CHECKING:
    from eventjet.rebuild import ArchiveReport


@on_app(database=False)
def archive(
    at: AppTarget,
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder, or the URL of any Hadoop file system.")],
    to: Annotated[
        int | None, typer.Option("--to", metavar="POSITION", min=1, help="The last to archive; default: all there is.")
    ] = None,
    segment_events: Annotated[
        int, typer.Option("--segment-events", metavar="N", min=1, help="Events a segment holds at most.")
    ] = 1_000_000,
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Seal what the archive at URL does not have yet into Parquet files, each read back before it counts.

    Stopped at any moment, the next run goes on after the last sealed segment. One run at a time.
    """
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import archive as write

    report = finished(
        "What was sealed stays sealed; the next run goes on after it.",
        lambda progress: write(
            at.ref,
            url,
            at.settings,
            to=to,
            segment_events=segment_events,
            engine=EngineOptions(master=master),
            progress=progress,
        ),
    )
    if json:
        print_json(_as_json(report))
    else:
        _print(report)


def _as_json(report: ArchiveReport) -> dict[str, object]:
    sealed = [
        {
            "first": one.first,
            "last": one.last,
            "events": one.events,
            "files": len(one.files),
            "bytes": sum(file.bytes for file in one.files),
        }
        for one in report.sealed
    ]
    told = {name: getattr(report, name) for name in ("url", "stream", "log", "first", "last", "events")}
    return {**told, "sealed": sealed, "seconds": dict(report.seconds)}


def _print(report: ArchiveReport) -> None:
    if not report.events:
        say(f"The log {report.stream} has no events, so there is nothing to archive.")
        return
    for one in report.sealed:
        size = sum(file.bytes for file in one.files) / 1e6
        files = counted(len(one.files), "file")
        say(f"sealed {one.first:,} to {one.last:,}: {counted(one.events, 'event')} in {files}, {size:,.1f} MB")
    done = "" if report.sealed else "Up to date: "
    say(f"{done}{report.url} holds positions {report.first:,} to {report.last:,} of {report.stream}")
    if report.sealed:
        say("; ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items()))
