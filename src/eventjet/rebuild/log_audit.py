"""`LogAudit` checks a whole log record by record, and compares it with an archive if there is one. PURE.

Records are taken in the order of their positions. The audit needs some 120 bytes of memory for each aggregate, and
30 MB for event ids, however long the log is; it keeps no records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import merge
from itertools import groupby, repeat
from types import MappingProxyType

from eventjet.archive.republish import lasting
from eventjet.codec.headers import (
    BATCH_ID,
    BATCH_NUMBER,
    EXPECTED,
    RECORDED_AT,
    TYPE,
    VERSION,
    RawRecord,
    event_id_of,
    header,
    logged_at,
    number_of,
    open_batch,
    skipped_by,
)
from eventjet.codec.records import Decoder, broken, packed, unpacked
from eventjet.codec.subjects import entity_of
from eventjet.errors import UndecodableEvent, UnknownEvent
from eventjet.findings import Finding, Level
from eventjet.projections.app_ref import Application

SKEW_S = 5.0
"""How many seconds an event may be earlier than the event before it: clocks of servers differ."""
IDS_KEPT = 100_000
"""An id that is used twice is noticed when the two events are at most this many events apart, and sometimes when they
are up to twice as many apart."""

_TEXT_MAX = 300
"""The maximum number of characters shown of subjects and other text from the log."""
_RECORDED_AT = f"\r\n{RECORDED_AT}: ".encode()
_BATCH_HEADER = f"\r\n{BATCH_ID}: ".encode()


class Kind(StrEnum):
    """The kinds of faults of a log, which `EXPLAINED` explains; each is the `check` of its `Finding`."""

    SETTING = "setting"
    GONE = "gone"
    ARCHIVED = "archived"
    END = "end"
    DIFFERS = "differs"
    TORN = "torn"
    CHAIN = "chain"
    FOREIGN = "foreign"
    UNDECODABLE = "undecodable"
    UNKNOWN = "unknown"
    BODY = "body"
    SKIPPED = "skipped"
    ID = "id"
    TIME = "time"


def _explanation(kind: Kind, level: Level = Level.FAULT, *, what: str, cost: str, fix: str) -> Finding:
    return Finding("log", kind.value, level, what, cost, fix)


EXPLAINED: Mapping[Kind, Finding] = {
    Kind.SETTING: _explanation(
        Kind.SETTING,
        Level.WARNING,
        what="The stream may lose events by its own settings",
        cost="The server drops events to keep such a limit, or lets somebody delete them, and tells nobody.",
        fix="First of all `eventjet init --repair`, which sets them back as declared.",
    ),
    Kind.GONE: _explanation(
        Kind.GONE,
        what="Events are gone",
        cost="Workers stop and rebuilds refuse (LogIncomplete); an aggregate they belong to cannot be loaded, or has "
        "begun again at version 1. The live read models may be the last that know of them.",
        fix="Only a copy has them: an archive (`eventjet audit --archive URL` looks into one), a mirror or a "
        "backup of the stream. Put that in the stream's place. If there is none, `eventjet init --repair "
        "--accept-loss` goes on without them.",
    ),
    Kind.ARCHIVED: _explanation(
        Kind.ARCHIVED,
        what="Events are gone from the log, and the archive has them",
        cost="Workers stop, and rebuilds from the log alone refuse (LogIncomplete); an aggregate they belong to cannot "
        "be loaded, or has begun again at version 1.",
        fix="Stop writers and workers. `eventjet archive URL` seals what came since, if nothing of that is gone; "
        "then back the stream up, delete it, and `eventjet restore URL` publishes all of it again, at the same "
        "positions. Until then `eventjet rebuild --from-archive URL` makes true read models.",
    ),
    Kind.END: _explanation(
        Kind.END,
        what="The log has lost its end, and the archive has it",
        cost="The next save takes a position that another event had, and from then on log and archive tell two pasts. "
        "Read models that saw the end stop with LogRolledBack.",
        fix="Stop what writes, at once. `eventjet restore URL` fills the log up to the archive's end, unless the "
        "two tell different pasts already.",
    ),
    Kind.DIFFERS: _explanation(
        Kind.DIFFERS,
        what="Log and archive tell different pasts",
        cost="One of the two is not what was recorded, and rebuilds from the two give different rows.",
        fix="Compare with a mirror, a backup, or what the business knows. If the log is right, seal it into a new "
        "folder (`eventjet archive OTHER_URL`); if the archive is, back the stream up, delete it, and "
        "`eventjet restore URL`.",
    ),
    Kind.TORN: _explanation(
        Kind.TORN,
        what="Saves are stored in part",
        cost="What was decided together is not all there. The save raised SaveTorn, and so does the "
        "same command with the same id.",
        fix="The events that are there stay valid and count. `eventjet history AGGREGATE ID` shows them; record "
        "what is missing with a command of its own, or its opposite. Do not lower limits of the stream while "
        "something writes.",
    ),
    Kind.CHAIN: _explanation(
        Kind.CHAIN,
        what="Histories are broken",
        cost="`load` and `execute` of these aggregates raise HistoryBroken, so nothing can be decided on them, and a "
        "projection that takes such an event stops there, unless it quarantines it.",
        fix="Where events are gone, too, that is the cause: bring them back. Otherwise another program wrote here: "
        "`eventjet history AGGREGATE ID` shows what, its right to publish has to go, and `eventjet skip POSITION "
        "--reason …` has everybody pass over the first one of each aggregate.",
    ),
    Kind.FOREIGN: _explanation(
        Kind.FOREIGN,
        what="Events are on subjects that are not theirs",
        cost="The aggregates of these subjects cannot be loaded, and a projection that takes such events stops there, "
        "unless it quarantines them.",
        fix="If their aggregate was renamed, give it its name back: `@aggregate` with the name in the subject. "
        "Otherwise another program published them: take its right to publish to these subjects away. "
        "`eventjet tail --from POSITION` shows what it wrote.",
    ),
    Kind.UNDECODABLE: _explanation(
        Kind.UNDECODABLE,
        what="Events cannot be decoded",
        cost="Their aggregates cannot be loaded, and a projection stops there, unless it quarantines them.",
        fix="`eventjet tail --from POSITION` shows one. If a newer version of the app wrote it, deploy that; "
        "otherwise `eventjet skip POSITION --reason …` has everybody pass over it.",
    ),
    Kind.UNKNOWN: _explanation(
        Kind.UNKNOWN,
        what="Events are of types or schemas that the app does not declare",
        cost="Their aggregates cannot be loaded, and projections stop there.",
        fix="If a newer release recorded them, deploy that. If they have other names now, say so with `formerly` "
        "of their events; add the upcaster that is missing. Only what nobody needs goes into `retired_events`: it is "
        "passed over.",
    ),
    Kind.BODY: _explanation(
        Kind.BODY,
        what="Large bodies are missing or damaged",
        cost="`jet.blobs.read` raises BlobMissing or BlobDamaged for them; the events and all that is folded from them "
        "are not touched.",
        fix="`eventjet objects restore URL` brings back what an archive has. Other content gets its digest "
        "with `await jet.blobs.put(content)`.",
    ),
    Kind.SKIPPED: _explanation(
        Kind.SKIPPED,
        Level.NOTE,
        what="Events are skipped",
        cost="Every reader passes over them, as somebody declared with `eventjet skip`.",
        fix="None is needed; `eventjet tail --from POSITION` shows one.",
    ),
    Kind.ID: _explanation(
        Kind.ID,
        Level.WARNING,
        what="Event ids are missing or used twice",
        cost="What goes by event ids (consumers that skip what they have seen, `resolve`) takes two events for one.",
        fix="eventjet gives every event an id of its own: find what else publishes here, or what republished a "
        "backup, and take its right to publish away.",
    ),
    Kind.TIME: _explanation(
        Kind.TIME,
        Level.NOTE,
        what="Times run backwards",
        cost="`load(at=…)` and `tail --since` may be off by as much; order goes by position and is not touched.",
        fix="Compare the clocks of the NATS servers.",
    ),
}
"""The explanation of each kind, in the order in which the kinds are reported: the most urgent first."""

MISSING = frozenset({Kind.GONE, Kind.ARCHIVED})
"""The kinds about positions that are missing in the log."""
NOTES = frozenset(kind for kind, finding in EXPLAINED.items() if finding.level is Level.NOTE)
"""The kinds that are notes only, and do not make a log unsound."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a fault: one position, or a range of positions."""

    first: int
    """The first position; 0 when the fault is in the stream's settings."""
    last: int
    subject: str
    """The subject; empty when it is not known, or when there are several."""
    what: str


