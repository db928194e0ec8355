"""A void: a record of eventjet's own that declares another record void, so that every reader passes over that one.

Its subject names the position, `<app>._void.17`. No aggregate can be called so, a position can be declared void once
only, and all voids of a log are found by one wildcard.
"""

from __future__ import annotations

import orjson

TYPE_NAME = "eventjet.voided"
REASON_MAX = 500
"""Characters."""

VOID_NAME = "_void"
"""What stands in the place of an aggregate's name."""
_TOKEN = VOID_NAME.encode()
VOID_PART = b"." + _TOKEN + b"."
"""What the subjects of voids contain, and no other subject does."""


def void_subject(app: str, position: int | str) -> str:
    """Where the void of a position is; `*` stands for all of them."""
    return f"{app}._void.{position}"


def voided_by(subject: bytes) -> int | None:
    """The position that a record on this subject declares void; None where it declares none."""
    names = subject.split(b".")
    if len(names) != 3 or names[1] != _TOKEN or not names[2].isdigit() or len(names[2]) > 18:
        return None
    return int(names[2])


def void_body(position: int, reason: str) -> bytes:
    """The body of a void."""
    return orjson.dumps({"position": position, "reason": reason})


def reason_in(body: bytes) -> str:
    """Why, as whoever declared it said; empty for a body that cannot be read."""
    try:
        return str(orjson.loads(body)["reason"])[:REASON_MAX]
    except (ValueError, KeyError, TypeError):
        return ""
