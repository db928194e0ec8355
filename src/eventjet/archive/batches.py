"""An archived log as it is published again, in batches that are stored whole or not at all.

Subject, body, and all headers that are told to readers stay as they are, in their order. What was said only to the
server (batches, expectations of a whole stream) goes. `Ej-Recorded-At` keeps the time that the server will not give
again, and `Ej-Logged-At` that of an imported event, whose own may be another. Whatever is published twice in this way
is the same as what was published once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from eventjet.archive.manifest import Archive
from eventjet.archive.reading import ArchiveReader
from eventjet.codec.headers import EXPECTED, LOGGED_AT, MSG_ID, RECORDED_AT, RawRecord, header, is_imported, number_of
from eventjet.errors import ArchiveBroken
from eventjet.nats.protocol import publish_frame
from eventjet.shown import cut

BATCH_MAX = 500
"""Messages of one atomic batch: beyond that, a batch costs what its messages cost."""
BATCH_BYTES = 4_000_000
"""Of one batch, about: the server waits ten seconds for the rest of it."""
HEADERS_ADDED = 240
"""Bytes that a message grows by at the most: `Ej-Recorded-At` (48), `Ej-Logged-At` (46), the batch's headers (79), the
expected end of the log (51)."""

_TO_THE_SERVER = re.compile(rb"\r\n(?:Ej-Save: |Nats-(?!Msg-Id: |Expected-Last-Subject-Sequence: ))[^\r\n]*")
_EXPECTATION = re.compile(rb"\r\nNats-Expected-Last-Subject-Sequence: [^\r\n]*")
_OF_ANOTHER = b"\r\nNats-Expected-Last-Subject-Sequence-Subject: "
_TOLD, _LOGGED = (f"\r\n{name}: ".encode() for name in (RECORDED_AT, LOGGED_AT))
_NO_HEADERS = b"NATS/1.0\r\n\r\n"


@dataclass(slots=True)
class RestoreBatch:
    """Messages that follow one another in the log."""

    records: list[RawRecord] = field(default_factory=list[RawRecord])
    blocks: list[bytes] = field(default_factory=list[bytes])
    """The headers of each as they are published, without the batch's own."""
    size: int = 0
    ids: set[str] = field(default_factory=set[str])
    lasts: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Of each subject in it, the position of its last message."""

    @property
    def first(self) -> int:
        return self.records[0][0]

    @property
    def last(self) -> int:
        return self.records[-1][0]

    def frames(self, batch_id: str) -> tuple[bytes, bytes]:
        """(all but the last as frames, the headers of the last): the last one asks for an answer.

        The server stores nothing of it unless its log ends right before.
        """
        before: list[bytes] = []
        expected = b"Nats-Expected-Last-Sequence: %d\r\n" % (self.first - 1)
        name, headers = batch_id.encode(), b""
        for number, (record, block) in enumerate(zip(self.records, self.blocks, strict=True), 1):
            headers = b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b" % (block[:-2], name, number, expected)
            expected = b""
            if number < len(self.records):
                before.append(publish_frame(record[2], record[4], headers=headers + b"\r\n"))
        return b"".join(before), headers + b"Nats-Batch-Commit: 1\r\n\r\n"


def batches(archive: ArchiveReader, start: int) -> Iterator[RestoreBatch]:
    """The records from a position on; raises `ArchiveBroken` where they do not follow one another.

    They are cut in the same places whether they were published again before or not.
    """
    sealed = archive.manifest
    batch = RestoreBatch()
    for page in archive.records(start, sealed.last + 1):
        for record in page:
            _check_subject(sealed, record)
            block = _kept(record)
            bare = _EXPECTATION.sub(b"", block)
            size = len(record[2]) + len(bare) + len(record[4])
            event_id = header(bare, MSG_ID)
            # One batch cannot hold an id twice; the log can, if long enough lay between them.
            full = len(batch.records) == BATCH_MAX or batch.size + size > BATCH_BYTES or event_id in batch.ids
            if full and batch.records:
                yield batch
                batch = RestoreBatch()
            batch.records.append(record)
            batch.blocks.append(block if _may_expect(sealed, record, batch.lasts) else bare)
            batch.lasts[record[2]] = record[0]
            batch.size += size
            if event_id is not None:
                batch.ids.add(event_id)
    if batch.records:
        yield batch


def _check_subject(sealed: Archive, record: RawRecord) -> None:
    """Nothing may be published but to the log: whoever restores may do anything, and a record names its subject."""
    position, _, subject, _, _ = record
    if not subject.startswith(f"{sealed.stream}.".encode()) or subject.count(b".") != 2:
        where = cut(subject.decode("utf-8", "replace"))
        raise ArchiveBroken(
            sealed.url, f"position {position:,} is on {where!r}, no subject of the log {sealed.stream!r}"
        )


def _may_expect(sealed: Archive, record: RawRecord, lasts: Mapping[bytes, int]) -> bool:
    """Whether the server can check what the record expects, when `lasts` are the subjects' last positions in its batch.

    It cannot for the second message of a subject in a batch, so that is done here, and not where what is expected lies
    before the archive's first position.
    """
    position, _, subject, block, _ = record
    expected = number_of(block, EXPECTED)
    if expected is None or _OF_ANOTHER in block or 0 < expected < sealed.first:
        return False
    before = lasts.get(subject, expected)
    if expected != before:
        reason = f"position {position} was written after {expected}, but {before} came before it"
        raise ArchiveBroken(sealed.url, reason)
    return subject not in lasts


def lasting(record: RawRecord) -> tuple[int, bytes, bytes, bytes]:
    """(position, subject, headers, body): what is the same however often a record is published again."""
    position, _, subject, _, body = record
    return position, subject, _EXPECTATION.sub(b"", _kept(record)), body


def _kept(record: RawRecord) -> bytes:
    """The header block without what was said to the server, and with the time."""
    block = _TO_THE_SERVER.sub(b"", record[3] or _NO_HEADERS)
    names = [_TOLD, _LOGGED] if is_imported(block) else [_TOLD]
    missing = [name for name in names if name not in block]
    kept = block.rstrip(b"\r\n")
    if missing:
        second, nanosecond = divmod(record[1], 1_000_000_000)
        time = f"{_second(second)}.{nanosecond:09d}Z".encode()
        kept += b"".join(name + time for name in missing)
    return kept + b"\r\n\r\n"


@lru_cache(maxsize=64)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
