"""What a failed command says and how it exits: one paragraph on standard error, never a traceback unless asked for.

0 done · 1 the answer is no, or the work could not be finished · 2 wrong usage · 3 a component is unreachable ·
70 a fault of eventjet's own · 130 interrupted.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import traceback
from typing import cast

from eventjet.errors import (
    DefinitionError,
    EventjetError,
    Forbidden,
    RebuildRefused,
    Refused,
    StoreUnavailable,
    Unreachable,
    UsageError,
)

DONE = 0
ANSWER_IS_NO = 1
WRONG_USAGE = 2
UNREACHABLE = 3
OWN_FAULT = 70
INTERRUPTED = 130

WIDTH_MAX = 80
"""Prose is wrapped here, on wider terminals too."""

_STATUS: tuple[tuple[type[EventjetError], int], ...] = (
    (UsageError, WRONG_USAGE),
    (DefinitionError, WRONG_USAGE),
    (RebuildRefused, WRONG_USAGE),
    (Refused, WRONG_USAGE),
    (Unreachable, UNREACHABLE),
    (StoreUnavailable, UNREACHABLE),
    (Forbidden, UNREACHABLE),
)


def report(error: BaseException, *, debug: bool) -> int:
    """Say what happened on standard error; returns the exit status."""
    cause = _first_of(error)
    if debug:
        traceback.print_exception(error)
    sys.stderr.write(wrapped(f"eventjet: {_message(cause)}") + "\n")
    return exit_status(cause)


def exit_status(error: BaseException) -> int:
    """The status a command ends with when this is what stopped it."""
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    if isinstance(error, EventjetError):
        return ANSWER_IS_NO
    return WRONG_USAGE if _is_usage(error) else OWN_FAULT


def wrapped(text: str) -> str:
    """The text as paragraphs of at most 80 columns; lines that begin with a dash keep their place."""
    width = min(WIDTH_MAX, shutil.get_terminal_size((WIDTH_MAX, 24)).columns)
    lines = [
        textwrap.fill(
            printable(line),
            width,
            subsequent_indent="    " if line.startswith("  - ") else "",
            drop_whitespace=True,
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text with what could steer a terminal made visible."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def _message(error: BaseException) -> str:
    if isinstance(error, DefinitionError):
        return f"{error}\nFix them and try again."
    if isinstance(error, EventjetError):
        return " ".join(str(error).split())
    if _is_usage(error):
        text = str(error.format_message())  # type: ignore[attr-defined]  known by its name only
        text = text if text.endswith((".", "?")) else f"{text}."
        return f"{text} See `eventjet --help`, or `--help` after the command."
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": .")
    return (
        f"This is a fault of eventjet's own, not of what you typed ({said}). "
        "Run it again with --debug, and report the traceback that it prints."
    )


def _is_usage(error: BaseException) -> bool:
    """Typer's own exceptions, wherever its version keeps them."""
    return hasattr(error, "format_message")


def _first_of(error: BaseException) -> BaseException:
    """What a group of errors is about: the first of eventjet's own in it, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    leaves = [_first_of(one) for one in group.exceptions]
    return next((one for one in leaves if isinstance(one, EventjetError)), leaves[0])
