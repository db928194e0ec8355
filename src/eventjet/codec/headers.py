"""Headers of a stored event: written in one order, read without parsing them all. PURE.

Order: `Nats-Msg-Id` · `Nats-Expected-Last-Subject-Sequence` · `Ej-Type` · `Ej-Schema` · `Ej-Version` · `Ej-Command` ·
`Ej-Request` · `Ej-Correlation` · `Ej-Causation` · `traceparent` · `Ej-Meta-*` · `Ej-Imported` · `Ej-Recorded-At` ·
`Ej-Logged-At` · `Ej-Save`. A record of the log stays bytes until `codec.records` makes an event of it.

Two kinds of records have more to say. An *imported* event has two times: `recorded_at`, when it was recorded where it
comes from, and `logged_at`, when this log got it; for all others both are the same. A *void* is a record of eventjet's
own that declares another record void, so that every reader passes over that one. Its subject names the position,
`<app>._void.17`: no aggregate can be called so, a position can be declared void once only, and all voids of a log are
found by one wildcard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias
from urllib.parse import quote, unquote
from uuid import uuid4

import orjson

from eventjet.domain.recorded import NO_METADATA, Metadata, check_metadata
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
"""When it was recorded first, where that is not when the server stored it: written by imports and restores."""
IMPORTED = "Ej-Imported"
"""Says that an event was imported: it happened elsewhere and long ago, so nothing is to follow from it."""
LOGGED_AT = "Ej-Logged-At"
"""When the log got an imported event, where the server has another time: written by restores."""
BATCH_ID, BATCH_NUMBER, BATCH_COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
"""Of an atomic batch (ADR-50); the server stores them."""
SAVE = "Ej-Save"
"""Of a batch that holds several saves: `<number of the save>/<how many of its messages follow>`."""
ENCODING = "Ej-Encoding"
ACTOR = META + "actor"

VOID_TYPE = "eventjet.voided"
VOID_REASON_MAX = 500
"""Characters."""

VOID_NAME = "_void"
"""What stands in the place of an aggregate's name."""
_VOID_TOKEN = VOID_NAME.encode()
VOID_PART = b"." + _VOID_TOKEN + b"."
"""What the subjects of voids contain, and no other subject does."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_METADATA = re.compile(rb"\r\n(?:Ej-C(?:or|au)|Ej-Meta-|traceparent)")
_SHOWN_MAX = 100
"""Characters of what others wrote that a message repeats."""
_REASON_MAX = TEXT_MAX + 100
"""With how long it was, where it was cut already."""
_NUMBERS_END = 2**63
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


def header_block(pairs: Iterable[tuple[str, str]]) -> bytes:
    """The block as the server stores it."""
    return ("NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in pairs) + "\r\n").encode()


def header(block: bytes, name: str) -> str | None:
    """One header out of the block, unescaped only by `metadata_of`; None when absent."""
    start = block.find(b"\r\n" + name.encode() + b": ")
    if start < 0:
        return None
    start += len(name) + 4
    end = block.find(b"\r\n", start)
    return block[start : end if end >= 0 else None].decode("utf-8", "replace")  # others may have left its end out


def mark_batch(blocks: Sequence[list[tuple[str, str]]]) -> None:
    """Make the messages of these headers one atomic batch (ADR-50); a message alone stays a plain publish."""
    if len(blocks) < 2:
        return
    batch = uuid4().hex
    for number, block in enumerate(blocks, 1):
        block += [(BATCH_ID, batch), (BATCH_NUMBER, str(number))]
    blocks[-1].append((BATCH_COMMIT, "1"))


def mark_saves(saves: Sequence[Sequence[list[tuple[str, str]]]]) -> None:
    """Make the messages of all these saves one atomic batch that tells where each save ends."""
    if len(saves) > 1:
        for number, blocks in enumerate(saves, 1):
            for left, block in enumerate(reversed(blocks)):
                block.append((SAVE, f"{number}/{left}"))
    mark_batch([block for blocks in saves for block in blocks])


def save_of(block: bytes) -> str | None:
    """What all messages of one save have in common, and those of no other; None for a save of one message."""
    batch, number = header(block, BATCH_ID), header(block, SAVE)
    return batch if batch is None or number is None else f"{batch}/{number.partition('/')[0]}"


def open_batch(block: bytes) -> str | None:
    """The id of the batch in which a message's save goes on; None where it is of none, or is the last of its save."""
    is_last = header(block, BATCH_COMMIT) is not None or (header(block, SAVE) or "").endswith("/0")
    return None if is_last else header(block, BATCH_ID)