@dataclass(slots=True)
class LogFinding:
    """All faults of one kind."""

    kind: Kind
    count: int = 0
    """How many faults of this kind there are."""
    positions: int = 0
    """How many positions the faults cover; a position counts once for each of its faults."""
    examples: list[Place] = field(default_factory=list[Place])
    """The places of the first faults."""

    @property
    def finding(self) -> Finding:
        """The explanation of this kind: its meaning, its consequences and its remedy."""
        return EXPLAINED[self.kind]


class LogAudit:
    """One pass over a log that should have the positions `first` to `last`: `take` every record, then `finish`."""

    def __init__(
        self,
        app: Application,
        *,
        last: int,
        first: int = 1,
        examples: int = 5,
        skipped: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Keep `examples` places of each kind; `skipped` maps the positions with a skip marker to the reasons."""
        self.events = 0
        """How many records of the log were taken."""
        self.compared = 0
        """How many of these records are in the archive, too."""
        self._findings: dict[Kind, LogFinding] = {}
        self._examples = examples
        self._skipped = skipped
        self._decode = Decoder(app.catalog.of_log(skipped))
        self._app = app
        self._first = first
        self._last = last
        self._position = first - 1
        self._time_ns = 0
        self._missing_run: tuple[Kind, int] | None = None
        self._run_subjects: set[bytes] = set()
        # The position and version of each aggregate's last event, packed in one number, by the hash of the subject.
        # Two of a million subjects have the same hash in one of 40 million logs.
        self._last_events: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._older_ids: dict[int, int] = {}
        # The last record that was taken, if its atomic batch should go on after it.
        self._open_batch: RawRecord | None = None

    @property
    def aggregates(self) -> int:
        """How many aggregates there are in the records so far."""
        return len(self._last_events)

    def take(self, record: RawRecord | None, archived: RawRecord | None = None) -> None:
        """Check the records of the log and of the archive at the next position that is in either of them."""
        position = (record or archived or _NO_RECORD)[0]
        if record is None and archived is not None and position < self._first:
            self._continue_history(archived)
            return
        if position > self._position + 1:
            self._add_missing(Kind.GONE, self._position + 1)
        self._position = position
        if record is None:
            if archived is not None:
                kind = Kind.ARCHIVED if position <= self._last else Kind.END
                self._add_missing(kind, position, archived[2])
                self._continue_history(archived)
            return
        if self._missing_run is not None:
            self._end_run(position - 1)
        self.events += 1
        self._check_batch(record)
        if archived is not None:
            self._compare(record, archived)
        readable = self._check_event(record)
        self._check_id(record, readable)

    def finish(self, *, grown: bool = False) -> tuple[LogFinding, ...]:
        """Return the findings by kind, the most urgent kind first.

        If the log has `grown` meanwhile, a batch that was incomplete at its end is not reported, because the rest may
        have been stored since.
        """
        if self._open_batch is not None and not grown and self._open_batch[0] == self._position == self._last:
            self._report_torn(self._open_batch)
        if self._position < self._last:
            self._add_missing(Kind.GONE, self._position + 1)
            self._position = self._last
        self._end_run(self._position)
        return tuple(self._findings[kind] for kind in EXPLAINED if kind in self._findings)

    def setting(self, what: str) -> None:
        """Add a finding about the stream's settings."""
        self._add(Kind.SETTING, 0, 0, "", what)

    def body(self, position: int, what: str) -> None:
        """Add a finding about a large body that the event at a position refers to."""
        self._add(Kind.BODY, position, position, "", what)

    def _add(self, kind: Kind, first: int, last: int, subject: str, what: str) -> None:
        finding = self._findings.setdefault(kind, LogFinding(kind))
        finding.count += 1
        finding.positions += last - first + 1
        if len(finding.examples) < self._examples:
            finding.examples.append(Place(first, last, subject[:_TEXT_MAX], what[:_TEXT_MAX]))

    def _continue_history(self, archived: RawRecord) -> None:
        """Take an event that is only in the archive as the predecessor of its aggregate's next event."""
        self._last_events[hash(archived[2])] = packed(archived[0], number_of(archived[3], VERSION) or 0)

    def _add_missing(self, kind: Kind, first: int, subject: bytes = b"") -> None:
        """Continue the current range of missing positions, or begin a new range at position `first`."""
        if self._missing_run is None or self._missing_run[0] is not kind:
            self._end_run(first - 1)
            self._missing_run = kind, first
        if len(self._run_subjects) < 3:
            self._run_subjects.add(subject)

    def _end_run(self, last: int) -> None:
        if self._missing_run is None:
            return
        kind, first = self._missing_run
        self._missing_run = None
        subjects = sorted(filter(None, self._run_subjects))
        self._run_subjects.clear()
        subject = subjects[0].decode("utf-8", "replace") if len(subjects) == 1 else ""
        what = "1 event" if first == last else f"{last - first + 1:,} events"
        if len(subjects) > 1:
            what += " of several aggregates"
        self._add(kind, first, last, subject, what)

    def _compare(self, record: RawRecord, archived: RawRecord) -> None:
        self.compared += 1
        if record == archived or lasting(record) == lasting(archived):
            return
        ours, theirs = event_id_of(record), event_id_of(archived)
        what = f"the log has the event {ours or 'without an id'}, and the archive {theirs or 'one without an id'}"
        if ours == theirs:
            parts = zip(("subject", "headers", "body"), lasting(record)[1:], lasting(archived)[1:], strict=True)
            what = f"not the archive's: {' and '.join(name for name, logged, sealed in parts if logged != sealed)}"
        self._report(Kind.DIFFERS, record, what)

    def _check_batch(self, record: RawRecord) -> None:
        """Check that the messages of an atomic batch (ADR-50) follow one another up to the message that ends it."""
        previous, block = self._open_batch, record[3]
        is_batched = _BATCH_HEADER in block
        if previous is not None:
            self._open_batch = None
            same_batch = is_batched and header(block, BATCH_ID) == header(previous[3], BATCH_ID)
            # If positions between the two records are missing, that has been reported already.
            if not same_batch and record[0] == previous[0] + 1:
                self._report_torn(previous)
        if is_batched and open_batch(block) is not None:
            self._open_batch = record

    def _report_torn(self, record: RawRecord) -> None:
        count = number_of(record[3], BATCH_NUMBER) or 1
        batch = header(record[3], BATCH_ID) or ""
        what = f"the end of the batch {batch} is not in the log, and {count} of its messages are"
        self._report(Kind.TORN, record, what)

    def _check_id(self, record: RawRecord, readable: bool) -> None:
        event_id = event_id_of(record)
        if not event_id:
            if readable:
                self._report(Kind.ID, record, "it has no id")
            return
        key, position = hash(event_id), record[0]
        previous_position = self._ids.get(key) or self._older_ids.get(key)
        if previous_position is not None:
            self._report(Kind.ID, record, f"its id {event_id} is that of position {previous_position}, too")
        self._ids[key] = position
        if len(self._ids) >= IDS_KEPT:
            self._older_ids, self._ids = self._ids, {}

    def _check_event(self, record: RawRecord) -> bool:
        """Check the event's body, time and place in its history; return whether the event can be decoded."""
        position, time_ns, subject, block, _ = record
        key = hash(subject)
        last = self._last_events.get(key, 0)
        if skipped_by(subject) is not None:
            return True
        if position in self._skipped:
            self._take_skipped(record, unpacked(last)[1])
            return False
        if not last and (fault := _subject_fault(subject)):
            self._report(Kind.UNDECODABLE, record, fault)
            return False
        readable = True
        try:
            version, _, expected, *_ = self._decode.link(record)
            if _RECORDED_AT in block:
                time_ns = int(logged_at(record).timestamp() * 1e9)
        except (UnknownEvent, UndecodableEvent) as error:
            self._report_undecodable(record, error)
            readable = False
            version, expected = number_of(block, VERSION), number_of(block, EXPECTED)
        if self._time_ns - time_ns > SKEW_S * 1e9:
            back_s = (self._time_ns - time_ns) / 1e9
            self._report(Kind.TIME, record, f"{back_s:,.1f} s earlier than the event before it")
        self._time_ns = time_ns
        previous_position, previous_version = unpacked(last)
        if version is None:
            version = previous_version
        elif (version != previous_version + 1 or (expected is not None and expected != previous_position)) and (
            # A predecessor before the beginning of the log cannot be compared.
            last or self._first == 1 or not (expected is None or 0 < expected < self._first)
        ):
            self._report(Kind.CHAIN, record, broken(version, expected, previous_position, previous_version))
        self._last_events[key] = packed(position, version)
        return readable

    def _take_skipped(self, record: RawRecord, version: int) -> None:
        """Report a record with a skip marker; it counts as a version if its version is the next, as in a fold."""
        self._report(Kind.SKIPPED, record, self._skipped[record[0]])
        record_version = number_of(record[3], VERSION)
        self._last_events[hash(record[2])] = packed(
            record[0], version + 1 if record_version == version + 1 else version
        )

    def _report_undecodable(self, record: RawRecord, error: UnknownEvent | UndecodableEvent) -> None:
        if isinstance(error, UnknownEvent):
            self._report(Kind.UNKNOWN, record, f"{error.type_name} schema {error.schema}")
        elif (owner := self._declaring_aggregate(record)) is not None:
            self._report(Kind.FOREIGN, record, f"{_type_of(record)} is an event of {owner!r}")
        else:
            self._report(Kind.UNDECODABLE, record, f"{error.type_name}: {error.reason}")

    def _declaring_aggregate(self, record: RawRecord) -> str | None:
        """Return the aggregate type that declares the event's type, if the subject is that of another type."""
        declared = self._app.catalog.named(_type_of(record))
        if declared is None or declared.aggregate is None:
            return None
        prefix = f"{self._app.name}.{declared.aggregate}.".encode()
        return None if record[2].startswith(prefix) else declared.aggregate

    def _report(self, kind: Kind, record: RawRecord, what: str) -> None:
        self._add(kind, record[0], record[0], record[2].decode("utf-8", "replace"), what)


def side_by_side(
    log: Iterable[RawRecord], archive: Iterable[RawRecord]
) -> Iterator[tuple[RawRecord | None, RawRecord | None]]:
    """Yield the records of log and archive in pairs, by position, with None where one of them has no record."""
    sides = [zip(repeat(side), records) for side, records in enumerate((log, archive))]
    for _, same_position in groupby(merge(*sides, key=lambda item: (item[1][0], item[0])), key=lambda item: item[1][0]):
        pair = dict(same_position)
        yield pair.get(0), pair.get(1)


def _subject_fault(subject: bytes) -> str:
    try:
        entity_of(subject)
    except ValueError as error:
        return f"its subject names no aggregate ({error})"
    return ""


def _type_of(record: RawRecord) -> str:
    return header(record[3], TYPE) or "?"


_NO_RECORD: RawRecord = (0, 0, b"", b"", b"")
