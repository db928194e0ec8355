"""Write the headers of a stored event in one order, and read them without parsing them all. PURE.

Order: `Nats-Msg-Id` · `Nats-Expected-Last-Subject-Sequence` · `Ej-Type` · `Ej-Schema` · `Ej-Version` · `Ej-Command` ·
`Ej-Request` · `Ej-Correlation` · `Ej-Causation` · `traceparent` · `Ej-Meta-*` · `Ej-Imported` · `Ej-Recorded-At` ·
`Ej-Logged-At` · `Ej-Save`. A record of the log stays bytes until `codec.records` decodes it to an event.

Two kinds of records have more headers or another meaning. An *imported* event has two times: `recorded_at`, when it was
recorded in its original system, and `logged_at`, when this log stored it; for all other events both are the same. A
*skip marker* is eventjet's own record that makes every reader pass over another record. Its
subject names the position of that record, `<app>._void.17`: no aggregate can have this name, each position can be
skipped only once, and one wildcard matches all skip markers of a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias
from urllib.parse import quote, unquote
from uuid import uuid4

import orjson

from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.errors import Refused, UndecodableEvent
from eventjet.text import TEXT_MAX, cut, shown

RawRecord: TypeAlias = tuple[int, int, bytes, bytes, bytes]
"""(position, time in ns since 1970, subject, header block `NATS/1.0␍␊…␍␊␍␊` or empty, body)."""

MSG_ID = "Nats-Msg-Id"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
TYPE = "Ej-Type"
SCHEMA = "Ej-Schema"
VERSION = "Ej-Version"
COMMAND = "Ej-Command"
REQUEST = "Ej-Request"
CORRELATION = "Ej-Correlation"
CAUSATION = "Ej-Causation"
TRACEPARENT = "traceparent"
META = "Ej-Meta-"
RECORDED_AT = "Ej-Recorded-At"
"""The time at which the event was first recorded, if it differs from the server's; set by imports and restores."""
IMPORTED = "Ej-Imported"
"""Marks an imported event: it happened elsewhere and long ago, so reactors and processes ignore it."""
LOGGED_AT = "Ej-Logged-At"
"""The time at which the log stored an imported event, if it differs from the server's; set by restores."""
BATCH_ID, BATCH_NUMBER, BATCH_COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
"""Headers of an atomic batch (ADR-50); the server stores them."""
SAVE = "Ej-Save"
"""Header in a batch of several saves: `<number of the save>/<how many of its messages follow>`."""
ENCODING = "Ej-Encoding"
ACTOR = META + "actor"

SKIP_TYPE = "eventjet.voided"
SKIP_REASON_MAX = 500
"""Limit of the reason in a skip marker, in characters."""

SKIP_NAME = "_void"
"""The token of a skip marker's subject in place of an aggregate's name."""
_SKIP_TOKEN = SKIP_NAME.encode()

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_METADATA = re.compile(rb"\r\n(?:Ej-C(?:or|au)|Ej-Meta-|traceparent)")
_SHOWN_MAX = 100
"""Limit of characters of stored text that a message repeats."""
_REASON_MAX = TEXT_MAX + 100
"""Limit of a reason, with room for the note on its length that `cut` appends."""
_NUMBERS_END = 2**63
_KEY = re.compile(r"[a-z][a-z0-9-]{0,40}")
_UNESCAPED = re.compile(r"[!-$&-~]{1,1000}")
"""Most values: they need no escapes and are not too long."""
_VISIBLE = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")
_VALUE_MAX = 1_000
_TITLES = {
    COMMAND: "The command id",
    REQUEST: "The request",
    CORRELATION: "The metadata's correlation",
    CAUSATION: "The metadata's causation",
    TRACEPARENT: "The metadata's traceparent",
    ACTOR: "The metadata's actor",
}
"""The names of these values in messages, since callers do not know the headers."""


