"""What commands print: answers on standard output, tables that fit 80 columns, JSON for programs."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from eventjet.observability import logs
from eventjet.shown import printable

_is_json_log = False

ANSWER_IS_NO = 1
"""Exit status of a command that was carried out and found what should not be; `main` has the others."""
UNREACHABLE = 3
"""That of one that could not reach a component."""
INTERRUPTED = 130
"""That of one that was ended by a signal."""
WIDTH_MAX = 80
"""Prose is wrapped here, on wider terminals too."""
_SECOND = "\0"


def say(text: str) -> None:
    """Prose, wrapped."""
    print(wrapped(text), flush=True)


def note(text: str) -> None:
    """Prose on standard error: what is going on, not the answer; a line of the log where that is JSON."""
    if _is_json_log:
        logs.NOTE.tell(logging.getLogger("eventjet.cli"), text=" ".join(text.split()))
        return
    with suppress(OSError):  # of a terminal that was closed
        print(wrapped(text), file=sys.stderr, flush=True)


class LogFormat(StrEnum):
    """How a command that runs for long tells what it does."""

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
    """As this process writes it."""
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


def wrapped(text: str) -> str:
    """The text as paragraphs of at most 80 columns; lines that begin with a dash keep their place."""
    width = min(WIDTH_MAX, terminal_width())
    indents = ("    " if line.startswith("  - ") else "" for line in text.splitlines())
    return "\n".join(
        filled(line, width, indent=indent, break_words=False)
        for line, indent in zip(text.splitlines(), indents, strict=True)
    )


def filled(text: str, width: int, *, indent: str = "", first: str = "", break_words: bool = True) -> str:
    """The text in lines of so many columns, of which some characters take two; `first` indents the first one."""
    shown = printable(text)
    # Wide characters are followed by what stands for their second column.
    spread = shown if shown.isascii() else "".join(char + _SECOND * (columns(char) - 1) for char in shown)
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


def columns(text: str) -> int:
    """How wide it is on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def print_headed(lines: Sequence[str], head: int) -> None:
    """Lines that each begin with a word and blanks, `head` columns in all; the rest is wrapped beside it."""
    for line in lines:
        print(filled(line, terminal_width(), indent=" " * head))


def terminal_width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size((WIDTH_MAX, 24)).columns


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command came to."""

    value: object
    """For programs, as JSON."""
    shown: str | Callable[[], None]
    """For people: prose, or what prints it."""
    ok: bool = True
    """Whether the exit status is 0, else 1."""

    def give(self, *, as_json: bool) -> None:
        """Print it and end with its status."""
        if as_json:
            print_json(self.value)
        elif isinstance(self.shown, str):
            say(self.shown)
        else:
            self.shown()
        if not self.ok:
            raise typer.Exit(ANSWER_IS_NO)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """One JSON document at once, on one line without an indent; a dataclass is an object of its fields."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    # Half of a surrogate pair is no text, and its escape is JSON.
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)


def _plain(value: Any) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


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
