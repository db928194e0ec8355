"""What is wrong with a value, in one line that names each field: here alone pydantic's errors become text. PURE.

The value itself is not shown, which may be personal. Of a field that others named, a key of a dict for instance, only
what looks like a name is.
"""

from __future__ import annotations

import re

from pydantic_core import ValidationError

from eventjet.errors import DefinitionError

FIELDS_MAX = 5
"""Fields that are named; of the rest it is said how many they are."""
_FIELD_MAX = 80
_FAULT_MAX = 120
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,40}")


def faults_of(error: BaseException) -> str:
    """`amount: Field required; lines[2].price: a Decimal travels as a string`; of other errors their first line."""
    if isinstance(error, DefinitionError):
        return "; ".join(error.faults)
    if not isinstance(error, ValidationError):
        return next(iter(str(error).splitlines()), "")
    found = error.errors(include_url=False, include_input=False, include_context=False)
    told = [f"{_path(one['loc'])}: {_said(one['type'], one['msg'])}" for one in found]
    lines = list(dict.fromkeys(told))
    more = f"; and {len(lines) - FIELDS_MAX} more" if len(lines) > FIELDS_MAX else ""
    return "; ".join(lines[:FIELDS_MAX]) + more


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if _NAME.fullmatch(part) else "" if "[" in part else "…"  # a branch of a union, or a key
            path += f".{name}" if path and name else name
    return _cut(path, _FIELD_MAX) or "it"


def _said(kind: str, message: str) -> str:
    if kind == "union_tag_invalid":
        return "Its tag is none of the expected ones"  # pydantic repeats the one that came
    return _cut(message.removeprefix("Value error, "), _FAULT_MAX)


def _cut(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}…"
