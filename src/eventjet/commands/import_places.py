"""Where every aggregate of an import stands in the log, and how far the import got in it.

Kept as text and numbers, which no garbage collection walks over. As objects, a million aggregates are looked at by
every full one, which then stops the loop for seconds, and there is nothing in them to collect.
"""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from eventjet.commands.import_check import EarlierRun

Key = tuple[str, str]
"""Aggregate and id."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
NEVER = datetime.min.replace(tzinfo=UTC)


class Place(NamedTuple):
    """Where one aggregate stands."""

    position: int = 0
    """Of its last event, 0 for none."""
    version: int = 0
    imported: int = 0
    """How many of its events this import has stored, in whatever run."""
    at: datetime = NEVER
    """When its last event was recorded."""


class Places:
    """Of all aggregates of one import: some 50 bytes each beside its key."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, int]] = {}
        """By aggregate and id: a dictionary of text and numbers alone is none of the collector's."""
        self._positions = array("Q")
        self._versions = array("Q")
        self._imported = array("Q")
        self._times = array("q")
        self._given = array("Q")
        self._read = bytearray()
        self._earlier: dict[Key, EarlierRun] = {}

    def next_ordinal(self, key: Key) -> int:
        """The number within its aggregate, from 1, of the event that the import gives now."""
        row = self._row(key)
        self._given[row] += 1
        return self._given[row]

    def is_known(self, key: Key) -> bool:
        """Whether it was put here."""
        return bool(self._read[self._row(key)])

    def of(self, key: Key) -> Place:
        """As it was put last; nothing yet for one that was not."""
        row = self._row(key)
        if not self._read[row]:
            return Place()
        at = _EPOCH + self._times[row] * _MICROSECOND
        return Place(self._positions[row], self._versions[row], self._imported[row], at)

    def put(self, key: Key, place: Place) -> None:
        """Remember it."""
        row = self._row(key)
        self._read[row] = 1
        self._positions[row], self._versions[row], self._imported[row], at = place
        self._times[row] = (at - _EPOCH) // _MICROSECOND

    def earlier(self, key: Key) -> EarlierRun:
        """What an earlier run stored of it, to be added to."""
        return self._earlier.setdefault(key, EarlierRun())

    def stored_earlier(self, key: Key, ordinal: int) -> EarlierRun | None:
        """What an earlier run stored of it, for its event of this ordinal; forgotten with the last one."""
        found = self._earlier.get(key)
        if found is not None and ordinal >= found.last:
            del self._earlier[key]
        return found

    def _row(self, key: Key) -> int:
        aggregate, aggregate_id = key
        row = self._rows.setdefault(aggregate, {}).setdefault(aggregate_id, len(self._read))
        if row == len(self._read):
            for column in (self._positions, self._versions, self._imported, self._times, self._given):
                column.append(0)
            self._read.append(0)
        return row
