"""Checks and arithmetic for times that callers give, which are datetimes with a time zone. PURE."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from eventjet.errors import UsageError
from eventjet.text import shown

_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def in_utc(at: datetime) -> datetime:
    """Return the same time in UTC, limited to the first and last time that Python can express."""
    try:
        return at.astimezone(UTC)
    except OverflowError:
        return _FIRST if at.year < _LAST.year else _LAST


def later(at: datetime, delay: timedelta) -> datetime:
    """Return the time plus a delay, which may be negative, in UTC, limited to the times that Python can express."""
    try:
        return in_utc(at) + delay
    except OverflowError:
        return _FIRST if delay < timedelta() else _LAST


def check_moment(start: str, at: datetime, *, to_come: bool = False) -> None:
    """Raise `UsageError` for a value that is not a datetime, has no zone, or is in the future.

    With `to_come`, times in the future are allowed. `start` begins the sentence of the message: `` `since` is ``.
    """
    if not isinstance(at, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]  text is easily given
        kind = type(at).__name__
        raise UsageError(f"{start} {shown(at, 60)}, a {kind}. Give a datetime with its zone, datetime(…, tzinfo=UTC).")
    if at.utcoffset() is None:
        raise UsageError(f"{start} {at}, which has no time zone. Give a time with its zone, datetime(…, tzinfo=UTC).")
    if not to_come and at > (now := datetime.now(UTC)):
        raise UsageError(
            f"{start} {at}, which is in the future: this machine's clock says {now:%Y-%m-%d %H:%M:%S} UTC."
        )


def check_timeout(timeout_s: float) -> None:
    """Raise `UsageError` for a timeout that is no number, such as None."""
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"`timeout_s` is {shown(timeout_s, 60)}. Give seconds; `math.inf` waits without end.")
