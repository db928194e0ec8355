"""Decode records of the log to events, and check each against its predecessor on the same subject. PURE.

`Decoder` turns a record into an event, for all readers alike. Headers are written in one order; a block in that order
is parsed from its two ends without extracting headers that are not needed. Other blocks are put in order first.

`Chain` is the predecessor check: it checks that a record follows the previous record of its subject, from whatever
position a reader started. Only the direct predecessor counts: the record's version has to be the next, and the position
the record was written after has to be that of the predecessor. A reader remembers the records it has seen. For other
subjects it fetches the record at the expected position, since the server stored only records whose expected last
message of the subject was right. So all readers of a log come to the same result, whatever their start position and
however little they remember.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias, cast

from eventjet.codec.catalog import Catalog, Resolved
from eventjet.codec.headers import (
    ENCODING,
    EXPECTED,
    MSG_ID,
    RECORDED_AT,
    SCHEMA,
    TYPE,
    VERSION,
    RawRecord,
    brief,
    command_of,
    header,
    metadata_of,
    number_of,
    reason_in,
    recorded_at,
    skipped_by,
    stored_time,
    time_in_header,
    undecodable,
)
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_of
from eventjet.domain.history import SKIPPED, Link
from eventjet.domain.recorded import LateFields, Recorded, recorded
from eventjet.errors import CodecError, UnexpectedExit, UnknownEvent

SUBJECTS_MAX = 250_000
"""Subjects whose last event is remembered; at most twice as many, about 150 bytes each."""
_FETCHED_MAX = 100
"""Limit of records fetched at once, since their bodies come with them."""

_VERSION_BITS = 32
_VERSION_MAX = (1 << _VERSION_BITS) - 1
_OTHER_SUBJECT_LINE = re.compile(rb"\r\nNats-Expected-Last-Subject-Sequence-Subject:", re.IGNORECASE)
"""A header with which the server compares the last message of other subjects than the record's own."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MSG_ID, _EXPECTED, _TYPE, _SCHEMA, _VERSION = (
    f"{name}: ".encode() for name in (MSG_ID, EXPECTED, TYPE, SCHEMA, VERSION)
)
_TYPE_LINE, _VERSION_LINE, _EXPECTED_LINE = (b"\r\n" + name for name in (_TYPE, _VERSION, _EXPECTED))
_ENCODING_LINE, _RECORDED_AT_LINE = (f"\r\n{name}: ".encode() for name in (ENCODING, RECORDED_AT))
_ID_START = b"NATS/1.0\r\n" + _MSG_ID
_BLOCK_END = b"\r\n\r\n"
_TIMES_END_NS = 253_402_300_800 * 10**9
"""The end of the times that Python can express, in nanoseconds since 1970."""
_KINDS_MAX = 10_000
_link: Callable[[type[Link], tuple[Any, ...]], Link] = cast("Any", tuple).__new__
"""Makes a `Link` in half the time of its constructor."""

_Kind: TypeAlias = tuple[Callable[[bytes], Any] | None, str | None, int]
"""(decoder of the body, None for an event that is passed over; aggregate of the event; version)."""
_Headers: TypeAlias = tuple[Callable[[bytes], Any] | None, str | None, int, int, int | None, bool]
"""The fields of `_Kind`, the latest possible position before the record, the expected position that its headers give,
and whether the block has no further headers."""


class Earlier(Protocol):
    """Access to earlier records of the log being read. Blocks; raises `StoreUnavailable` and `Unreachable`."""

    def at(self, positions: Sequence[int]) -> list[RawRecord | None]:
        """Return the record at each position; None for a position whose record is gone."""
        ...

    def before(self, subject: bytes, position: int) -> RawRecord | None:
        """Return the last record of a subject before a position; None if there is none."""
        ...


