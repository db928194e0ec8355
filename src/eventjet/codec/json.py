"""Read and write JSON of any kind with the same rules everywhere. PURE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import orjson


def read_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; all JSON that may contain an application's values is read here.

    An integer keeps all its digits, and of a repeated name the last value counts. Raises `ValueError` for text that is
    not JSON (which includes lone surrogates and NaN, RFC 8259) and for a number beyond a double's range, `1e400`.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def dump_json(value: Any, option: int = 0) -> bytes:
    """Return the JSON that `read_json` reads as the same value; raises `TypeError`, and `ValueError` for NaN."""
    try:
        text = orjson.dumps(value, option=option)
    except TypeError as error:
        if "Recursion limit" in str(error):
            raise ValueError("the JSON is nested too deeply") from None
        return orjson.dumps(check_numbers(value), option=option)  # orjson refuses integers beyond 64 bits
    if b"null" in text:
        check_numbers(value)  # orjson writes NaN as null
    return text


def check_numbers(value: Any) -> Any:
    """Return the value with its long integers as JSON fragments; raises `ValueError` for NaN and infinities."""
    if isinstance(value, dict):
        return {key: check_numbers(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [check_numbers(item) for item in cast("Sequence[Any]", value)]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has neither NaN nor infinities")
    return value


def differing_fields(left: bytes, right: bytes) -> list[str]:
    """Return the fields that differ between two JSON texts, as 1, 1.0 and true do; `its body` for no objects."""
    try:
        values = read_json(left), read_json(right)
    except ValueError:
        return ["its body"]
    if not all(isinstance(value, dict) for value in values):
        return [] if dump_json(values[0]) == dump_json(values[1]) else ["its body"]
    left_fields, right_fields = ({name: dump_json(field) for name, field in value.items()} for value in values)
    return sorted(
        name for name in left_fields.keys() | right_fields.keys() if left_fields.get(name) != right_fields.get(name)
    )
