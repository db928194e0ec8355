"""UUIDv7 (RFC 9562, section 5.7): random, and ordered by the millisecond they were made in."""

from __future__ import annotations

import os
import time


def new_event_id() -> str:
    """A fresh UUIDv7; never derived from data, since message ids are shared by all writers of a stream."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (
        (milliseconds & (2**48 - 1)) << 80 | 0x7 << 76 | (random >> 68 & 0xFFF) << 64 | 0x2 << 62 | random & (2**62 - 1)
    )
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
