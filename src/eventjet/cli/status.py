"""The commands `eventjet status` and `doctor`: the state of subscriptions, and of the whole installation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.output import (
    ANSWER_IS_NO,
    UNREACHABLE,
    WIDTH_MAX,
    Answer,
    Block,
    Lines,
    Table,
    filled,
    note,
    print_json,
    rich_table,
    show,
    terminal_width,
)
from eventjet.cli.target import AppTarget, JsonOption, MonitoringOption, on_app, option, switch
from eventjet.errors import EventjetError, UsageError
from eventjet.runtime import run_async
from eventjet.text import counted, duration

if TYPE_CHECKING:
    from eventjet.doctor.examine import Examined
    from eventjet.doctor.report import Finding
    from eventjet.subscriptions.work_status import WorkStatus

PROJECTION = "projection"
_COLUMNS = (PROJECTION, "rev", "state", "position", "lag", "behind", "rate", "ETA", "worker")
_NUMBERS = ("rev", "position", "lag", "behind", "rate", "ETA")
_FLOWING = ("lag_s", "events_per_s", "lag_per_s", "eta_s", "lost_s")
"""Fields that change all the time: a watch that prints lines prints none for a change in these alone."""
_INDENT = 14
"""Columns before the text of a finding: an indent of two, and the longest level."""


@on_app()
def status(
    at: AppTarget,
    json: JsonOption = False,
    watch: Annotated[bool, switch("--watch", "Go on looking until Ctrl-C.")] = False,
    interval: Annotated[
        float | None, option("--interval", "SECONDS", "Between two looks of --watch; default: 2.", min=0.1, max=86_400)
    ] = None,
) -> None:
    """Show state, position, lag, pace, time left and worker of each projection, reactor and process.

    The state is a word, the same that doctor and the console use: working, falling behind, no worker, stopped. Where
    one lags, its pace is measured for a second. With --watch the table stays and is kept current; where the output is
    no terminal, a line is printed for each change instead.
    """
    from eventjet.subscriptions.status import status as read_status

    if interval is not None and not watch:
        raise UsageError("--interval is the time between two looks of --watch. Give --watch too.")
    if watch:
        run_async(_watch(at, 2.0 if interval is None else interval, as_json=json))
    else:
        statuses = run_async(read_status(at.app(), at.settings, pause_s=1.0))
        Answer([*map(_value, statuses)], status_blocks(at.app().name, statuses)).give(as_json=json)


def status_blocks(app: str, statuses: Sequence[WorkStatus]) -> Iterator[Block]:
    """Yield the blocks that show the statuses of an app's subscriptions."""
    if not statuses:
        yield (
            f"The app {app!r} declares nothing that could be looked at: no projections, reactors, processes, "
            "publications or inboxes. List them in its App."
        )
        return
    yield status_table(statuses)
    yield from remarks_on(statuses)


def status_table(statuses: Sequence[WorkStatus]) -> Table:
    """Return the table with a row for each subscription."""
    columns = _COLUMNS if all(status.kind == PROJECTION for status in statuses) else ("name", *_COLUMNS[1:])
    return Table(columns, [_row(status) for status in statuses], right=_NUMBERS)


def _value(status: WorkStatus) -> dict[str, Any]:
    """Return a status as a value for JSON, with its condition."""
    return {**asdict(status), "condition": status.condition.word}


def _row(status: WorkStatus) -> tuple[object, ...]:
    rate = None if status.events_per_s is None else f"{status.events_per_s:,.0f}/s"
    name = status.name if status.kind == PROJECTION else f"{status.kind} {status.name}"
    behind, remaining = duration(status.lag_s), duration(status.eta_s)
    revision, numbers = str(status.revision), (status.position, status.lag_events)
    return (name, revision, status.condition.word, *numbers, behind, rate, remaining, status.owner or None)


def remarks_on(statuses: Sequence[WorkStatus]) -> list[str]:
    """Return the remarks that have no column in the table, one line each."""
    from eventjet.subscriptions.work_status import labels

    pairs = zip(labels(statuses), statuses, strict=True)
    return [f"{label}: {remark}" for label, status in pairs for remark in status.remarks()]


async def _watch(at: AppTarget, interval_s: float, *, as_json: bool) -> None:
    from eventjet.subscriptions.status import watched

    statuses: Sequence[WorkStatus] = ()
    with _changes(as_json) if as_json or not sys.stdout.isatty() else _screen() as update:
        async with aclosing(watched(at.app(), at.settings, interval_s)) as answers:
            async for answer in answers:
                if isinstance(answer, EventjetError):
                    update(statuses, str(answer))
                else:
                    statuses = answer
                    update(statuses, "")
                    if not statuses:
                        break  # nothing that could change
    if not statuses:
        Answer([], status_blocks(at.app().name, ())).give(as_json=as_json)


