"""Render the answer of a command: as prose and tables within 80 columns, or as JSON.

A command returns an `Answer`: a value for programs, and blocks for people. Nothing else prints an answer. Messages
before the answer go to standard error as a `note`.
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

from eventjet.errors import UsageError
from eventjet.observability import logs
from eventjet.text import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ANSWER_IS_NO = 1
"""Exit status of a command whose answer is no, or that could not finish its work; `main` documents the others."""
UNREACHABLE = 3
"""Exit status of a command that could not reach a component."""
INTERRUPTED = 130
"""Exit status of a command that a signal ended."""
WIDTH_MAX = 80
"""Columns at which prose is wrapped, on wider terminals too."""
_FOLDED_MIN, _CUT_MIN = 10, 6
"""Least widths, in characters, of the first and the last column of a table on a narrow terminal."""
_ID_MAX = 36
"""The longest text, a UUID, that is never broken in the first column, so that it can be copied."""
_SECOND = "\0"

_is_json_log = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is wrapped to the terminal's width; numbers are right-aligned, and None is a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Collection[str] = ()
    """Names of text columns that are right-aligned and never broken; with any, the last column may be cut."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Labels, each with a text beside it that is wrapped."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that are printed unwrapped, such as a command to copy or a traceback."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Note:
    """Prose for standard error."""

    text: str


Block: TypeAlias = str | Table | Fields | Lines | Note
"""A part of an answer for people; a string is prose, wrapped at 80 columns."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a command, for programs and for people."""

    value: object
    """The answer for programs, printed as JSON; a dataclass becomes an object of its fields."""
    shown: Block | Iterable[Block]
    """The answer for people."""
    ok: bool = True
    """Whether the exit status is 0; it is 1 otherwise."""

    def give(self, *, as_json: bool) -> None:
        """Print the answer on standard output; where it is not `ok`, end the command with exit status 1."""
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
    """Print a message that is not the answer on standard error, as prose or, in a JSON log, as one of its lines."""
    if _is_json_log:
        logs.NOTE.log(logging.getLogger("eventjet.cli"), text=" ".join(text.split()))
        return
    with suppress(OSError):  # the terminal may have been closed
        print(wrapped(text), file=sys.stderr, flush=True)


def confirm(question: str, *, yes: bool, otherwise: str) -> None:
    """Ask a question on standard error, unless `yes`; a refusal prints `otherwise` and ends with exit status 1.

    Raises `UsageError` where nobody can answer.
    """
    try:
        if yes or typer.confirm(question, err=True):
            return
    except typer.Abort as error:
        print(file=sys.stderr)  # behind the question
        if not isinstance(error.__context__, EOFError):
            raise
        raise UsageError(
            f"Nobody has answered: standard input has ended. {otherwise} Give --yes to go ahead."
        ) from None
    note(otherwise)
    raise typer.Exit(ANSWER_IS_NO)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print one JSON document and flush it; with `indent` None it is one line."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    # A lone surrogate cannot be encoded as UTF-8, so it is escaped as in JSON.
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)


def _plain(value: Any) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def rich_table(table: Table, width: int) -> RichTable:
    """Return a table for rich; with right-aligned columns and too little room, the last column is cut.

    If that is not enough, the first column is folded over several lines.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    columns, rows = table.columns, [[_cell(cell) for cell in row] for row in table.rows]
    if not table.right:
        laid_out = RichTable(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], int | float) for row in table.rows)
            is_id = index == 0 and width >= WIDTH_MAX and max([len(row[0]) for row in rows], default=0) <= _ID_MAX
            justify = "right" if numeric else "left"
            laid_out.add_column(column, justify=justify, overflow="fold", no_wrap=is_id)
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
    """Wrap each line of a text at 80 columns or the terminal's width; list items (`  - `) get a hanging indent."""
    width = min(WIDTH_MAX, terminal_width())
    return "\n".join(
        filled(line, width, indent="    " if line.startswith("  - ") else "", break_words=False)
        for line in text.splitlines()
    )


def filled(text: str, width: int, *, indent: str = "", first: str = "", break_words: bool = True) -> str:
    """Wrap text to lines of `width` terminal columns, counting two for wide characters; `first` indents line one."""
    visible = printable(text)
    # textwrap counts characters, so each wide one is followed by a placeholder for its second column.
    spread = visible if visible.isascii() else "".join(char + _SECOND * (columns_of(char) - 1) for char in visible)
    lines = textwrap.fill(
        spread,
        width - (len(spread) > len(visible)),
        initial_indent=first,
        subsequent_indent=indent,
        replace_whitespace=False,
        break_long_words=break_words,
        break_on_hyphens=False,
    )
    return lines.replace(_SECOND, "")


def columns_of(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def terminal_width() -> int:
    """Return the width of the terminal in columns; 80 where there is none."""
    return shutil.get_terminal_size((WIDTH_MAX, 24)).columns


class LogFormat(StrEnum):
    """Formats of the log that long-running commands write."""

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
    """Log to standard error, eventjet from INFO on, libraries from WARNING on; in JSON, `note` writes there too."""
    global _is_json_log  # noqa: PLW0603 - standard error is one, too
    _is_json_log = how is LogFormat.JSON
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(logs.JsonLines() if _is_json_log else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("eventjet").setLevel(logging.INFO)


class _Notes(logging.Handler):
    """A handler that prints what is logged as prose that fits the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.exc_info:
            print(text, file=sys.stderr, flush=True)  # a traceback has lines of its own
        else:
            note(text)


def leave_out_of_notes(*events: logs.LogEvent) -> None:
    """Print no notes of these kinds: the answer of the command says the same."""
    names = {event.name for event in events}
    if logging.lastResort is not None:
        logging.lastResort.addFilter(lambda record: getattr(record, "event", None) not in names)


def warn_in_notes() -> None:
    """Print warnings as notes where no log is set up. `logging` itself would print each as one long line."""
    logging.lastResort = _Notes(logging.WARNING)
