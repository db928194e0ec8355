"""`eventjet doctor`: everything that an event store needs, looked at; what each fault costs, and what mends it."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.target import AppTarget, JsonOption, MonitoringOption, on_app
from eventjet.cli.terminal import ANSWER_IS_NO, UNREACHABLE, WIDTH_MAX, filled, print_json, say, terminal_width
from eventjet.shown import counted

if TYPE_CHECKING:
    from eventjet.doctor.runner import Examined
    from eventjet.findings import Finding

_INDENT = 14
"""Columns before what a finding says: two, and the longest level."""


@on_app()
def doctor(
    at: AppTarget,
    json: JsonOption = False,
    monitoring: MonitoringOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Warnings, and what cannot be known, count as faults.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long all of it may take.")
    ] = 15.0,
) -> None:
    """Look at servers, streams, database and app, and say what each fault costs and what mends it. Changes nothing.

    Exit status 1 when something is a fault, and 3 when a component does not answer; the rest is looked at all the same.
    """
    from eventjet.doctor.diagnosis import Installation
    from eventjet.doctor.monitoring import monitoring_url
    from eventjet.doctor.runner import examine

    urls = tuple(dict.fromkeys(monitoring_url(url) for url in monitoring or []))
    examined = examine(Installation(at.app(), at.settings, urls, timeout, time.time))
    status = _status(examined, strict=strict)
    if json:
        counts = {str(level): number for level, number in examined.counts.items()}
        value = {"app": examined.app, "status": status, "counts": counts, "found": examined.found}
        print_json({**value, "left_out": examined.left_out})
    else:
        _print(examined)
    if examined.own_fault is not None:
        raise examined.own_fault
    raise typer.Exit(status)


def _status(examined: Examined, *, strict: bool) -> int:
    """3 comes before 1: what was not seen may be worse than what was."""
    from eventjet.findings import Level

    counts = examined.counts
    if counts[Level.UNREACHABLE]:
        return UNREACHABLE
    bad = counts[Level.FAULT] + (counts[Level.WARNING] + counts[Level.UNKNOWN] if strict else 0)
    return ANSWER_IS_NO if bad else 0


def _print(examined: Examined) -> None:
    from eventjet.findings import Level

    for part, found in groupby(examined.found, lambda one: one.part):
        print(part)
        for one in found:
            print(_shown(one))
    if examined.left_out:
        say(f"{counted(examined.left_out, 'more line')} of the same kinds are not shown.")
    counts = examined.counts
    nouns = (Level.FAULT, Level.WARNING, Level.NOTE)
    told = [
        counted(counts[level], level) if level in nouns else f"{counts[level]} {level}"
        for level in reversed(Level)
        if counts[level]
    ]
    say(f"{examined.app}: {', '.join(told)}.")


def _shown(one: Finding) -> str:
    """Each line within the terminal; what it costs and what mends it below."""
    width = min(WIDTH_MAX, terminal_width())
    told = ((f"  {one.level:<{_INDENT - 3}} ", one.what), ("costs", one.cost), ("fix", one.fix))
    lines: list[str] = []
    for number, (label, text) in enumerate(told):
        before = f"{'':{_INDENT}}{label:<6}" if number else label
        # What mends it may be copied, so its words stay whole.
        whole = label == "fix"
        shown = filled(" ".join(text.split()), width, first=before, indent=" " * len(before), break_words=not whole)
        lines += [shown] if text else []
    return "\n".join(lines)
