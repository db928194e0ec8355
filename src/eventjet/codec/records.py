"""Records of the log as events: decoded once and by every engine alike, each held to the one before it.

`Decoder` makes an event of a record. Headers are written in one order, and read by their two ends where they are in it:
nothing is cut out that nobody asks for. Others, and other orders, are put in order first.

`Chain` tells whether a record follows the one before it on its subject, wherever a reader of the log began. What lies
right before a record decides, and nothing else: its version has to be the next one, and the position that it was
written after has to be that record's. What a reader has met it remembers. For the rest it asks for the record at the
expected position, since the server stored nothing that expected another last message of its subject. So all readers of
a log come to the same, from whatever position they start and however little they keep. PURE.
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
    stored_time,
    told_time,
    undecodable,
    voided_by,
)
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_of
from eventjet.domain.history import VOID, Link
from eventjet.domain.recorded import Recorded, Rest, recorded
from eventjet.errors import CodecError, UnexpectedExit, UnknownEvent

KEPT = 250_000
"""Subjects whose last event is remembered; twice as many at the most, some 150 bytes each."""
_ASKED_MAX = 100
"""Records asked for at once: their bodies come with them."""

_VERSION_BITS = 32
_VERSION_MAX = (1 << _VERSION_BITS) - 1
_OF_ANOTHER = re.compile(rb"\r\nNats-Expected-Last-Subject-Sequence-Subject:", re.IGNORECASE)
"""With it, the server compared the last message of other subjects than the record's own."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MSG_ID, _EXPECTED, _TYPE, _SCHEMA, _VERSION = (
    f"{name}: ".encode() for name in (MSG_ID, EXPECTED, TYPE, SCHEMA, VERSION)
)
_TYPE_LINE, _VERSION_LINE, _EXPECTED_LINE = (b"\r\n" + name for name in (_TYPE, _VERSION, _EXPECTED))
_ENCODING_LINE, _TOLD_TIME = (f"\r\n{name}: ".encode() for name in (ENCODING, RECORDED_AT))
_ID_START = b"NATS/1.0\r\n" + _MSG_ID
_BLOCK_END = b"\r\n\r\n"
_TIMES_END_NS = 253_402_300_800 * 10**9
"""When Python's times end."""
_KINDS_MAX = 10_000
_link: Callable[[type[Link], tuple[Any, ...]], Link] = cast("Any", tuple).__new__
"""Makes a `Link` in half the time."""

_Kind: TypeAlias = tuple[Callable[[bytes], Any] | None, str | None, int]
"""(how the body is read, None for what is passed over; whose event it is; version)."""
_Told: TypeAlias = tuple[Callable[[bytes], Any] | None, str | None, int, int, int | None, bool]
"""As `_Kind`, and the position that it was written after at the latest, the one that it says, and whether that is all
that it tells."""


class Earlier(Protocol):
    """The log that a reader's records are of. Blocks; raises `StoreUnavailable` and `Unreachable`."""

    def at(self, positions: Sequence[int]) -> list[RawRecord | None]:
        """What is at each position; None for what is gone."""
        ...

    def before(self, subject: bytes, position: int) -> RawRecord | None:
        """The last record of a subject before a position; None when there is none."""
        ...