@contextmanager
def _screen() -> Generator[Callable[[Sequence[WorkStatus], str], None]]:
    """Show one table on a terminal, and update it in place; below an old one, why there is none that is newer."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console, read_at = Console(highlight=False), datetime.now(UTC)
    with Live(console=console, auto_refresh=False) as live:

        def update(statuses: Sequence[WorkStatus], fault: str) -> None:
            nonlocal read_at
            read_at = read_at if fault else datetime.now(UTC)
            remarks = [*remarks_on(statuses), *([f"As it was at {read_at:%H:%M:%SZ}. {fault}"] if fault else ())]
            live.update(Group(rich_table(status_table(statuses), console.width), *map(Text, remarks)), refresh=True)

        yield update


@contextmanager
def _changes(as_json: bool) -> Generator[Callable[[Sequence[WorkStatus], str], None]]:
    """Print a line for each subscription that changed: `name=balances revision=1 …`, or a JSON object."""
    printed: dict[tuple[str, int], dict[str, Any]] = {}
    noted = ""

    def update(statuses: Sequence[WorkStatus], fault: str) -> None:
        nonlocal noted
        if fault and fault != noted:
            note(fault)
        noted = fault
        for status in statuses:
            values = _value(status)
            lasting = {key: value for key, value in values.items() if key not in _FLOWING}
            if printed.get((status.name, status.revision)) != lasting:
                printed[status.name, status.revision] = lasting
                if as_json:
                    print_json(values, indent=None)
                else:
                    print(_line(values), flush=True)

    yield update


def _line(values: dict[str, Any]) -> str:
    """Return `key=value` pairs; a value with blanks is quoted as in JSON, and None is left out."""
    pairs: list[str] = []
    for key, value in values.items():
        if isinstance(value, float):
            value = round(value, 3)
        if isinstance(value, bool):
            value = str(value).lower()
        text = str(value)
        if value is not None:
            plain = text.isprintable() and not any(char in text for char in ' "=')
            pairs.append(f"{key}={text if plain and text else dumps(text)}")
    return " ".join(pairs)


@on_app()
def doctor(
    at: AppTarget,
    json: JsonOption = False,
    monitoring: MonitoringOption = None,
    strict: Annotated[bool, switch("--strict", "Warnings, and what cannot be known, count as faults.")] = False,
    timeout: Annotated[float, option("--timeout", "SECONDS", "How long all of it may take.", min=1, max=3600)] = 15.0,
) -> None:
    """Look at servers, streams, database and app, and say what each fault costs and what mends it. Changes nothing.

    Exit status 1 when something is a fault, and 3 when a component does not answer; the rest is looked at all the same.
    """
    from eventjet.doctor.examine import examine
    from eventjet.doctor.report import Installation
    from eventjet.doctor.server import monitoring_url

    urls = tuple(dict.fromkeys(monitoring_url(url) for url in monitoring or []))
    examined = examine(Installation(at.app(), at.settings, urls, timeout, time.time))
    ends_with = _status(examined, strict=strict)
    if json:
        counts = {str(level): number for level, number in examined.counts.items()}
        value = {"app": examined.app, "status": ends_with, "counts": counts, "found": examined.findings}
        print_json({**value, "left_out": examined.left_out})
    else:
        show(doctor_blocks(examined))
    if examined.own_fault is not None:
        raise examined.own_fault
    raise typer.Exit(ends_with)


def _status(examined: Examined, *, strict: bool) -> int:
    """Return the exit status; 3 comes before 1, since what could not be checked may be worse than any fault."""
    from eventjet.doctor.report import Level

    counts = examined.counts
    if counts[Level.UNREACHABLE]:
        return UNREACHABLE
    faults = counts[Level.FAULT] + (counts[Level.WARNING] + counts[Level.UNKNOWN] if strict else 0)
    return ANSWER_IS_NO if faults else 0


def doctor_blocks(examined: Examined) -> Iterator[Block]:
    """Yield the blocks that show the findings of an examination."""
    from eventjet.doctor.report import Level

    for part, findings in groupby(examined.findings, lambda finding: finding.part):
        yield Lines([part, *(line for finding in findings for line in _finding_lines(finding))])
    if examined.left_out:
        yield f"{counted(examined.left_out, 'more line')} of the same kinds are not shown."
    counts, nouns = examined.counts, (Level.FAULT, Level.WARNING, Level.NOTE)
    totals = [
        counted(counts[level], level) if level in nouns else f"{counts[level]} {level}"
        for level in reversed(Level)
        if counts[level]
    ]
    yield f"{examined.app}: {', '.join(totals)}."


def _finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding within the terminal's width, with its cost and its fix below."""
    width = min(WIDTH_MAX, terminal_width())
    texts = ((f"  {finding.level:<{_INDENT - 3}} ", finding.what), ("costs", finding.cost), ("fix", finding.fix))
    for number, (label, text) in enumerate(texts):
        first = f"{'':{_INDENT}}{label:<6}" if number else label
        # People copy commands from a fix, so its words are never broken.
        is_fix = label == "fix"
        if text:
            lines = filled(" ".join(text.split()), width, first=first, indent=" " * len(first), break_words=not is_fix)
            yield from lines.splitlines()
