"""`Chain`: whether a record follows the one before it on its subject, wherever a reader of the log began. PURE.

What lies right before a record decides, and nothing else: its version has to be the next one, and the position that it
was written after has to be that record's. What a reader has met it remembers. For the rest it asks for the record at
the expected position, since the server stored nothing that expected another last message of its subject. So all readers
of a log come to the same, from whatever position they start and however little they keep.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Protocol

from eventjet.codec.catalog import Catalog
from eventjet.codec.decoder import Decoder
from eventjet.codec.envelope import EXPECTED, VERSION, RawRecord, number_of

KEPT = 250_000
"""Subjects whose last event is remembered; twice as many at the most, some 150 bytes each."""
_ASKED_MAX = 100
"""Records asked for at once: their bodies come with them."""

_VERSION_BITS = 32
_VERSION_MAX = (1 << _VERSION_BITS) - 1
_OF_ANOTHER = re.compile(rb"\r\nNats-Expected-Last-Subject-Sequence-Subject:", re.IGNORECASE)
"""With it, the server compared the last message of other subjects than the record's own."""


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
