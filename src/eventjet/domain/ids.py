"""UUIDv7 (RFC 9562, section 5.7): random, and ordered by the millisecond they were made in."""

from __future__ import annotations

import os
import time

_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def new_event_id() -> str:
    """A fresh UUIDv7; never derived from data, since message ids are shared by all writers of a stream."""
    time_ms = f"{time.time_ns() // 1_000_000:012x}"
    random = os.urandom(10).hex()
    variant = _VARIANT[random[3]]
    return f"{time_ms[:8]}-{time_ms[8:]}-7{random[:3]}-{variant}{random[4:7]}-{random[7:19]}"
