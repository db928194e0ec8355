"""`eventjet status`: where each read model stands."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import Answer, note, print_json, say
from eventjet.shown import counted, duration, in_location, printable

if TYPE_CHECKING:
    from rich.table import Table

    from eventjet.subscriptions.status import WorkStatus

PROJECTION = "projection"
_COLUMNS = (PROJECTION, "rev", "state", "position", "lag", "behind", "rate", "ETA", "worker")
_NAME_MIN, _WORKER_MIN = 10, 6
_FLOWING = ("lag_s", "events_per_s", "eta_s", "lost_s")
"""What differs between any two looks; a line of its own is for what changed besides."""


@on_app()
def status(
    at: AppTarget,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on looking until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Between two looks of --watch.")
    ] = 2.0,
) -> None:
    """Show state, position, lag, pace, time left and worker of each projection, reactor and process.

    Where one lags, its pace is measured for a second. With --watch the table stays and is kept current; where the
    output is no terminal, a line is printed for each change instead.
    """
    from eventjet.subscriptions.status import status as read_status

    if watch:
        asyncio.run(_watch(at, interval, as_json=json))
    else:
        statuses = asyncio.run(read_status(at.app(), at.settings, pause_s=1.0))
        Answer(statuses, lambda: _print(at.app().name, statuses)).give(as_json=json)


async def _watch(at: AppTarget, interval_s: float, *, as_json: bool) -> None:
    from eventjet.errors import EventjetError
    from eventjet.subscriptions.status import watched

    fault = ""
    with _changes(as_json) if as_json or not sys.stdout.isatty() else _screen() as show:
        async for seen in watched(at.app(), at.settings, interval_s):
            if not isinstance(seen, EventjetError):
                fault = ""
                show(seen)
            elif str(seen) != fault:
                fault = str(seen)
                note(fault)


@contextmanager
def _screen() -> Generator[Callable[[Sequence[WorkStatus]], None]]:
    """One table on a terminal, kept current."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:

        def show(statuses: Sequence[WorkStatus]) -> None:
            remarks = map(Text, remarks_on(statuses))
            live.update(Group(table_of(statuses, console.width), *remarks), refresh=True)

        yield show


@contextmanager
def _changes(as_json: bool) -> Generator[Callable[[Sequence[WorkStatus]], None]]:
    """A line for each projection that changed: `name=balances revision=1 …`, or an object of JSON."""
    printed: dict[tuple[str, int], dict[str, Any]] = {}

    def show(statuses: Sequence[WorkStatus]) -> None:
        for status in statuses:
            values = asdict(status)
            lasting = {key: value for key, value in values.items() if key not in _FLOWING}
            if printed.get((status.name, status.revision)) != lasting:
                printed[status.name, status.revision] = lasting
                if as_json:
                    print_json(values, indent=None)
                else:
                    print(_line(values), flush=True)

    yield show


def _line(values: dict[str, Any]) -> str:
    """`key=value` pairs; a value with blanks is quoted as in JSON, and what is not known is left out."""
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


def _print(app: str, statuses: Sequence[WorkStatus]) -> None:
    from rich.console import Console

    if not statuses:
        say(
            f"The app {app!r} declares nothing that could be looked at: no projections, reactors, processes, "
            "publications or inboxes. List them in its App."
        )
        return
    console = Console(highlight=False)
    console.print(table_of(statuses, console.width))
    for remark in remarks_on(statuses):
        say(remark)


def remarks_on(statuses: Sequence[WorkStatus]) -> list[str]:
    """What the table has no column for, a line each."""
    from eventjet.sql.checkpoint import RETIRED

    remarks: list[str] = []
    revisions = Counter(one.name for one in statuses)
    for one in statuses:
        name = f"{one.name} revision {one.revision}" if revisions[one.name] > 1 else one.name
        if one.parked:
            parked = counted(one.parked, "event")
            remarks.append(f"{name}: {parked} parked; see `eventjet quarantine list {one.name}`")
        if one.reason:
            remarks.append(f"{name}: {one.reason}")
        if one.lost_owner:
            silent = "since the database's clock was set back" if one.lost_s is None else f"for {duration(one.lost_s)}"
            remarks.append(f"{name}: its worker {one.lost_owner} has not been seen {silent}; none has taken over yet")
        if one.location:
            remarks.append(f"{name}: its rows are aside, {in_location(one.location)}, and not what readers see")
        if one.state == RETIRED:
            remarks.append(f"{name}: its tables were dropped, and nothing is left of it but this line")
        elif not one.declared:
            drop = f"db unused --drop {one.name}:{one.revision}"
            drop = drop if one.kind == PROJECTION else f"cursor drop {one.name}"
            unworked = "the app does not declare it, so only workers with other code advance it"
            remarks.append(f"{name}: {unworked}; `eventjet {drop}` removes it")
    return remarks


def table_of(statuses: Sequence[WorkStatus], width: int) -> Table:
    """Fits the width: the worker is cut first, then the name goes over several lines."""
    from rich.table import Table
    from rich.text import Text

    rows = [[printable(cell) for cell in _cells(one)] for one in statuses]
    columns = _COLUMNS if all(one.kind == PROJECTION for one in statuses) else ("name", *_COLUMNS[1:])
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    gaps = len(widths) - 1
    room = width - sum(widths[1:-1]) - gaps
    gap = 2 if room - gaps >= _NAME_MIN + _WORKER_MIN else 1
    room -= gaps * (gap - 1)
    widths[-1] = max(_WORKER_MIN, min(widths[-1], room - widths[0]))
    widths[0] = max(_NAME_MIN, min(widths[0], room - widths[-1]))
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column, wide in zip(columns, widths, strict=True):
        text = column in (columns[0], "state", "worker")
        overflow = "ellipsis" if column == "worker" else "fold"
        table.add_column(
            column, width=wide, overflow=overflow, no_wrap=column == "worker", justify="left" if text else "right"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _cells(one: WorkStatus) -> tuple[str, ...]:
    rate = "–" if one.events_per_s is None else f"{one.events_per_s:,.0f}/s"
    numbers = (f"{one.position:,}", f"{one.lag_events:,}", duration(one.lag_s), rate, duration(one.eta_s))
    name = one.name if one.kind == PROJECTION else f"{one.kind} {one.name}"
    return (name, str(one.revision), one.state, *numbers, one.owner or "–")
