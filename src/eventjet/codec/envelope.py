"""Headers of a stored event: written in one order, read without parsing them all.

Order: `Nats-Msg-Id` · `Nats-Expected-Last-Subject-Sequence` · `Ej-Type` · `Ej-Schema` · `Ej-Version` · `Ej-Command` ·
`Ej-Request` · `Ej-Correlation` · `Ej-Causation` · `traceparent` · `Ej-Meta-*` · `Ej-Imported` · `Ej-Recorded-At` ·
`Ej-Logged-At` · `Ej-Save`. A record of the log stays bytes until `codec.decoder` makes an event of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias
from urllib.parse import unquote
from uuid import uuid4

from eventjet.domain.recorded import NO_METADATA, Metadata
from eventjet.errors import UndecodableEvent
from eventjet.shown import TEXT_MAX, cut

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
BATCH_ID, BATCH_NUMBER, BATCH_COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
"""Of an atomic batch (ADR-50); the server stores them."""
SAVE = "Ej-Save"
"""Of a batch that holds several saves: `<number of the save>/<how many of its messages follow>`."""
ENCODING = "Ej-Encoding"
ACTOR = META + "actor"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_METADATA = re.compile(rb"\r\n(?:Ej-C(?:or|au)|Ej-Meta-|traceparent)")
_SHOWN_MAX = 100
"""Characters of what others wrote that a message repeats."""
_REASON_MAX = TEXT_MAX + 100
"""With how long it was, where it was cut already."""
_NUMBERS_END = 2**63


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