class Chain:
    """The predecessor check of one reader: the position and version of the last record of each subject it has seen."""

    __slots__ = (
        "_aggregates",
        "_announced",
        "_before",
        "_earlier",
        "_fetched",
        "_lasts",
        "_limit",
        "_older",
        "_skipped",
    )

    def __init__(
        self,
        earlier: Earlier,
        skipped: Collection[int] = (),
        aggregates: Collection[str] | None = None,
        limit: int = SUBJECTS_MAX,
    ) -> None:
        """Start with no remembered records.

        `aggregates` are those whose records the reader takes, None for all. `skipped` are the positions of skipped
        records, and may grow. `limit` is the number of subjects to remember.
        """
        self._earlier = earlier
        self._skipped = skipped
        self._aggregates = None if aggregates is None else frozenset(name.encode() for name in aggregates)
        self._limit = limit
        # Keyed by the hash of the subject. On a collision the check fails here, and `fault` asks the log.
        self._lasts: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._before = 0
        self._announced: Sequence[RawRecord] = ()
        self._fetched: dict[int, RawRecord | None] = {}

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Announce the records that are read next, so that their unknown predecessors are fetched in one request."""
        self._announced = records
        self._fetched.clear()

    def follows(self, subject: bytes, position: int, version: int, expected: int | None) -> bool:
        """Return whether a record certainly follows the last record of its subject, and remember it as the last.

        `expected` is the position the record was written after, 0 for none; None if its headers do not say. Makes no
        request: when the result is False, `fault` decides.
        """
        lasts = self._lasts
        key = hash(subject)
        last = lasts.get(key) or self._older.get(key, 0)
        lasts[key] = position << _VERSION_BITS | version
        if len(lasts) > self._limit:
            self._older, self._lasts = lasts, {}
        if expected is None:
            is_next = version == (last & _VERSION_MAX) + 1
        else:
            is_next = last + 1 == expected << _VERSION_BITS | version
        if is_next and last:
            return True
        self._before = last
        return False

    def fault(self, record: RawRecord, version: int, expected: int | None) -> str:
        """Return why the record just passed to `follows` does not follow its predecessor; empty if it does.

        Asks the log. The check that the server made when it stored the record is trusted, unless remembered records
        contradict it.
        """
        position, _, subject, block, _ = record
        # The later events of a save are stored at consecutive positions.
        before = position - 1 if expected is None else expected
        if not _OTHER_SUBJECT_LINE.search(block):
            predecessor = self._at(before, record) if before else None
            if before and predecessor is None:
                return ""  # the record is gone, which checks of the whole log report
            if before >= self._before >> _VERSION_BITS and self._is_next(predecessor, subject, version):
                return ""
        last, version_before = self._last_before(subject, position)
        if not last and self._at(1, record) is None:
            return ""  # the log has lost its beginning, which may have contained the predecessor
        if version == version_before + 1 and (expected in (None, last) or expected in self._skipped):
            return ""
        return broken(version, expected, last, version_before)

    def skip(self, record: RawRecord) -> None:
        """Remember a record of any kind as the last of its subject, without checking it."""
        position, _, subject, block, _ = record
        if not self._concerns(subject):
            return
        key = hash(subject)
        version = number_of(block, VERSION)
        is_skipped = position in self._skipped
        if version is not None and not is_skipped:
            self._keep(key, position, version)
            return
        last = self._lasts.get(key, self._older.get(key))
        if last is not None:
            self._keep(key, position, _after(last & _VERSION_MAX, version if is_skipped else None))

    def _concerns(self, subject: bytes) -> bool:
        if self._aggregates is None:
            return True
        _, _, rest = subject.partition(b".")
        return rest.partition(b".")[0] in self._aggregates

    def _keep(self, key: int, position: int, version: int) -> None:
        self._lasts[key] = packed(position, version)
        if len(self._lasts) > self._limit:
            self._older, self._lasts = self._lasts, {}

    def _is_next(self, predecessor: RawRecord | None, subject: bytes, version: int) -> bool:
        if predecessor is None:
            return version == 1
        return (
            predecessor[2] == subject
            and predecessor[0] not in self._skipped
            and number_of(predecessor[3], VERSION) == version - 1
        )

    def _last_before(self, subject: bytes, position: int) -> tuple[int, int]:
        """Return (position, version) of the last record of a subject before a position; zeros if there is none."""
        versionless: list[tuple[int, int | None]] = []
        last, version = 0, 0
        while (record := self._earlier.before(subject, position)) is not None:
            position, stated = record[0], number_of(record[3], VERSION)
            is_skipped = position in self._skipped
            if stated is not None and not is_skipped:
                last, version = position, stated
                break
            versionless.append((position, stated if is_skipped else None))
        for at, stated in reversed(versionless):
            last, version = at, _after(version, stated)
        return last, version

    def _at(self, position: int, record: RawRecord) -> RawRecord | None:
        if position not in self._fetched:
            positions = list(dict.fromkeys([position, *self._needed(record)]))[:_FETCHED_MAX]
            self._fetched.update(zip(positions, map(_without_body, self._earlier.at(positions)), strict=True))
        return self._fetched[position]

    def _needed(self, record: RawRecord) -> list[int]:
        """Return the positions of the predecessors that announced records after `record` will need as well."""
        needed: list[int] = []
        keys: set[int] = set()
        for position, _, subject, block, _ in self._announced:
            if position <= record[0]:
                continue
            key = hash(subject)
            if key in keys or key in self._lasts or key in self._older or not self._concerns(subject):
                continue
            keys.add(key)
            expected = number_of(block, EXPECTED)
            before = position - 1 if expected is None else expected
            if before and before not in self._fetched:
                needed.append(before)
                if len(needed) == _FETCHED_MAX:
                    break
        return needed


class Decoder:
    """Turns records into recorded events, of the classes in `only` if given.

    Returns None for a skipped record (if its skip marker is in the catalog or was read before), for a declared event
    outside `only`, for an event that is retired or of a retired aggregate, and for a record without a declared type on
    the subject of an aggregate that has no event in `only`. Raises `UnknownEvent` and `UndecodableEvent`, which carry
    position and bytes. With a `chain`, which takes the records of a log in order, an event that does not follow its
    predecessor on its subject is undecodable as well; fetching the predecessor raises `StoreUnavailable` and
    `Unreachable`.
    """

    __slots__ = ("_aggregates", "_catalog", "_chain", "_fronts", "_kinds", "_only", "_resolved", "_skipped")

    def __init__(self, catalog: Catalog, only: Collection[type] | None = None, chain: Chain | None = None) -> None:
        self._catalog = catalog
        self._chain = chain
        self._only = None if only is None else frozenset(only)
        self._aggregates = None if only is None else catalog.aggregates_of(only)
        self._resolved: dict[tuple[bytes, bytes], Resolved | None] = {}
        self._kinds: dict[bytes, _Kind] = {}
        """Known kinds, by the bytes of a block from its type on, for blocks that end after the version."""
        self._fronts: dict[bytes, _Kind] = {}
        """Known kinds, by the bytes from the type to the version, whatever follows."""
        self._skipped = catalog.skipped

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Announce the records that are decoded next, so that the chain fetches their predecessors in one request."""
        if self._chain is not None:
            self._chain.expect(records)

    def __call__(self, record: RawRecord) -> Recorded[Any] | None:
        position, time_ns, subject, block, body = record
        chain = self._chain
        follows = has_other_time = True
        try:
            if position in self._skipped:
                return self._pass_over(record)
            # Nearly all blocks have this form, so this case of `_usual` is inlined.
            head, _, kind = block.partition(_TYPE_LINE)
            digits = head.partition(_EXPECTED_LINE)[2]
            if (
                kind in self._kinds
                and digits.isdigit()
                and head.count(b"\r") == 2
                and head.startswith(_ID_START)
                and head.isascii()
            ):
                decode, owner, version = self._kinds[kind]
                before = expected = int(digits)
                is_plain = True
            else:
                decode, owner, version, before, expected, is_plain = self._usual(record) or self._parsed(record)
            if decode is None:
                self._note_skip_marker(record)
                return self._pass_over(record)
            aggregate, aggregate_id = entity_of(subject)
            if aggregate != owner and owner is not None:
                if aggregate in self._catalog.retired_aggregates:
                    return self._pass_over(record)
                raise self._misplaced(record, owner, aggregate)
            if not 0 < version <= before + 1 <= position:
                raise undecodable(record, _order_fault(version, before, position))
            if chain is not None:
                follows = chain.follows(subject, position, version, expected)
            data = decode(body)
            has_other_time = (not is_plain and _RECORDED_AT_LINE in block) or not 0 <= time_ns < _TIMES_END_NS
            at = recorded_at(record) if has_other_time else _EPOCH
        except BaseException as raised:
            self._pass_over(record)
            if self._note_skip_marker(record):
                return None
            error = UnexpectedExit.instead_of(raised)
            if isinstance(error, CodecError):
                raise
            # A record may contain anything, so any other exception is the fault of this record and has to name it.
            raise undecodable(record, reason_of(error, private=self._catalog.is_private)) from error
        if chain is not None and not follows and (fault := chain.fault(record, version, expected)):
            raise undecodable(record, fault)
        if has_other_time:
            _, event_id, command_id, metadata = _late_fields(0, block)
            return Recorded(data, aggregate_id, version, position, at, event_id, aggregate, command_id, metadata)
        return recorded(data, aggregate_id, version, position, aggregate, _late_fields, time_ns, block)

    def _misplaced(self, record: RawRecord, owner: str, aggregate: str) -> CodecError:
        """Return the error for an event on a subject of another aggregate, perhaps the former name of its own."""
        fault = f"its type belongs to the aggregate {owner!r}, and its subject to {aggregate!r}"
        if aggregate in self._catalog.aggregates:
            return undecodable(record, fault)
        return undecodable(record, f"{fault}, which this application does not declare", aggregate)

    def _pass_over(self, record: RawRecord) -> None:
        if self._chain is not None:
            self._chain.skip(record)

    def link(self, record: RawRecord) -> Link:
        """Decode a record to what the fold of an aggregate's history needs; raises as `__call__`, without the chain."""
        position, _, subject, block, body = record
        if position in self._skipped:
            return Link(number_of(block, VERSION) or 0, position, SKIPPED, None, None)
        try:
            decode, owner, version, before, expected, is_plain = self._usual(record) or self._parsed(
                record, always=True
            )
            if owner is not None:
                aggregate, _ = entity_of(subject)
                if aggregate != owner:
                    raise self._misplaced(record, owner, aggregate)
            if not 0 < version <= before + 1 <= position:
                raise undecodable(record, _order_fault(version, before, position))
            data = None if decode is None else decode(body)
            if expected in self._skipped:
                expected = None
            if is_plain:
                return _link(Link, (version, position, expected, None, data))
            if _RECORDED_AT_LINE in block:
                time_in_header(record, RECORDED_AT, _EPOCH)
            return Link(version, position, expected, command_of(block), data)
        except CodecError:
            raise
        except BaseException as raised:  # noqa: BLE001 - see `__call__`
            error = UnexpectedExit.instead_of(raised)
            raise undecodable(record, reason_of(error, private=self._catalog.is_private)) from error

    def _usual(self, record: RawRecord) -> _Headers | None:
        """Return the contents of headers in the usual order, for an event type seen before; otherwise None."""
        position, _, _, block, _ = record
        head, _, kind = block.partition(_TYPE_LINE)
        is_plain = True
        contents = self._kinds.get(kind)
        if contents is None:
            end = kind.find(b"\r\n", kind.find(_VERSION_LINE) + 14)
            front, tail = kind[:end], kind[end:]
            contents = self._fronts.get(front) or self._learn(front)
            is_plain = b"E" not in tail  # neither `Ej-…` nor `Nats-Expected-…`
            if contents is None or not tail.endswith(_BLOCK_END):
                return None
            if not is_plain and (_ENCODING_LINE in tail or _EXPECTED_LINE in tail):
                return None
            if tail == _BLOCK_END and len(self._kinds) < _KINDS_MAX:
                self._kinds[kind] = contents
        decode, owner, version = contents
        count = head.count(b"\r")
        if not (0 < count < 3 and head.startswith(_ID_START) and head.isascii()):
            return None
        if count == 1:  # a later event of a save, or an event that another program wrote
            return decode, owner, version, position - 1, None, is_plain
        digits = head.partition(_EXPECTED_LINE)[2]
        if not digits.isdigit():
            return None
        before = int(digits)
        return decode, owner, version, before, before, is_plain

    def _learn(self, front: bytes) -> _Kind | None:
        """Return the kind for the bytes of type, schema and version; None if they are malformed or not yet resolved."""
        type_and_schema, _, digits = front.partition(_VERSION_LINE)
        type_name, _, schema = type_and_schema.partition(b"\r\n")
        key = _TYPE + type_name, schema
        if key not in self._resolved or not digits.isdigit() or len(digits) > 18:
            return None
        resolved = self._resolved[key]
        decode, owner = (None, None) if resolved is None else (resolved.decode, resolved.aggregate)
        kind = decode, owner, int(digits)
        if len(self._fronts) < _KINDS_MAX:
            self._fronts[front] = kind
        return kind

    def _parsed(self, record: RawRecord, *, always: bool = False) -> _Headers:
        """Return the contents of headers in any order; for an event that is passed over, only if `always`."""
        position, _, _, block, _ = record
        lines = _in_order(block.split(b"\r\n"))
        at = 3 if lines[2][:37] == _EXPECTED else 2
        resolved = self._resolve(lines[at : at + 3], record)
        if resolved is None and not always:
            return None, None, 0, 0, None, True
        if resolved is not None and (name := header(block, ENCODING)) not in (None, "json"):
            raise undecodable(record, f"its encoding is {brief(name)!r}")
        lines[1].decode()
        digits = lines[at + 2][12:]
        version = int(digits)
        before = int(lines[2][37:]) if at == 3 else position - 1
        if not digits.isdigit():
            raise undecodable(record, _order_fault(version, before, position))
        is_plain = len(lines) == at + 5
        expected = before if at == 3 else None if is_plain else number_of(block, EXPECTED)
        decode, owner = (None, None) if resolved is None else (resolved.decode, resolved.aggregate)
        return decode, owner, version, before, expected, is_plain

    def _resolve(self, kind: Sequence[bytes], record: RawRecord) -> Resolved | None:
        """Look up the event of the header lines (type, schema, version); a failed lookup is not remembered."""
        position, block, body = record[0], record[3], record[4]
        if self._note_skip_marker(record):
            return None
        if block and not block.endswith(_BLOCK_END):
            # A direct get would not even return the headers as they are stored.
            return self._raise_unless_foreign(record, undecodable(record, "its headers do not end in an empty line"))
        type_name, schema = (line.partition(b": ")[2].decode("utf-8", "replace") for line in kind[:2])
        declared = self._catalog.named(type_name)
        resolved: Resolved | None = None
        if declared is None and type_name not in self._catalog.retired:
            return self._raise_unless_foreign(record, _undeclared_error(record, kind, type_name, schema))
        if declared is not None and (self._only is None or declared.event_type in self._only):
            if not all(kind) or not _is_schema(schema):
                raise _undeclared_error(record, kind, type_name, schema)
            resolved = self._catalog.resolve(type_name, int(schema))
            if resolved is None:
                raise UnknownEvent(brief(type_name), int(schema), position, body, declared.info.schema)
        if len(self._resolved) < _KINDS_MAX:
            self._resolved[kind[0], kind[1]] = resolved
        return resolved

    def _note_skip_marker(self, record: RawRecord) -> bool:
        """Return whether a record is a skip marker, whatever its headers say, and remember the position it skips."""
        skipped = skipped_by(record[2])
        if skipped is not None and skipped < record[0]:
            self._skipped.setdefault(skipped, reason_in(record[4]))
        return skipped is not None

    def _raise_unless_foreign(self, record: RawRecord, error: CodecError) -> None:
        """Raise for a record without a declared event, unless its subject can carry no event of this reader."""
        names = record[2].split(b".", 2)
        aggregate = names[1].decode("utf-8", "replace") if len(names) > 1 else ""
        if aggregate in self._catalog.retired_aggregates:
            return
        if self._aggregates is None or not aggregate or aggregate in self._aggregates:
            raise error