class Chain:
    """What a reader of a log knows of the last record of each subject, as position and version."""

    __slots__ = ("_asked", "_before", "_coming", "_earlier", "_kept", "_lasts", "_older", "_own", "_voids")

    def __init__(
        self, earlier: Earlier, voids: Collection[int] = (), own: Collection[str] | None = None, kept: int = KEPT
    ) -> None:
        """`own` are the aggregates of which the reader takes anything, None for all; `voids` may grow."""
        self._earlier = earlier
        self._voids = voids
        self._own = None if own is None else frozenset(name.encode() for name in own)
        self._kept = kept
        # By the hash of the subject. Where two share one, the log is asked.
        self._lasts: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._before = 0
        self._coming: Sequence[RawRecord] = ()
        self._asked: dict[int, RawRecord | None] = {}

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Say what is read next, so that what it follows is asked for at once, where it has to be."""
        self._coming = records
        self._asked.clear()

    def follows(self, subject: bytes, position: int, version: int, expected: int | None) -> bool:
        """Whether a record surely follows the last one of its subject, which it is itself from here on.

        `expected` is the position that it was written after, 0 for none; None where that is not told. Asks nobody: what
        is not sure, `fault` tells.
        """
        lasts = self._lasts
        key = hash(subject)
        last = lasts.get(key) or self._older.get(key, 0)
        lasts[key] = position << _VERSION_BITS | version
        if len(lasts) > self._kept:
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
        """What is wrong with the place of the record that was just told to `follows`; empty if nothing is.

        As the log has it. The server's own check is believed, unless what is remembered shows that it cannot be.
        """
        position, _, subject, block, _ = record
        # The later events of a save are stored right behind one another.
        before = position - 1 if expected is None else expected
        if not _OF_ANOTHER.search(block):
            near = self._at(before, record) if before else None
            if before and near is None:
                return ""  # it is gone, which is for those to say who look at the whole log
            if before >= self._before >> _VERSION_BITS and self._is_next(near, subject, version):
                return ""
        last, version_before = self._last_before(subject, position)
        if not last and self._at(1, record) is None:
            return ""  # the log has lost its beginning, and what came before may have been there
        if version == version_before + 1 and (expected in (None, last) or expected in self._voids):
            return ""
        return broken(version, expected, last, version_before)

    def skip(self, record: RawRecord) -> None:
        """Take a record, of whatever kind, as the last of its subject."""
        position, _, subject, block, _ = record
        if not self._concerns(subject):
            return
        key = hash(subject)
        version = number_of(block, VERSION)
        is_void = position in self._voids
        if version is not None and not is_void:
            self._keep(key, position, version)
            return
        last = self._lasts.get(key, self._older.get(key))
        if last is not None:
            self._keep(key, position, _after(last & _VERSION_MAX, version if is_void else None))

    def _concerns(self, subject: bytes) -> bool:
        if self._own is None:
            return True
        _, _, rest = subject.partition(b".")
        return rest.partition(b".")[0] in self._own

    def _keep(self, key: int, position: int, version: int) -> None:
        self._lasts[key] = packed(position, version)
        if len(self._lasts) > self._kept:
            self._older, self._lasts = self._lasts, {}

    def _is_next(self, near: RawRecord | None, subject: bytes, version: int) -> bool:
        if near is None:
            return version == 1
        return near[2] == subject and near[0] not in self._voids and number_of(near[3], VERSION) == version - 1

    def _last_before(self, subject: bytes, position: int) -> tuple[int, int]:
        """(position, version) of the last record of a subject before a position; zeros when there is none."""
        versionless: list[tuple[int, int | None]] = []
        last, version = 0, 0
        while (record := self._earlier.before(subject, position)) is not None:
            position, told = record[0], number_of(record[3], VERSION)
            is_void = position in self._voids
            if told is not None and not is_void:
                last, version = position, told
                break
            versionless.append((position, told if is_void else None))
        for at, told in reversed(versionless):
            last, version = at, _after(version, told)
        return last, version

    def _at(self, position: int, record: RawRecord) -> RawRecord | None:
        if position not in self._asked:
            wanted = list(dict.fromkeys([position, *self._needed(record)]))[:_ASKED_MAX]
            self._asked.update(zip(wanted, map(_bare, self._earlier.at(wanted)), strict=True))
        return self._asked[position]

    def _needed(self, record: RawRecord) -> list[int]:
        """Where what comes after a record will have to look, too."""
        needed: list[int] = []
        met: set[int] = set()
        for position, _, subject, block, _ in self._coming:
            if position <= record[0]:
                continue
            key = hash(subject)
            if key in met or key in self._lasts or key in self._older or not self._concerns(subject):
                continue
            met.add(key)
            expected = number_of(block, EXPECTED)
            before = position - 1 if expected is None else expected
            if before and before not in self._asked:
                needed.append(before)
                if len(needed) == _ASKED_MAX:
                    break
        return needed


class Decoder:
    """Turns records into recorded events, of the classes in `only` when given.

    Returns None for what the log declares void, as far as its catalog knows or a record read before said so, for a
    declared event outside `only`, for one that is retired or of a retired aggregate, and for what does not tell a
    declared type on the subject of an aggregate that has no event in `only`. Raises `UnknownEvent` and
    `UndecodableEvent`, which carry position and bytes. With a `chain`, which takes the records of a log in order, an
    event that does not follow the one before it on its subject is undecodable as well; asking for that one raises
    `StoreUnavailable` and `Unreachable`.
    """

    __slots__ = ("_catalog", "_chain", "_fronts", "_kinds", "_known", "_only", "_own", "_voids")

    def __init__(self, catalog: Catalog, only: Collection[type] | None = None, chain: Chain | None = None) -> None:
        self._catalog = catalog
        self._chain = chain
        self._only = None if only is None else frozenset(only)
        self._own = None if only is None else catalog.aggregates_of(only)
        self._known: dict[tuple[bytes, bytes], Resolved | None] = {}
        self._kinds: dict[bytes, _Kind] = {}
        """By what a block says from its type on, where nothing but its end follows the version."""
        self._fronts: dict[bytes, _Kind] = {}
        """By the same without the block's end, whatever follows."""
        self._voids = catalog.voids

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Say what is decoded next, so that its chain looks up at once what all of it follows."""
        if self._chain is not None:
            self._chain.expect(records)

    def __call__(self, record: RawRecord) -> Recorded[Any] | None:
        position, time_ns, subject, block, body = record
        chain = self._chain
        follows = is_told = True
        try:
            if position in self._voids:
                return self._pass_over(record)
            # Nearly all blocks are like this, so it is written out: see `_usual`.
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
                decode, owner, version, before, expected, is_plain = self._usual(record) or self._told(record)
            if decode is None:
                self._told_void(record)
                return self._pass_over(record)
            aggregate, aggregate_id = entity_of(subject)
            if aggregate != owner and owner is not None:
                if aggregate in self._catalog.retired_aggregates:
                    return self._pass_over(record)
                raise undecodable(record, _misplaced(owner, aggregate))
            if not 0 < version <= before + 1 <= position:
                raise undecodable(record, _out_of_line(version, before, position))
            if chain is not None:
                follows = chain.follows(subject, position, version, expected)
            data = decode(body)
            is_told = (not is_plain and _TOLD_TIME in block) or not 0 <= time_ns < _TIMES_END_NS
            at = recorded_at(record) if is_told else _EPOCH
        except BaseException as raised:
            self._pass_over(record)
            if self._told_void(record):
                return None
            error = UnexpectedExit.instead_of(raised)
            if isinstance(error, CodecError):
                raise
            # Whoever wrote it wrote anything: nothing but the record may be to blame, and it has to be named.
            raise undecodable(record, reason_of(error, private=self._catalog.is_private)) from error
        if chain is not None and not follows and (fault := chain.fault(record, version, expected)):
            raise undecodable(record, fault)
        if is_told:
            _, event_id, command_id, metadata = _read_rest(0, block)
            return Recorded(data, aggregate_id, version, position, at, event_id, aggregate, command_id, metadata)
        return recorded(data, aggregate_id, version, position, aggregate, _read_rest, time_ns, block)

    def _pass_over(self, record: RawRecord) -> None:
        if self._chain is not None:
            self._chain.skip(record)

    def link(self, record: RawRecord) -> Link:
        """As a call, but only what folding one aggregate's history takes."""
        position, _, subject, block, body = record
        if position in self._voids:
            return Link(number_of(block, VERSION) or 0, position, VOID, None, None)
        try:
            decode, owner, version, before, expected, is_plain = self._usual(record) or self._told(record, always=True)
            if owner is not None:
                aggregate, _ = entity_of(subject)
                if aggregate != owner:
                    raise undecodable(record, _misplaced(owner, aggregate))
            if not 0 < version <= before + 1 <= position:
                raise undecodable(record, _out_of_line(version, before, position))
            data = None if decode is None else decode(body)
            if expected in self._voids:
                expected = None
            if is_plain:
                return _link(Link, (version, position, expected, None, data))
            if _TOLD_TIME in block:
                told_time(record, RECORDED_AT, _EPOCH)
            return Link(version, position, expected, command_of(block), data)
        except CodecError:
            raise
        except BaseException as raised:  # noqa: BLE001 - see `__call__`
            error = UnexpectedExit.instead_of(raised)
            raise undecodable(record, reason_of(error, private=self._catalog.is_private)) from error

    def _usual(self, record: RawRecord) -> _Told | None:
        """What the headers tell where they are in the order they are written in, of a type met before; or None."""
        position, _, _, block, _ = record
        head, _, kind = block.partition(_TYPE_LINE)
        is_plain = True
        known = self._kinds.get(kind)
        if known is None:
            end = kind.find(b"\r\n", kind.find(_VERSION_LINE) + 14)
            front, more = kind[:end], kind[end:]
            known = self._fronts.get(front) or self._learn(front)
            is_plain = b"E" not in more  # neither `Ej-…` nor `Nats-Expected-…`
            if known is None or not more.endswith(_BLOCK_END):
                return None
            if not is_plain and (_ENCODING_LINE in more or _EXPECTED_LINE in more):
                return None
            if more == _BLOCK_END and len(self._kinds) < _KINDS_MAX:
                self._kinds[kind] = known
        decode, owner, version = known
        count = head.count(b"\r")
        if not (0 < count < 3 and head.startswith(_ID_START) and head.isascii()):
            return None
        if count == 1:  # a later event of a save, or one that others wrote
            return decode, owner, version, position - 1, None, is_plain
        digits = head.partition(_EXPECTED_LINE)[2]
        if not digits.isdigit():
            return None
        before = int(digits)
        return decode, owner, version, before, before, is_plain

    def _learn(self, front: bytes) -> _Kind | None:
        """What type, schema and version come to; None where these are not what is there, or were never looked up."""
        named, _, digits = front.partition(_VERSION_LINE)
        type_name, _, schema = named.partition(b"\r\n")
        key = _TYPE + type_name, schema
        if key not in self._known or not digits.isdigit() or len(digits) > 18:
            return None
        resolved = self._known[key]
        decode, owner = (None, None) if resolved is None else (resolved.decode, resolved.aggregate)
        found = decode, owner, int(digits)
        if len(self._fronts) < _KINDS_MAX:
            self._fronts[front] = found
        return found

    def _told(self, record: RawRecord, *, always: bool = False) -> _Told:
        """What the headers tell, in whatever order; of what is passed over only `always`."""
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
            raise undecodable(record, _out_of_line(version, before, position))
        is_plain = len(lines) == at + 5
        expected = before if at == 3 else None if is_plain else number_of(block, EXPECTED)
        decode, owner = (None, None) if resolved is None else (resolved.decode, resolved.aggregate)
        return decode, owner, version, before, expected, is_plain

    def _resolve(self, kind: Sequence[bytes], record: RawRecord) -> Resolved | None:
        """Look up what (type, schema, version) announce; what raises is not remembered."""
        position, block, body = record[0], record[3], record[4]
        if self._told_void(record):
            return None
        if block and not block.endswith(_BLOCK_END):
            # A direct get would not even give it as it is stored.
            return self._untold(record, undecodable(record, "its headers do not end in an empty line"))
        type_name, schema = (line.partition(b": ")[2].decode("utf-8", "replace") for line in kind[:2])
        declared = self._catalog.named(type_name)
        resolved: Resolved | None = None
        if declared is None and not self._catalog.is_retired(type_name):
            return self._untold(record, _strange(record, kind, type_name, schema))
        if declared is not None and (self._only is None or declared.event_type in self._only):
            if not all(kind) or not _is_schema(schema):
                raise _strange(record, kind, type_name, schema)
            resolved = self._catalog.resolve(type_name, int(schema))
            if resolved is None:
                raise UnknownEvent(brief(type_name), int(schema), position, body)
        if len(self._known) < _KINDS_MAX:
            self._known[kind[0], kind[1]] = resolved
        return resolved

    def _told_void(self, record: RawRecord) -> bool:
        """Whether it declares another record void, whatever else its headers say; learn of that."""
        voided = voided_by(record[2])
        if voided is not None and voided < record[0]:
            self._voids.setdefault(voided, reason_in(record[4]))
        return voided is not None

    def _untold(self, record: RawRecord, error: CodecError) -> None:
        """Raise for a record that does not say which event it is, unless it is on a subject of other events."""
        names = record[2].split(b".", 2)
        aggregate = names[1].decode("utf-8", "replace") if len(names) > 1 else ""
        if aggregate in self._catalog.retired_aggregates:
            return
        if self._own is None or not aggregate or aggregate in self._own:
            raise error


