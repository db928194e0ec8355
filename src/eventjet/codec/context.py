"""What travels beside an event: the id of its command and its metadata, as headers. PURE."""

from __future__ import annotations

import re
from urllib.parse import quote

from eventjet.codec.envelope import ACTOR, CAUSATION, COMMAND, CORRELATION, META, REQUEST, TRACEPARENT
from eventjet.domain.recorded import Metadata, check_metadata
from eventjet.errors import Refused
from eventjet.shown import shown

_KEY = re.compile(r"[a-z][a-z0-9-]{0,40}")
_VISIBLE = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")
_VALUE_MAX = 1_000
_CALLED = {
    COMMAND: "The command id",
    REQUEST: "The request",
    CORRELATION: "The metadata's correlation",
    CAUSATION: "The metadata's causation",
    TRACEPARENT: "The metadata's traceparent",
    ACTOR: "The metadata's actor",
}
"""What messages call the values of these headers: whoever gives them has never seen a header."""


def context_headers(command_id: str | None, metadata: Metadata, request: str | None = None) -> list[tuple[str, str]]:
    """The headers after `Ej-Version`, in order, values escaped; raises `Refused` for what cannot travel."""
    check_metadata(metadata)
    named = (
        (COMMAND, command_id),
        (REQUEST, request),
        (CORRELATION, metadata.correlation),
        (CAUSATION, metadata.causation),
        (TRACEPARENT, metadata.traceparent),
        (ACTOR, metadata.actor),
    )
    pairs = [(name, _escaped(name, value)) for name, value in named if value is not None]
    for key, value in metadata.extra.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key) or key == "actor":  # pyright: ignore[reportUnnecessaryIsInstance]  a key of another kind is easily given
            raise Refused(f"The metadata key {shown(key)}", "keys are [a-z][a-z0-9-]* and not `actor`", "Rename it.")
        pairs.append((META + key, _escaped(META + key, value)))
    return pairs


def _escaped(name: str, value: str) -> str:
    what = _CALLED.get(name) or f"The metadata {name.removeprefix(META)!r}"
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  a UUID is easily forgotten
        raise Refused(f"{what} {shown(value)}", "it is not text", "Give it as text, for instance str(…).")
    if not value:
        remedy = "Give text that this command has each time it is repeated, and no other has: an order's number, say."
        raise Refused(what, "it is empty", remedy if name == COMMAND else "Give text, or leave it out.")
    try:
        text = quote(value, safe=_VISIBLE)
    except UnicodeEncodeError:
        raise Refused(
            f"{what} {shown(value, 40)}", "it holds a lone surrogate, which is not text", "Use text."
        ) from None
    if len(text) > _VALUE_MAX:
        reason = f"it takes {len(text):,} bytes as a header and {_VALUE_MAX:,} is the limit"
        raise Refused(f"{what} {shown(value, 40)}", reason, "Use a shorter one, a UUID for instance.")
    return text
