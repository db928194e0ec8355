"""PURE: how much is shown of a value or a text that others wrote: in listings, logs, spans and reasons of errors."""

from __future__ import annotations

from typing import Any, cast

TEXT_MAX = 500
"""Characters of a text, a reason for instance."""
VALUE_MAX = 300
"""Characters of one value in a listing."""


def cut(text: str, most: int = TEXT_MAX) -> str:
    """The text, or its beginning and how long it is: `abc… (800,000 characters)`."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """The text with what could steer a terminal, or begin a line of a log, made visible."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def shown(value: object, most: int = VALUE_MAX) -> str:
    """A value as Python writes it, cut."""
    if isinstance(value, str | bytes) and len(value) > most:
        kind = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:most]!r}… ({len(value):,} {kind})"
    return cut(repr(value), most)


def cut_values(value: Any, most: int = VALUE_MAX) -> Any:
    """A value of JSON with every text in it cut."""
    if isinstance(value, str):
        return cut(value, most)
    if isinstance(value, list):
        return [cut_values(each, most) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return {cut(name, most): cut_values(each, most) for name, each in named.items()}
    return value