def header_lines(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the lines of headers, each with its end."""
    return "".join([f"{name}: {value}\r\n" for name, value in pairs])


def header_block(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Return the header block as the server stores it."""
    return f"NATS/1.0\r\n{header_lines(pairs)}\r\n".encode()


def header(block: bytes, name: str) -> str | None:
    """Return the value of a header, still escaped; None if it is absent."""
    start = block.find(b"\r\n" + name.encode() + b": ")
    if start < 0:
        return None
    start += len(name) + 4
    end = block.find(b"\r\n", start)
    return block[start : end if end >= 0 else None].decode("utf-8", "replace")  # other programs may omit the end


def event_id_of(record: RawRecord) -> str:
    """Return the id of a record's event; empty if it has none."""
    return header(record[3], MSG_ID) or ""


def batch_blocks(messages: Sequence[str]) -> list[bytes]:
    """Return the header blocks of one atomic batch (ADR-50) from header lines; a single message stays plain."""
    if len(messages) == 1:
        return [f"NATS/1.0\r\n{messages[0]}\r\n".encode() if messages[0] else b""]
    batch = uuid4().hex
    blocks = [
        f"NATS/1.0\r\n{lines}{BATCH_ID}: {batch}\r\n{BATCH_NUMBER}: {number}\r\n\r\n".encode()
        for number, lines in enumerate(messages, 1)
    ]
    blocks[-1] = blocks[-1][:-2] + f"{BATCH_COMMIT}: 1\r\n\r\n".encode()
    return blocks


def save_of(block: bytes) -> str | None:
    """Return an id that only the messages of one save share; None for a save of one message."""
    batch, number = header(block, BATCH_ID), header(block, SAVE)
    return batch if batch is None or number is None else f"{batch}/{number.partition('/')[0]}"


def open_batch(block: bytes) -> str | None:
    """Return the batch id of a message whose save continues after it; None for the last message of a save."""
    is_last = header(block, BATCH_COMMIT) is not None or (header(block, SAVE) or "").endswith("/0")
    return None if is_last else header(block, BATCH_ID)


def number_of(block: bytes, name: str) -> int | None:
    """Return a header as a number below 2^63; None if it is absent or not such a number."""
    start = block.find(b"\r\n%b: " % name.encode())
    if start < 0:
        return None
    end = block.find(b"\r\n", start + 2)
    digits = block[start + len(name) + 4 : end if end >= 0 else None]
    number = int(digits) if digits.isdigit() and len(digits) < 20 else _NUMBERS_END
    return number if number < _NUMBERS_END else None


def command_of(block: bytes) -> str | None:
    """Return the id of the command that recorded an event; None if the command had no id."""
    value = header(block, COMMAND)
    return value and unquote(value)


def metadata_of(block: bytes) -> tuple[str | None, Metadata]:
    """Return (command id, metadata) of a block."""
    command_id = command_of(block)
    if not _METADATA.search(block):
        return command_id, NO_METADATA
    values: dict[str, str] = {}
    for line in block.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        values[name.decode("utf-8", "replace")] = _unescaped(value)
    fields = (values.get(CORRELATION), values.get(CAUSATION), values.get(ACTOR), values.get(TRACEPARENT))
    extra = {name[len(META) :]: value for name, value in values.items() if name.startswith(META) and name != ACTOR}
    if not extra and fields == (None, None, None, None):
        return command_id, NO_METADATA
    return command_id, Metadata(*fields, extra)


def recorded_at(record: RawRecord) -> datetime:
    """Return when an event was recorded: JetStream's time, unless a header gives it; raises `UndecodableEvent`."""
    return time_in_header(record, RECORDED_AT, stored_at(record))


def stored_at(record: RawRecord) -> datetime:
    """Return JetStream's time of a record."""
    return stored_time(record[1])


def stored_time(time_ns: int) -> datetime:
    """Return JetStream's time from nanoseconds since 1970, cut to microseconds."""
    return _EPOCH + timedelta(microseconds=time_ns // 1000)


def undecodable(record: RawRecord, fault: str, unknown_aggregate: str | None = None) -> UndecodableEvent:
    """Return the error for a record, with its fault in one line."""
    reason = cut(next(iter(fault.splitlines()), ""), _REASON_MAX)
    return UndecodableEvent(brief(header(record[3], TYPE) or "?"), record[0], record[4], reason, unknown_aggregate)


def brief(text: str | None) -> str:
    """Return stored text shortened to what a message may repeat."""
    return text if text is not None and len(text) <= _SHOWN_MAX else f"{(text or '')[:_SHOWN_MAX]}…"


def _unescaped(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return unquote(text) if "%" in text else text


def time_in_header(record: RawRecord, name: str, default: datetime) -> datetime:
    """Return the time in a header, or a default if it is absent or has no zone; raises `UndecodableEvent`."""
    text = header(record[3], name)
    if text is None:
        return default
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else default
    except (ValueError, OverflowError):
        raise undecodable(record, f"{name} is {brief(text)!r}") from None


def is_imported(block: bytes) -> bool:
    """Return whether the event of these headers was imported."""
    return header(block, IMPORTED) is not None


def logged_at(record: RawRecord) -> datetime:
    """Return when the log stored a record, in the order of positions; raises `UndecodableEvent`."""
    name = LOGGED_AT if is_imported(record[3]) else RECORDED_AT
    return time_in_header(record, name, stored_at(record))


def context_headers(command_id: str | None, metadata: Metadata, request: str | None = None) -> list[tuple[str, str]]:
    """Return the headers after `Ej-Version`, in order and escaped; raises `Refused` for values that do not fit."""
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
        if not _KEY.fullmatch(key) or key == "actor":
            raise Refused(f"The metadata key {shown(key)}", "keys are [a-z][a-z0-9-]* and not `actor`", "Rename it.")
        pairs.append((META + key, _escaped(META + key, value)))
    return pairs


def _escaped(name: str, value: str) -> str:
    if type(value) is str and _UNESCAPED.fullmatch(value):
        return value
    title = _TITLES.get(name) or f"The metadata {name.removeprefix(META)!r}"
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  `quote` takes bytes as well
        raise Refused(f"{title} {shown(value)}", "it is not text", "Give it as text, for instance str(…).")
    if not value:
        remedy = "Give text that this command has each time it is repeated, and no other has: an order's number, say."
        raise Refused(title, "it is empty", remedy if name == COMMAND else "Give text, or leave it out.")
    try:
        text = quote(value, safe=_VISIBLE)
    except UnicodeEncodeError:
        raise Refused(
            f"{title} {shown(value, 40)}", "it holds a lone surrogate, which is not text", "Use text."
        ) from None
    if len(text) > _VALUE_MAX:
        reason = f"it takes {len(text):,} bytes as a header and {_VALUE_MAX:,} is the limit"
        raise Refused(f"{title} {shown(value, 40)}", reason, "Use a shorter one, a UUID for instance.")
    return text


def skip_subject(app: str, position: int | str) -> str:
    """Return the subject of the skip marker of a position; `*` matches all skip markers."""
    return f"{app}.{SKIP_NAME}.{position}"


def skipped_by(subject: bytes) -> int | None:
    """Return the position that a record on this subject skips; None if the record is not a skip marker."""
    names = subject.split(b".")
    if len(names) != 3 or names[1] != _SKIP_TOKEN or not names[2].isdigit() or len(names[2]) > 18:
        return None
    return int(names[2])


def skip_body(position: int, reason: str) -> bytes:
    """Return the body of a skip marker."""
    return orjson.dumps({"position": position, "reason": reason})


def reason_in(body: bytes) -> str:
    """Return the reason in the body of a skip marker; empty for a body that cannot be read."""
    try:
        return str(orjson.loads(body)["reason"])[:SKIP_REASON_MAX]
    except (ValueError, KeyError, TypeError):
        return ""