def chained(catalog: Catalog, only: Collection[type] | None, earlier: Earlier | None) -> Decoder:
    """A decoder of what is in `only`, which holds each event to the one before it where it can ask the log."""
    own = None if only is None else catalog.aggregates_of(only)
    return Decoder(catalog, only, None if earlier is None else Chain(earlier, catalog.voids, own))


def packed(position: int, version: int) -> int:
    """Both in one number, of which `unpacked` makes them again."""
    return position << _VERSION_BITS | max(0, min(version, _VERSION_MAX))


def unpacked(last: int) -> tuple[int, int]:
    """(position, version)."""
    return last >> _VERSION_BITS, last & _VERSION_MAX


def broken(version: int, expected: int | None, last: int, version_before: int) -> str:
    """What is wrong with an event that does not follow the last one of its subject."""
    after = "" if expected is None else f", written after position {expected}" if expected else ", written as its first"
    before = f"version {version_before} at position {last}" if last else "no event of this aggregate"
    return f"version {version}{after}, and {before} comes before it"


def _after(version: int, told: int | None) -> int:
    """The version of a history after a record that is void, or tells none: it counts where it tells the next one."""
    return version + 1 if told == version + 1 else version


def _bare(record: RawRecord | None) -> RawRecord | None:
    """Without its body, which may be large."""
    return None if record is None else (*record[:4], b"")


