"""`eventjet restore`: publish an archive into an empty stream."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.interrupts import finished
from eventjet.cli.rebuild import MasterOption
from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import counted, print_json, say

if TYPE_CHECKING:
    from eventjet.rebuild import Restored


@on_app(database=False)
def restore(
    at: AppTarget,
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder, or the URL of any Hadoop file system.")],
    master: MasterOption = None,
    json: JsonOption = False,
) -> None:
    """Publish an archive into an empty stream: the same events at the same positions, so that read models go on.

    Stop what works on the app's log first. Run it again after Ctrl-C or a fault, and it goes on where it ended.
    """
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import restore as publish

    at.app()  # Told best before anything starts, if it cannot be imported.
    report = finished(
        "What was restored stays; run it again and it goes on there.",
        lambda progress: publish(at.ref, url, at.settings, engine=EngineOptions(master=master), progress=progress),
    )
    if json:
        print_json({**asdict(report), "seconds": dict(report.seconds)})
    else:
        _print(report)


def _print(report: Restored) -> None:
    say(
        f"{report.stream} is restored: {counted(report.events, 'event')} at positions {report.first:,} to "
        f"{report.last:,}, log {report.log}"
    )
    before = report.events - report.published
    if before:
        say(f"{counted(before, 'event')} of them were there before.")
    seconds = report.seconds["publish"]
    pace = f" ({report.published / seconds:,.0f} events/s)" if report.published and seconds else ""
    say(f"published in {seconds:.1f} s{pace}, compared with the archive in {report.seconds['compare']:.1f} s")
