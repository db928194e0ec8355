"""`LogAudit`: a whole log looked at, record by record, beside an archive of it when there is one. PURE.

Records come in the order of their positions. Memory: some 120 bytes for each aggregate, and 30 MB for event ids,
however long the log is; nothing of the log itself is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from eventjet.archive.batches import lasting
from eventjet.codec.headers import (
    BATCH_ID,
    BATCH_NUMBER,
    EXPECTED,
    MSG_ID,
    RECORDED_AT,
    VERSION,
    RawRecord,
    header,
    logged_at,
    number_of,
    open_batch,
    voided_by,
)
from eventjet.codec.records import Decoder, broken, packed, unpacked
from eventjet.codec.subjects import entity_of
from eventjet.errors import UndecodableEvent, UnknownEvent
from eventjet.projections.app_ref import Application
from eventjet.rebuild.findings import Findings, Found, Kind

SKEW_S = 5.0
"""How far the time of an event may lie before that of the event before it: clocks of servers differ."""
IDS_KEPT = 100_000
"""An id used twice is found when its uses are so many events apart, or fewer; twice as many at the most."""

_TOLD_TIME = f"\r\n{RECORDED_AT}: ".encode()
_ID = f"NATS/1.0\r\n{MSG_ID}: ".encode()
_BATCH = f"\r\n{BATCH_ID}: ".encode()


class LogAudit:
    """One pass over a log whose positions should be `first` to `last`. `take` every record, then `finish`."""

    def __init__(
        self,
        app: Application,
        *,
        last: int,
        first: int = 1,
        examples: int = 5,
        voids: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Keep `examples` findings of each kind; `voids` is what the log declares void, with the reasons."""
        self.events = 0
        """Records of the log that were taken."""
        self.compared = 0
        """Of those, how many the archive had, too."""
        self._findings = Findings(examples)
        self._voids = voids
        self._decode = Decoder(app.catalog.of_log(voids))
        self._app = app
        self._first = first
        self._last = last
        self._position = first - 1
        self._time_ns = 0
        self._run: tuple[Kind, int] | None = None
        self._run_subjects: set[bytes] = set()
        # Of an aggregate, by the hash of its subject: position and version of its last event, in one number. Two
        # subjects of a million have the same hash once in 40 million logs.
        self._lasts: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._older_ids: dict[int, int] = {}
        # The last record that was taken, where its batch should go on after it.
        self._open: RawRecord | None = None

    @property
    def aggregates(self) -> int:
        """How many it has seen."""
        return len(self._lasts)

    def take(self, record: RawRecord | None, archived: RawRecord | None = None) -> None:
        """What the log, and the archive, have at the next position that either of them has."""
        position = (record or archived or _NONE)[0]
        if record is None and archived is not None and position < self._first:
            self._follow(archived)
            return
        if position > self._position + 1:
            self._missing(Kind.GONE, self._position + 1)
        self._position = position
        if record is None:
            if archived is not None:
                kind = Kind.ARCHIVED if position <= self._last else Kind.END
                self._missing(kind, position, archived[2])
                self._follow(archived)
            return
        if self._run is not None:
            self._end_run(position - 1)
        self.events += 1
        self._check_batch(record)
        if archived is not None:
            self._compare(record, archived)
        readable = self._check_event(record)
        self._check_id(record, readable)

    def finish(self, *, grown: bool = False) -> tuple[Found, ...]:
        """What was found. A log that has `grown` since may have the rest of what was being stored at its end."""
        if self._open is not None and not grown and self._open[0] == self._position == self._last:
            self._torn(self._open)
        if self._position < self._last:
            self._missing(Kind.GONE, self._position + 1)
            self._position = self._last
        self._end_run(self._position)
        return self._findings.by_kind()

    def setting(self, what: str) -> None:
        """Add a finding about the stream."""
        self._findings.add(Kind.SETTING, 0, 0, "", what)

    def _follow(self, archived: RawRecord) -> None:
        """What only the archive has still is what later events follow."""
        self._lasts[hash(archived[2])] = packed(archived[0], number_of(archived[3], VERSION) or 0)

    def _missing(self, kind: Kind, first: int, subject: bytes = b"") -> None:
        """Go on with the run of what is missing, or begin another one at position `first`."""
        if self._run is None or self._run[0] is not kind:
            self._end_run(first - 1)
            self._run = kind, first
        if len(self._run_subjects) < 3:
            self._run_subjects.add(subject)

    def _end_run(self, last: int) -> None:
        if self._run is None:
            return
        kind, first = self._run
        self._run = None
        subjects = sorted(filter(None, self._run_subjects))
        self._run_subjects.clear()
        subject = subjects[0].decode("utf-8", "replace") if len(subjects) == 1 else ""
        what = "1 event" if first == last else f"{last - first + 1:,} events"
        if len(subjects) > 1:
            what += " of several aggregates"
        self._findings.add(kind, first, last, subject, what)

    def _compare(self, record: RawRecord, archived: RawRecord) -> None:
        self.compared += 1
        if record == archived or lasting(record) == lasting(archived):
            return
        ours, theirs = _id_of(record), _id_of(archived)
        what = f"the log has the event {ours or 'without an id'}, and the archive {theirs or 'one without an id'}"
        if ours == theirs:
            parts = zip(("subject", "headers", "body"), lasting(record)[1:], lasting(archived)[1:], strict=True)
            what = f"not the archive's: {' and '.join(name for name, one, other in parts if one != other)}"
        self._found(Kind.DIFFERS, record, what)

    def _check_batch(self, record: RawRecord) -> None:
        """Messages of one atomic batch (ADR-50) follow one another, and the last of them says that it is."""
        before, block = self._open, record[3]
        is_batched = _BATCH in block
        if before is not None:
            self._open = None
            same = is_batched and header(block, BATCH_ID) == header(before[3], BATCH_ID)
            # Where positions between the two are gone, that has been found.
            if not same and record[0] == before[0] + 1:
                self._torn(before)
        if is_batched and open_batch(block) is not None:
            self._open = record

    def _torn(self, record: RawRecord) -> None:
        count = number_of(record[3], BATCH_NUMBER) or 1
        batch = header(record[3], BATCH_ID) or ""
        what = f"the end of the batch {batch} is not in the log, and {count} of its messages are"
        self._found(Kind.TORN, record, what)

    def _check_id(self, record: RawRecord, readable: bool) -> None:
        event_id = _id_of(record)
        if not event_id:
            if readable:
                self._found(Kind.ID, record, "it has no id")
            return
        key, position = hash(event_id), record[0]
        before = self._ids.get(key) or self._older_ids.get(key)
        if before is not None:
            self._found(Kind.ID, record, f"its id {event_id} is that of position {before}, too")
        self._ids[key] = position
        if len(self._ids) >= IDS_KEPT:
            self._older_ids, self._ids = self._ids, {}

    def _check_event(self, record: RawRecord) -> bool:
        """Whether it can be read."""
        position, time_ns, subject, block, _ = record
        key = hash(subject)
        last = self._lasts.get(key, 0)
        if voided_by(subject) is not None:
            return True
        if position in self._voids:
            self._void(record, unpacked(last)[1])
            return False
        if not last and (fault := _subject_fault(subject)):
            self._found(Kind.UNDECODABLE, record, fault)
            return False
        readable = True
        try:
            version, _, expected, *_ = self._decode.link(record)
            if _TOLD_TIME in block:
                time_ns = int(logged_at(record).timestamp() * 1e9)
        except (UnknownEvent, UndecodableEvent) as error:
            self._unreadable(record, error)
            readable = False
            version, expected = number_of(block, VERSION), number_of(block, EXPECTED)
        if self._time_ns - time_ns > SKEW_S * 1e9:
            back_s = (self._time_ns - time_ns) / 1e9
            self._found(Kind.TIME, record, f"{back_s:,.1f} s earlier than the event before it")
        self._time_ns = time_ns
        before, version_before = unpacked(last)
        if version is None:
            version = version_before
        elif (version != version_before + 1 or (expected is not None and expected != before)) and (
            # What lies before the beginning of the log cannot be compared.
            last or self._first == 1 or not (expected is None or 0 < expected < self._first)
        ):
            self._found(Kind.CHAIN, record, broken(version, expected, before, version_before))
        self._lasts[key] = packed(position, version)
        return readable

    def _void(self, record: RawRecord, version: int) -> None:
        """Told, and it keeps its version if that is the next one, as a fold has it."""
        self._found(Kind.VOID, record, self._voids[record[0]])
        told = number_of(record[3], VERSION)
        self._lasts[hash(record[2])] = packed(record[0], version + 1 if told == version + 1 else version)

    def _unreadable(self, record: RawRecord, error: UnknownEvent | UndecodableEvent) -> None:
        if isinstance(error, UnknownEvent):
            self._found(Kind.UNKNOWN, record, f"{error.type_name} schema {error.schema}")
        elif (owner := self._stranger(record)) is not None:
            self._found(Kind.FOREIGN, record, f"{_type_of(record)} is an event of {owner!r}")
        else:
            self._found(Kind.UNDECODABLE, record, f"{error.type_name}: {error.reason}")

    def _stranger(self, record: RawRecord) -> str | None:
        """The aggregate that its type belongs to, where its subject is another's."""
        declared = self._app.catalog.named(_type_of(record))
        if declared is None or declared.aggregate is None:
            return None
        own = f"{self._app.name}.{declared.aggregate}.".encode()
        return None if record[2].startswith(own) else declared.aggregate

    def _found(self, kind: Kind, record: RawRecord, what: str) -> None:
        self._findings.add(kind, record[0], record[0], record[2].decode("utf-8", "replace"), what)


def side_by_side(
    log: Iterable[RawRecord], archive: Iterable[RawRecord]
) -> Iterator[tuple[RawRecord | None, RawRecord | None]]:
    """What either has, by position."""
    archived = iter(archive)
    other = next(archived, None)
    for record in log:
        while other is not None and other[0] < record[0]:
            yield None, other
            other = next(archived, None)
        if other is not None and other[0] == record[0]:
            yield record, other
            other = next(archived, None)
        else:
            yield record, None
    while other is not None:
        yield None, other
        other = next(archived, None)


def _id_of(record: RawRecord) -> str:
    block = record[3]
    end = block.find(b"\r\n", len(_ID)) if block.startswith(_ID) else -1
    return block[len(_ID) : end].decode("utf-8", "replace") if end >= 0 else header(block, MSG_ID) or ""


def _subject_fault(subject: bytes) -> str:
    try:
        entity_of(subject)
    except ValueError as error:
        return f"its subject names no aggregate ({error})"
    return ""


def _type_of(record: RawRecord) -> str:
    return header(record[3], "Ej-Type") or "?"


_NONE: RawRecord = (0, 0, b"", b"", b"")
