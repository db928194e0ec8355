"""JSON values in the one form that JSON, JSONB and text all give back. Pure."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from eventjet.projections.values import storable

_INTEGRAL = 1e16
"""From here on a float is written with an exponent, which JSONB reads back as an integer."""


def canonical(value: Any) -> Any:
    """Keys sorted, large integral floats as integers; raises `ValueError` for what would not be read back equal."""
    if value is None or value is True or value is False:
        return value
    kind = cast("type[Any]", type(value))
    if kind is str:
        return storable(value)
    if kind is int:
        return value
    if kind is float:
        return _number(value)
    if kind is list:
        return [canonical(item) for item in cast("list[Any]", value)]
    if kind is dict:
        return _object(cast("dict[Any, Any]", value))
    raise ValueError(f"JSON would not give {kind.__name__} back as it is")


def dumps(value: Any) -> str:
    """The text of a value in canonical form."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def loads(text: str) -> Any:
    """The value of a text, in canonical form."""
    return canonical(json.loads(text))


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise ValueError("JSON holds finite numbers only")
    return int(value) if abs(value) >= _INTEGRAL else value or 0.0


def _object(value: dict[Any, Any]) -> dict[str, Any]:
    for name in value:
        if type(name) is not str:
            raise ValueError(f"a JSON object has text as keys, not {type(name).__name__}")
    return {storable(name): canonical(value[name]) for name in sorted(cast("dict[str, Any]", value))}
