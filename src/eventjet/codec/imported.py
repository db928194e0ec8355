"""Imported events: known by a header, and with two times.

`recorded_at` is when an event was recorded where it comes from, as its import said. `logged_at` is when this log got
it. For all other events both are the same.
"""

from __future__ import annotations

from datetime import datetime

from eventjet.codec.envelope import RECORDED_AT, RawRecord, header, stored_at, told_time

IMPORTED = "Ej-Imported"
"""Says that an event was imported: it happened elsewhere and long ago, so nothing is to follow from it."""
LOGGED_AT = "Ej-Logged-At"
"""When the log got an imported event, where the server has another time: written by restores."""


def is_imported(block: bytes) -> bool:
    """Whether the event of these headers was imported."""
    return header(block, IMPORTED) is not None


def logged_at(record: RawRecord) -> datetime:
    """When the log got a record, in the order of positions; raises `UndecodableEvent`."""
    name = LOGGED_AT if is_imported(record[3]) else RECORDED_AT
    return told_time(record, name, stored_at(record))
