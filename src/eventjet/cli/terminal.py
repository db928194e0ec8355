"""What commands print: answers on standard output, tables that fit 80 columns, JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eventjet.cli.failure import WIDTH_MAX, printable, wrapped

if TYPE_CHECKING:
    from eventjet.cli.events import ShownEvent


def say(text: str) -> None:
    """Prose, wrapped."""
    print(wrapped(text), flush=True)


def note(text: str) -> None:
    """Prose on standard error: what is going on, not the answer."""
    print(wrapped(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document, indented."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_json_line(value: Any) -> None:
    """One JSON document on one line, at once."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def print_events(events: Sequence[ShownEvent], *, named: bool) -> None:
    """Events, a line or more each; `named` when they are of several aggregates."""
    width = shutil.get_terminal_size((WIDTH_MAX, 24)).columns
    for event in events:
        print(event.line(width, named=named), flush=True)


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def where(location: str) -> str:
    """Where a revision keeps tables that are not in the declared location."""
    return f"in tables whose names end in {location}" if location.startswith("__") else f"in the schema {location}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as needed, wrapped to the terminal; numbers to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(cell)) for cell in row))
    Console(highlight=False).print(table)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return printable(str(value))
