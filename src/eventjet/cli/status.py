"""`eventjet status`: where each read model stands."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.target import AppDirOption, AppOption, DatabaseOption, JsonOption, ServersOption, Target, target

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from eventjet.workers.status import ProjectionStatus

_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s"))


def status(
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on looking until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Between two looks of --watch.")
    ] = 2.0,
    app: AppOption = None,
    app_dir: AppDirOption = None,
    servers: ServersOption = None,
    database: DatabaseOption = None,
) -> None:
    """Show each projection's state, position, lag, pace, time left, and the worker that keeps it.

    Where one lags, its pace is measured for a second. With --watch the table stays and is kept current; where the
    output is no terminal, a line is printed for each change instead.
    """
    from eventjet.cli.terminal import print_json
    from eventjet.workers.status import measured

    at = target(app, app_dir, servers, database)
    if watch:
        asyncio.run(_watch(at, interval, as_json=json))
        return
    found = asyncio.run(measured(at.app(), at.settings))
    if json:
        print_json([asdict(one) for one in found])
    else:
        _print(found)


async def _watch(at: Target, interval_s: float, *, as_json: bool) -> None:
    from eventjet.cli.terminal import note
    from eventjet.errors import EventjetError
    from eventjet.workers.status import watched

    shown = _Lines(as_json=as_json) if as_json or not sys.stdout.isatty() else _Screen()
    fault = ""
    with shown:
        async for found in watched(at.app(), at.settings, interval_s):
            if not isinstance(found, EventjetError):
                fault = ""
                shown.show(found)
            elif str(found) != fault:
                fault = str(found)
                note(fault)


class _Screen:
    """One table on a terminal, kept current."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(highlight=False), auto_refresh=False)

    def show(self, found: Sequence[ProjectionStatus]) -> None:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [_table(found), *map(Text, _remarks(found))]
        self._live.update(Group(*parts), refresh=True)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class _Lines:
    """A line for each projection that changed: `name=balances revision=1 …`, or an object."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._told: dict[tuple[str, int], dict[str, Any]] = {}

    def show(self, found: Sequence[ProjectionStatus]) -> None:
        from eventjet.cli.terminal import print_json_line

        for one in found:
            told = asdict(one)
            if self._told.get((one.name, one.revision)) == told:
                continue
            self._told[one.name, one.revision] = told
            if self._as_json:
                print_json_line(told)
            else:
                print(_line(told), flush=True)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _line(told: dict[str, Any]) -> str:
    """`key=value` pairs; a value with blanks is quoted as in JSON, and what is not known is left out."""
    from json import dumps

    pairs: list[str] = []
    for key, value in told.items():
        if isinstance(value, float):
            value = round(value, 3)
        if isinstance(value, bool):
            value = str(value).lower()
        text = str(value)
        if value is not None:
            plain = text.isprintable() and not any(char in text for char in ' "=')
            pairs.append(f"{key}={text if plain and text else dumps(text)}")
    return " ".join(pairs)


def _print(found: Sequence[ProjectionStatus]) -> None:
    from rich.console import Console

    from eventjet.cli.terminal import say

    if not found:
        say("The app declares no projections.")
        return
    Console(highlight=False).print(_table(found))
    for remark in _remarks(found):
        say(remark)


def _remarks(found: Sequence[ProjectionStatus]) -> list[str]:
    said: list[str] = []
    for one in found:
        if one.reason:
            said.append(f"{one.name}: {one.reason}")
        if not one.declared:
            said.append(
                f"{one.name} revision {one.revision}: the app no longer declares it, so only older workers advance it"
            )
    return said


def _table(found: Sequence[ProjectionStatus]) -> Table:
    """Fits 80 columns: the worker is cut first, then the name goes over several lines."""
    from rich.table import Table
    from rich.text import Text

    from eventjet.cli.failure import printable

    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("projection", overflow="fold", min_width=10)
    for column in ("rev", "state", "position", "lag", "lag s", "rate", "ETA"):
        table.add_column(column, justify="left" if column == "state" else "right", no_wrap=True)
    table.add_column("worker", overflow="ellipsis", no_wrap=True, min_width=6, ratio=1)
    for one in found:
        lag_s = "–" if one.lag_s is None else f"{one.lag_s:,.1f}"
        rate = "–" if one.events_per_s is None else f"{one.events_per_s:,.0f}/s"
        numbers = (f"{one.position:,}", f"{one.lag_events:,}", lag_s, rate, duration(one.eta_s))
        cells = (one.name, str(one.revision), one.state, *numbers, one.owner or "–")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def duration(seconds: float | None) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h`; a dash for what is not known."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f}s" if 0 < seconds < 9.95 else f"{seconds:.0f}s"
    size, unit, part, part_unit = next(one for one in _UNITS if seconds >= one[0])
    return f"{int(seconds // size):,}{unit}{int(seconds % size) // part:02d}{part_unit}"
