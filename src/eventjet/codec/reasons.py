"""Describe exceptions in one short line without personal data. PURE.

Only this module turns pydantic's errors into text, which names each field. Values are not shown, since they may be
personal; field names that come from data, such as keys of a dict, are shown only if they look like names.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from pydantic_core import ValidationError

from eventjet.errors import DefinitionError, EventjetError
from eventjet.text import cut

FIELDS_MAX = 5
"""Faulty fields that a text names; for the others it gives their number."""
_FIELD_MAX = 80
_FAULT_MAX = 120
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,40}")
TRACEBACK_MAX = 8_000
"""Characters of a traceback; its end is kept."""


def reason_of(error: BaseException, *, private: bool = False) -> str:
    """Return in one line what happened; for an SQL error without the text of the statement and its values.

    `private` says that personal data may be involved: then an error that is not eventjet's is described by its type
    and place alone, since its message may repeat a value. Errors of eventjet repeat none.
    """
    driver = getattr(error, "orig", None)
    cause = driver if isinstance(driver, BaseException) else error
    if private and not isinstance(cause, EventjetError):
        return _without_message(cause)
    try:
        text = faults_of(cause).rstrip(".")
    except Exception:  # noqa: BLE001 - an error that cannot even be printed
        text = "it cannot be printed"
    if not isinstance(cause, EventjetError):
        text = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return cut(text)


def traceback_of(error: BaseException, *, private: bool = False) -> str:
    """Return the last frames of an error and of its causes; without the messages of the errors if `private`."""
    if not private:
        return "".join(traceback.TracebackException.from_exception(error, limit=-20).format())[-TRACEBACK_MAX:]
    parts = [
        "".join(traceback.format_tb(cause.__traceback__, limit=-20)) + f"{reason_of(cause, private=True)}\n"
        for cause in reversed(list(_chain(error)))
    ]
    return "\n".join(parts)[-TRACEBACK_MAX:]


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    ids: set[int] = set()
    while current is not None and id(current) not in ids:
        ids.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _without_message(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{name}: {'.'.join(map(str, first['loc'][:1])) or 'it'}: {first['type']}"
    code: Any = getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorname", None)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{name}{f' {code}' if code else where}; what it says is not shown, since personal fields are at hand"


def faults_of(error: BaseException) -> str:
    """Return the faulty fields of a validation error, or the first line of another error.

    For instance `amount: Field required; lines[2].price: a Decimal travels as a string`.
    """
    if isinstance(error, DefinitionError):
        return "; ".join(error.faults)
    if not isinstance(error, ValidationError):
        return next(iter(str(error).splitlines()), "")
    details = error.errors(include_url=False, include_input=False, include_context=False)
    faults = [f"{_path(detail['loc'])}: {_message(detail['type'], detail['msg'])}" for detail in details]
    lines = list(dict.fromkeys(faults))
    suffix = f"; and {len(lines) - FIELDS_MAX} more" if len(lines) > FIELDS_MAX else ""
    return "; ".join(lines[:FIELDS_MAX]) + suffix


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part
            if not _NAME.fullmatch(part):  # a branch of a union, or a key
                name = "" if "[" in part else "…"
            path += f".{name}" if path and name else name
    return _shortened(path, _FIELD_MAX) or "it"


def _message(kind: str, message: str) -> str:
    if kind == "union_tag_invalid":
        return "Its tag is none of the expected ones"  # pydantic's own message repeats the tag
    return _shortened(message.removeprefix("Value error, "), _FAULT_MAX)


def _shortened(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}…"
