"""A time that somebody gives: a datetime with its zone. PURE."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from eventjet.errors import UsageError
from eventjet.text import shown

_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def in_utc(at: datetime) -> datetime:
    """The same time in UTC; the first or the last that Python knows for one before or after those."""
    try:
        return at.astimezone(UTC)
    except OverflowError:
        return _FIRST if at.year < _LAST.year else _LAST


def later(at: datetime, delay: timedelta) -> datetime:
    """So long after a time, or before it, in UTC; the first or the last that Python knows where there is no such."""
    try:
        return in_utc(at) + delay
    except OverflowError:
        return _FIRST if delay < timedelta() else _LAST


def check_moment(what: str, at: object, *, to_come: bool = False) -> None:
    """Raise `UsageError` for text, for a time without a zone, and for one in the future unless it may be `to_come`.

    `what` begins the sentence that the time ends: `` `since` is ``.
    """
    if not isinstance(at, datetime):
        raise UsageError(
            f"{what} {shown(at, 60)}, a {type(at).__name__}. Give a datetime with its zone, datetime(…, tzinfo=UTC)."
        )
    if at.utcoffset() is None:
        raise UsageError(f"{what} {at}, which has no time zone. Give a time with its zone, datetime(…, tzinfo=UTC).")
    if not to_come and at > (now := datetime.now(UTC)):
        raise UsageError(
            f"{what} {at}, which is in the future: this machine's clock says {now:%Y-%m-%d %H:%M:%S} UTC. "
            "Give a time that has passed; correct its zone, or the clock."
        )
