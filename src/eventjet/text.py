"""Format values and texts for messages: truncation, counts, lists, durations, suggestions for wrong names. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, cast

TEXT_MAX = 500
"""Characters of a text, such as a reason, before it is cut."""
VALUE_MAX = 300
"""Characters of one value in a list, before it is cut."""
_YEAR_S = 365 * 86_400
_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s"))


def cut(text: str, limit: int = TEXT_MAX) -> str:
    """Return the text, or its beginning and its length if it is too long: `abc… (800,000 characters)`."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return the text with escapes for characters that could control a terminal or begin a new line in a log."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def with_escapes(text: str) -> str:
    """Return the text in a form that every database and JSON takes: NUL and lone surrogates become escapes."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def shown(value: object, limit: int = VALUE_MAX) -> str:
    """Return the `repr` of a value, cut."""
    if isinstance(value, str | bytes) and len(value) > limit:
        kind = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:limit]!r}… ({len(value):,} {kind})"
    return cut(repr(value), limit)


def utc_text(at: datetime, timespec: str = "auto") -> str:
    """Return a time in UTC as text, such as `2026-11-27T08:30:00Z`."""
    return at.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def cut_values(value: Any, limit: int = VALUE_MAX) -> Any:
    """Return a JSON value with every text in it cut."""
    if isinstance(value, str):
        return cut(value, limit)
    if isinstance(value, list):
        return [cut_values(item, limit) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {cut(name, limit): cut_values(item, limit) for name, item in members.items()}
    return value


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def spent(seconds: Mapping[str, float]) -> str:
    """Return the wall time of each phase as text: `read 1.0 s, load 2.5 s`."""
    return ", ".join(f"{phase} {elapsed:.1f} s" for phase, elapsed in seconds.items())


def in_location(location: str) -> str:
    """Describe the location of a revision's tables that are not in the declared location."""
    return f"in tables whose names end in {location}" if location.startswith("__") else f"in the schema {location}"


def duration(seconds: float | None) -> str:
    """Return a duration as `0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h` or `5y`; a dash if it is not known."""
    if seconds is None:
        return "–"
    if 0.05 <= seconds < 9.95:
        return f"{seconds:.1f}s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds >= _YEAR_S:
        return f"{seconds / _YEAR_S:,.0f}y"
    size, unit, part, part_unit = next(units for units in _UNITS if seconds >= units[0])
    return f"{int(seconds // size):,}{unit}{int(seconds % size) // part:02d}{part_unit}"


NAMED_MAX = 10
"""Names that a message lists; further names are only counted."""


def listed(names: Iterable[str], limit: int = NAMED_MAX) -> str:
    """Return names as a list without repetitions: `balances, postings and 3 more`; `none` if there are none."""
    distinct = list(dict.fromkeys(names))
    remaining = len(distinct) - limit
    return (", ".join(distinct[:limit]) or "none") + (f" and {remaining:,} more" if remaining > 0 else "")


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return `Did you mean 'balances'? `, with a blank at its end; empty if no known name is similar."""
    matches = get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f"Did you mean {matches[0]!r}? " if matches else ""
