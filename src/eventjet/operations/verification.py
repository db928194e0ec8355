"""What a verification found, as it may be shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from eventjet.domain.personal import masked_row, masked_whole
from eventjet.rebuild import Difference
from eventjet.shown import cut


def shown_difference(one: Difference, *, private: bool) -> dict[str, Any]:
    """Both rows, with what is personal hidden; `private`: whether the projection has something of that kind."""
    return {
        "key": shown_key(one.key),
        "live": _columns(one.live, private=private),
        "expected": _columns(one.expected, private=private),
        "columns": one.columns,
        "since": one.since,
    }


def shown_key(key: tuple[Any, ...]) -> str:
    """A key as one writes it; the parts of a composite one separated by commas."""
    return ", ".join(map(str, key))


def compared(example: Difference, *, private: bool) -> str:
    """What differs between two rows, column by column."""
    if example.live is None:
        return "it has no row and should have one"
    if example.expected is None:
        return "it has a row and should have none"
    told = zip(example.columns, differing(example, private=private), strict=True)
    return ", ".join(
        _told_apart(shown, (_value(example.live, name), _value(example.expected, name))) for name, shown in told
    )


def differing(example: Difference, *, private: bool) -> list[tuple[str, Any, Any]]:
    """Name, live and expected value of each column that differs between two rows that are there."""
    live, expected = _columns(example.live, private=private) or {}, _columns(example.expected, private=private) or {}
    return [(name, live[name], expected[name]) for name in example.columns]


def _told_apart(shown: tuple[str, Any, Any], values: tuple[Any, Any]) -> str:
    """One column as it may be shown: by its values; where they print alike by their types, or in these words."""
    name, live, expected = shown[0], cut(str(shown[1])), cut(str(shown[2]))
    kinds = [type(one).__name__ for one in values]
    if live != expected:
        return f"{name} is {live} and should be {expected}"
    if kinds[0] != kinds[1]:
        return f"{name} is {live} ({kinds[0]}) and should be {expected} ({kinds[1]})"
    alike = f" ({kinds[0]}) and should be another one, which prints alike" if str(values[0]) == str(values[1]) else ""
    return f"{name} is {live}{alike or ' and should be another one'}"


def _value(row: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", row)[name] if isinstance(row, Mapping) else getattr(row, name)


def _columns(row: Any, *, private: bool) -> Mapping[str, Any] | None:
    """A row as it may be shown; of a table by hand nobody knows which columns are personal."""
    if row is None or not isinstance(row, Mapping):
        return None if row is None else masked_row(row)
    named = dict(cast("Mapping[str, Any]", row))
    return masked_whole(named) if private else named