def chained(catalog: Catalog, only: Collection[type] | None, earlier: Earlier | None) -> Decoder:
    """Return a decoder of the events in `only`, with the predecessor check if `earlier` gives access to the log."""
    aggregates = None if only is None else catalog.aggregates_of(only)
    return Decoder(catalog, only, None if earlier is None else Chain(earlier, catalog.skipped, aggregates))


def packed(position: int, version: int) -> int:
    """Return position and version in one number, which `unpacked` splits again."""
    return position << _VERSION_BITS | max(0, min(version, _VERSION_MAX))


def unpacked(last: int) -> tuple[int, int]:
    """Return (position, version) of a packed number."""
    return last >> _VERSION_BITS, last & _VERSION_MAX


def broken(version: int, expected: int | None, last: int, version_before: int) -> str:
    """Return the reason for an event that does not follow the last event of its subject."""
    after = ""
    if expected is not None:
        after = f", written after position {expected}" if expected else ", written as its first"
    before = f"version {version_before} at position {last}" if last else "no event of this aggregate"
    return f"version {version}{after}, and {before} comes before it"


def _after(version: int, stated: int | None) -> int:
    """Return a history's version after a record that is skipped or versionless; it counts if `stated` is the next."""
    return version + 1 if stated == version + 1 else version


