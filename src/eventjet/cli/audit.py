"""`eventjet audit`: the whole log walked, beside an archive when there is one, and everything told that is wrong."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.rebuild import MasterOption
from eventjet.cli.running import finished
from eventjet.cli.target import AppTarget, on_app
from eventjet.cli.terminal import Answer, say
from eventjet.shown import counted

if TYPE_CHECKING:
    from eventjet.rebuild import AuditReport, LogFinding, Place


@on_app(database=False)
def audit(
    at: AppTarget,
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="URL", help="Compare with an archive, and say what it has that is gone."),
    ] = None,
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", min=0, help="Findings of each kind to show; all are counted.")
    ] = 5,
    master: MasterOption = None,
) -> Answer:
    """Walk the whole log, and tell what is missing, broken, unreadable or not where it belongs; then exit status 1.

    Only reads, so everything else goes on meanwhile.
    """
    from eventjet.rebuild import EngineOptions
    from eventjet.rebuild import audit as walk

    at.app()  # A fault in it is best told before anything starts.
    work = partial(walk, at.ref, at.settings, archive=archive, engine=EngineOptions(master=master), examples=examples)
    report = finished("Nothing was changed.", work)
    claims = any(info.unique for info in at.app().aggregates.values())

    def show() -> None:
        _print(report)
        if claims:
            say("`eventjet unique check` compares the claims of unique values with the states that they are of.")

    return Answer(_as_json(report), show, ok=report.sound)


def _as_json(report: AuditReport) -> dict[str, Any]:
    findings = [
        {**asdict(one), "level": one.finding.level, "what": one.finding.what, "cost": one.finding.cost}
        | {"fix": one.finding.fix}
        for one in report.findings
    ]
    return {**asdict(report), "sound": report.sound, "findings": findings}


def _print(report: AuditReport) -> None:
    judged = "is sound" if report.sound else "is NOT sound"
    there = f"{counted(report.events, 'event')} of {counted(report.aggregates, 'aggregate')}"
    say(f"{report.stream} {judged}: {there} up to position {report.last:,}, log {report.log}")
    held = report.archive
    if held is not None:
        say(
            f"The archive {held.url} holds positions {held.first:,} to {held.last:,}: "
            f"{held.compared:,} were compared with the log."
        )
    if report.accepted:
        said = "eventjet init --accept-loss"
        more = "" if report.may_be_missing else ", and more are"
        say(f"{counted(report.accepted, 'event')} may be missing, as somebody has said with `{said}`{more}.")
    for one in report.findings:
        _print_finding(one)
    seconds = report.seconds["read"]
    pace = f" ({report.events / seconds:,.0f} events/s)" if seconds else ""
    space = "\n" if report.findings else ""
    say(f"{space}read in {seconds:.1f} s{pace}")


def _print_finding(of_kind: LogFinding) -> None:
    finding = of_kind.finding
    positions = "" if of_kind.positions == of_kind.count else f", {counted(of_kind.positions, 'event')}"
    say(f"\n{finding.what}: {counted(of_kind.count, 'finding')}{positions}")
    for place in of_kind.examples:
        say(f"  - {_where(place)}{place.what}")
    if of_kind.count > len(of_kind.examples):
        say(f"  - and {of_kind.count - len(of_kind.examples):,} more; --examples N shows N of them")
    say(f"What it costs: {finding.cost}")
    say(f"The way out: {finding.fix}")


def _where(place: Place) -> str:
    if not place.first:
        return ""
    run = str(place.first) if place.first == place.last else f"{place.first} to {place.last}"
    return f"{run} {place.subject}: " if place.subject else f"{run}: "