def number_of(block: bytes, name: str) -> int | None:
    """One header as a number below 2^63; None when it is absent or not one."""
    start = block.find(b"\r\n%b: " % name.encode())
    if start < 0:
        return None
    end = block.find(b"\r\n", start + 2)
    digits = block[start + len(name) + 4 : end if end >= 0 else None]
    number = int(digits) if digits.isdigit() and len(digits) < 20 else _NUMBERS_END
    return number if number < _NUMBERS_END else None


def command_of(block: bytes) -> str | None:
    """The id of the command that an event came of; None where it has none."""
    told = header(block, COMMAND)
    return told and unquote(told)


def metadata_of(block: bytes) -> tuple[str | None, Metadata]:
    """(command id, metadata) of a block."""
    command_id = command_of(block)
    if not _METADATA.search(block):
        return command_id, NO_METADATA
    found: dict[str, str] = {}
    for line in block.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        found[name.decode("utf-8", "replace")] = _unescaped(value)
    told = (found.get(CORRELATION), found.get(CAUSATION), found.get(ACTOR), found.get(TRACEPARENT))
    extra = {name[len(META) :]: value for name, value in found.items() if name.startswith(META) and name != ACTOR}
    if not extra and told == (None, None, None, None):
        return command_id, NO_METADATA
    return command_id, Metadata(*told, extra)


def recorded_at(record: RawRecord) -> datetime:
    """When it was recorded: JetStream's time, unless the record says otherwise; raises `UndecodableEvent`."""
    return told_time(record, RECORDED_AT, stored_at(record))


def stored_at(record: RawRecord) -> datetime:
    """JetStream's time."""
    return stored_time(record[1])


def stored_time(time_ns: int) -> datetime:
    """JetStream's time, of nanoseconds since 1970."""
    return _EPOCH + timedelta(microseconds=time_ns // 1000)


def undecodable(record: RawRecord, fault: str) -> UndecodableEvent:
    """The error for a record, with what is wrong with it in one line."""
    reason = cut(next(iter(fault.splitlines()), ""), _REASON_MAX)
    return UndecodableEvent(brief(header(record[3], TYPE) or "?"), record[0], record[4], reason)


def brief(text: str | None) -> str:
    """What others wrote, as a message may repeat it."""
    return text if text is not None and len(text) <= _SHOWN_MAX else f"{(text or '')[:_SHOWN_MAX]}…"


def _unescaped(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return unquote(text) if "%" in text else text


def told_time(record: RawRecord, name: str, default: datetime) -> datetime:
    """The time in a header, a default where it is absent; raises `UndecodableEvent`."""
    text = header(record[3], name)
    if text is None:
        return default
    try:
        told = datetime.fromisoformat(text)
        return told.astimezone(UTC) if told.tzinfo else default
    except (ValueError, OverflowError):
        raise undecodable(record, f"{name} is {brief(text)!r}") from None


def is_imported(block: bytes) -> bool:
    """Whether the event of these headers was imported."""
    return header(block, IMPORTED) is not None


def logged_at(record: RawRecord) -> datetime:
    """When the log got a record, in the order of positions; raises `UndecodableEvent`."""
    name = LOGGED_AT if is_imported(record[3]) else RECORDED_AT
    return told_time(record, name, stored_at(record))


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


def void_subject(app: str, position: int | str) -> str:
    """Where the void of a position is; `*` stands for all of them."""
    return f"{app}._void.{position}"


def voided_by(subject: bytes) -> int | None:
    """The position that a record on this subject declares void; None where it declares none."""
    names = subject.split(b".")
    if len(names) != 3 or names[1] != _VOID_TOKEN or not names[2].isdigit() or len(names[2]) > 18:
        return None
    return int(names[2])


def void_body(position: int, reason: str) -> bytes:
    """The body of a void."""
    return orjson.dumps({"position": position, "reason": reason})


def reason_in(body: bytes) -> str:
    """Why, as whoever declared it said; empty for a body that cannot be read."""
    try:
        return str(orjson.loads(body)["reason"])[:VOID_REASON_MAX]
    except (ValueError, KeyError, TypeError):
        return ""
