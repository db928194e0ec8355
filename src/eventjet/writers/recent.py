"""`RecentRows`: rows a writer has committed lately, so that hot ones are not read again before every batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eventjet.projections.fold import RowKey, Rows

ROWS_MAX = 20_000
"""Rows kept, at most twice as many for a moment."""
NONE: Mapping[RowKey, Any] = {}


class RecentRows:
    """True for as long as nobody else writes, which the checkpoint's epoch and position prove in every transaction."""

    __slots__ = ("_limit", "_new", "_old")

    def __init__(self, limit: int = ROWS_MAX) -> None:
        self._limit = limit
        self._new: Rows = {}
        self._old: Rows = {}

    def find(self, keys: Iterable[RowKey], before: Mapping[RowKey, Any] = NONE) -> tuple[Rows, list[RowKey]]:
        """(rows known, None where there is none; keys that must be read), after what `before` changes."""
        if not self._limit:
            return {}, list(keys)
        new, old = self._new, self._old
        known: Rows = {}
        missing: list[RowKey] = []
        for key in keys:
            if key in before:
                known[key] = before[key]
            elif key in new:
                known[key] = new[key]
            elif key in old:
                known[key] = old[key]
            else:
                missing.append(key)
        return known, missing

    def remember(self, changed: Mapping[RowKey, Any]) -> None:
        """These rows are in the database, or gone from it."""
        if self._limit:
            self._new.update(changed)
            if len(self._new) > self._limit:
                self._old, self._new = self._new, {}
