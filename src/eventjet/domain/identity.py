"""Encode aggregate ids as subject tokens, one token for each id, and create event ids.

`[A-Za-z0-9_-]` stand for themselves; every other byte of the UTF-8 form is `=XX`. The server stores `bank.account.*`
as a literal subject and then reads it back as a wildcard, so ids are always encoded. An id that no token can express
is refused.

Event ids are UUIDv7 (RFC 9562, section 5.7): random, and ordered by the millisecond in which they were created.
"""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache

from eventjet.errors import Refused

ENCODED_MAX = 200
"""The longest encoded id, in bytes: a control line of the server holds 4,096."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]++|=[0-9A-F]{2})+")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")
_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


@lru_cache(maxsize=65_536)
def encode_id(aggregate_id: str) -> str:
    """Return the token of an id; raises `Refused` if it is not text, is empty, too long, or has a NUL or surrogate."""
    if not isinstance(aggregate_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  a UUID is easily forgotten
        remedy = "Give the id" if aggregate_id is None else "Give it as text, for instance str(…)"
        raise Refused(f"The id {aggregate_id!r}", "it is not text", f"{remedy}.")
    # A member of a str Enum equals its text but prints as something else: take the text.
    aggregate_id = str.__str__(aggregate_id)
    if _PLAIN.fullmatch(aggregate_id) and len(aggregate_id) <= ENCODED_MAX:
        return aggregate_id
    if not aggregate_id:
        raise Refused("An empty aggregate id", "a subject token cannot be empty", "Give the aggregate an id.")
    if "\0" in aggregate_id:
        raise Refused(
            f"The id {aggregate_id[:40]!r}", "it holds a NUL, which no database takes as text", "Leave it out."
        )
    try:
        raw = aggregate_id.encode()
    except UnicodeEncodeError:
        raise Refused(
            f"The id {aggregate_id[:40]!r}", "it holds a lone surrogate, which is not text", "Use text."
        ) from None
    token = _UNSAFE.sub(lambda match: b"=%02X" % match[0][0], raw).decode()
    if len(token) > ENCODED_MAX:
        raise Refused(
            f"The id {aggregate_id[:40]!r}…",
            f"it takes {len(token)} bytes as a subject token and {ENCODED_MAX} is the limit",
            "Use a shorter id, a UUID for instance.",
        )
    return token


def decode_id(token: str) -> str:
    """Return the id of a token; raises `ValueError` for a token that `encode_id` cannot have returned."""
    if not _TOKEN.fullmatch(token) or len(token) > ENCODED_MAX:
        raise ValueError(f"{token[:60]!r} is not an encoded id")
    if "=" not in token:
        return token
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), token.encode())
    aggregate_id = raw.decode()  # UnicodeDecodeError is a ValueError
    if "\0" in aggregate_id or encode_id(aggregate_id) != token:
        raise ValueError(f"{token[:60]!r} is not the encoding of {aggregate_id[:60]!r}")
    return aggregate_id


def new_event_id(random: str = "") -> str:
    """Return a new UUIDv7; `random` are 20 hexadecimal digits of `os.urandom`, if the caller has taken many at once."""
    time_ms = f"{time.time_ns() // 1_000_000:012x}"
    random = random or os.urandom(10).hex()
    variant = _VARIANT[random[3]]
    return f"{time_ms[:8]}-{time_ms[8:]}-7{random[:3]}-{variant}{random[4:7]}-{random[7:19]}"
