"""Why something could not be done, in one line that may be shown: cut, and nothing personal in it. PURE."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from pydantic_core import ValidationError

from eventjet.codec.faults import faults_of
from eventjet.errors import EventjetError
from eventjet.shown import cut

TRACEBACK_MAX = 8_000
"""Characters; the end is kept."""


def reason_of(error: BaseException, *, private: bool = False) -> str:
    """What happened, in one line; of a statement neither its text nor its values.

    Where something personal is at hand, so `private`, an error of others is named by its type and its place: what it
    says may repeat a value. Errors of eventjet's own repeat none.
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
    """Its last frames and those of what led to it; where something personal is at hand, without what the errors say."""
    if not private:
        return "".join(traceback.TracebackException.from_exception(error, limit=-20).format())[-TRACEBACK_MAX:]
    told = [
        "".join(traceback.format_tb(each.__traceback__, limit=-20)) + f"{reason_of(each, private=True)}\n"
        for each in reversed(list(_chain(error)))
    ]
    return "\n".join(told)[-TRACEBACK_MAX:]


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _without_message(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{name}: {'.'.join(map(str, first['loc'][:1])) or 'it'}: {first['type']}"
    code: Any = getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorname", None)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{name}{f' {code}' if code else where}; what it says is not shown, since personal fields are at hand"