def _in_order(lines: Sequence[bytes]) -> list[bytes]:
    """Headers as they are written here, of which id, type, schema and version are empty where they are missing."""
    named: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, _ = line.partition(b": ")
        named.setdefault(name + colon, line)
    first = [named.pop(_MSG_ID, b""), *([named.pop(_EXPECTED)] if _EXPECTED in named else ())]
    kind = [named.pop(start, b"") for start in (_TYPE, _SCHEMA, _VERSION)]
    return [lines[0], *first, *kind, *filter(None, named.values()), b"", b""]


def _strange(record: RawRecord, kind: Sequence[bytes], type_name: str, schema: str) -> CodecError:
    """Why a record is no declared event."""
    if not all(kind):
        return undecodable(record, "it lacks Ej-Type, Ej-Schema or Ej-Version")
    if not _is_schema(schema):
        return undecodable(record, f"its schema is {brief(schema)!r}")
    return UnknownEvent(brief(type_name), int(schema), record[0], record[4])


def _is_schema(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


def _misplaced(owner: str, aggregate: str) -> str:
    return f"its type belongs to the aggregate {owner!r}, and its subject to {aggregate!r}"


def _out_of_line(version: int, before: int, position: int) -> str:
    if not 0 < version <= position:
        return f"its version is {version}, at position {position}"
    return f"its version is {version}, and it was written after position {before}"


def _read_rest(time_ns: int, block: bytes) -> Rest:
    """What a `Recorded` is asked for late, of a record with no other time than the server's."""
    return stored_time(time_ns), header(block, MSG_ID) or "", *metadata_of(block)
