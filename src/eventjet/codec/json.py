"""JSON of any kind, read and written in one way. PURE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import orjson


def read_json(text: bytes | str) -> Any:
    """The value of JSON: the one reading of whatever may hold an application's values.

    An integer keeps all its digits, and of a name that comes twice the last value counts. Raises `ValueError` for what
    is no JSON, which lone surrogates and NaN are not (RFC 8259), and for a number beyond a double's range, `1e400`.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def dump_json(value: Any, option: int = 0) -> bytes:
    """The JSON that `read_json` reads as the same value; `option` is orjson's.

    Raises `TypeError` for what orjson does not take, and `ValueError` for NaN and infinities.
    """
    try:
        text = orjson.dumps(value, option=option)
    except TypeError as error:
        if "Recursion limit" in str(error):
            raise ValueError("the JSON is nested too deeply") from None
        return orjson.dumps(check_numbers(value), option=option)  # it refuses integers beyond 64 bits
    if b"null" in text:
        check_numbers(value)  # it writes NaN as null
    return text


def check_numbers(value: Any) -> Any:
    """The value, long integers in it as their JSON; raises `ValueError` for a number that JSON does not have."""
    if isinstance(value, dict):
        return {key: check_numbers(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [check_numbers(each) for each in cast("Sequence[Any]", value)]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has neither NaN nor infinities")
    return value