def _without_body(record: RawRecord | None) -> RawRecord | None:
    """Return the record without its body, which may be large."""
    return None if record is None else (*record[:4], b"")


def _in_order(lines: Sequence[bytes]) -> list[bytes]:
    """Return header lines in the usual order, with empty lines for a missing id, type, schema or version."""
    by_name: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, _ = line.partition(b": ")
        by_name.setdefault(name + colon, line)
    first = [by_name.pop(_MSG_ID, b""), *([by_name.pop(_EXPECTED)] if _EXPECTED in by_name else ())]
    kind = [by_name.pop(start, b"") for start in (_TYPE, _SCHEMA, _VERSION)]
    return [lines[0], *first, *kind, *filter(None, by_name.values()), b"", b""]


def _undeclared_error(record: RawRecord, kind: Sequence[bytes], type_name: str, schema: str) -> CodecError:
    """Return the error for a record that is not a declared event."""
    if not all(kind):
        return undecodable(record, "it lacks Ej-Type, Ej-Schema or Ej-Version")
    if not _is_schema(schema):
        return undecodable(record, f"its schema is {brief(schema)!r}")
    return UnknownEvent(brief(type_name), int(schema), record[0], record[4])


def _is_schema(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


def _order_fault(version: int, before: int, position: int) -> str:
    if not 0 < version <= position:
        return f"its version is {version}, at position {position}"
    return f"its version is {version}, and it was written after position {before}"


def _late_fields(time_ns: int, block: bytes) -> LateFields:
    """Return the late fields of a `Recorded`, for a record with no other time than the server's."""
    return stored_time(time_ns), header(block, MSG_ID) or "", *metadata_of(block)
