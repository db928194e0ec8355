"""The one renderer of the command line: what a command returns, as prose and tables within 80 columns or as JSON.

A command returns an `Answer`: a value for programs, and blocks for people. Nothing else prints an answer. What goes on
meanwhile is a `note` on standard error.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from eventjet.observability import logs
from eventjet.text import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ANSWER_IS_NO = 1
"""Exit status of a command that was carried out and found what should not be; `main` has the others."""
UNREACHABLE = 3
"""Exit status of a command that could not reach a component."""
INTERRUPTED = 130
"""Exit status of a command that a signal ended."""
WIDTH_MAX = 80
"""Prose is wrapped here, on wider terminals too."""
_FOLDED_MIN, _CUT_MIN = 10, 6
"""Columns that are left to the first and the last column of a table where room is short."""
_SECOND = "\0"

_is_json_log = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns as wide as needed, wrapped to the terminal. Numbers are set to the right, and None is a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Collection[str] = ()
    """Columns of text that are set to the right, and never broken; then the last one is cut where room is short."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Labels, each with a text that is wrapped beside it."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that are printed as they are, as a command to copy or a traceback."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Note:
    """Prose for standard error."""

    text: str


Block: TypeAlias = str | Table | Fields | Lines | Note
"""What people are shown; text is prose, wrapped at 80 columns."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command came to."""

    value: object
    """For programs, as JSON; a dataclass is an object of its fields."""
    shown: Block | Iterable[Block]
    """For people."""
    ok: bool = True
    """Whether the exit status is 0, else 1."""

    def give(self, *, as_json: bool) -> None:
        """Print it and end with its status."""
        if as_json:
            print_json(self.value)
        else:
            show(self.shown)
        if not self.ok:
            raise typer.Exit(ANSWER_IS_NO)


def show(blocks: Block | Iterable[Block]) -> None:
    """Print blocks on standard output."""
    for block in [blocks] if isinstance(blocks, str | Table | Fields | Lines | Note) else blocks:
        match block:
            case str():
                print(wrapped(block), flush=True)
            case Table():
                from rich.console import Console

                console = Console(highlight=False)
                console.print(rich_table(block, console.width))
            case Fields():
                widest = max([len(label) for label, _ in block.pairs], default=0)
                head = widest + 2 if widest else 0
                for label, text in block.pairs:
                    print(filled(f"{label:<{head}}{text}".rstrip(), terminal_width(), indent=" " * head))
            case Lines():
                print(*map(printable, block.lines), sep="\n", flush=True)
            case Note():
                note(block.text)


def note(text: str) -> None:
    """Print prose on standard error, or a line of the log where that is JSON: what is going on, not the answer."""
    if _is_json_log:
        logs.NOTE.tell(logging.getLogger("eventjet.cli"), text=" ".join(text.split()))
        return
    with suppress(OSError):  # of a terminal that was closed
        print(wrapped(text), file=sys.stderr, flush=True)


def confirm(question: str, *, yes: bool, otherwise: str) -> None:
    """Ask on standard error, unless `yes`; a refusal ends the command with status 1 after saying `otherwise`."""
    if not yes and not typer.confirm(question, err=True):
        note(otherwise)
        raise typer.Exit(ANSWER_IS_NO)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print one JSON document at once, on one line without an indent."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    # Half of a surrogate pair is no text, and its escape is JSON.
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)


def _plain(value: Any) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def rich_table(table: Table, width: int) -> RichTable:
    """Lay a table out: where room is short the last column is cut, then the first goes over several lines."""
    from rich.table import Table as RichTable
    from rich.text import Text

    columns, rows = table.columns, [[_cell(cell) for cell in row] for row in table.rows]
    if not table.right:
        laid_out = RichTable(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], int | float) for row in table.rows)
            laid_out.add_column(column, justify="right" if numeric else "left", overflow="fold")
    else:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        gaps = len(widths) - 1
        room = width - sum(widths[1:-1]) - gaps
        gap = 2 if room - gaps >= _FOLDED_MIN + _CUT_MIN else 1
        room -= gaps * (gap - 1)
        widths[-1] = max(_CUT_MIN, min(widths[-1], room - widths[0]))
        widths[0] = max(_FOLDED_MIN, min(widths[0], room - widths[-1]))
        laid_out = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for index, (column, wide) in enumerate(zip(columns, widths, strict=True)):
            is_last, justify = index == gaps, "right" if column in table.right else "left"
            overflow = "ellipsis" if is_last else "fold"
            laid_out.add_column(column, width=wide, overflow=overflow, no_wrap=is_last, justify=justify)
    for row in rows:
        laid_out.add_row(*map(Text, row))
    return laid_out


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.1f}" if isinstance(value, float) else printable(str(value))


def wrapped(text: str) -> str:
    """Return paragraphs of at most 80 columns; lines that begin with a dash keep their place."""
    width = min(WIDTH_MAX, terminal_width())
    return "\n".join(
        filled(line, width, indent="    " if line.startswith("  - ") else "", break_words=False)
        for line in text.splitlines()
    )


def filled(text: str, width: int, *, indent: str = "", first: str = "", break_words: bool = True) -> str:
    """Return the text in lines of so many columns, of which some characters take two; `first` indents line one."""
    shown = printable(text)
    # Wide characters are followed by what stands for their second column.
    spread = shown if shown.isascii() else "".join(char + _SECOND * (columns_of(char) - 1) for char in shown)
    lines = textwrap.fill(
        spread,
        width - (len(spread) > len(shown)),
        initial_indent=first,
        subsequent_indent=indent,
        replace_whitespace=False,
        break_long_words=break_words,
        break_on_hyphens=False,
    )
    return lines.replace(_SECOND, "")


def columns_of(text: str) -> int:
    """Return how wide it is on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def terminal_width() -> int:
    """Return the columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size((WIDTH_MAX, 24)).columns


class LogFormat(StrEnum):
    """How a command that runs for long writes its log."""

    TEXT = "text"
    JSON = "json"


LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="EVENTJET_LOG_FORMAT",
        help="How the log on standard error is written: a line is text, or JSON.",
    ),
]


def log_format() -> str:
    """Return the format in which this process writes its log."""
    return LogFormat.JSON if _is_json_log else LogFormat.TEXT


def log_to_stderr(how: LogFormat) -> None:
    """Send the log of this process to standard error: eventjet's from INFO on, that of libraries from WARNING on."""
    global _is_json_log  # noqa: PLW0603 - standard error is one, too
    _is_json_log = how is LogFormat.JSON
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(logs.JsonLines() if _is_json_log else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("eventjet").setLevel(logging.INFO)
