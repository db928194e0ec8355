"""`RecentRows`: rows a writer has committed lately, so that hot ones are not read again before every batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eventjet.projections.fold import RowKey, Rows

ROWS_MAX = 20_000
"""Rows kept, at most twice as many for a moment."""


class RecentRows:
    """True for as long as nobody else writes, which the checkpoint's epoch and position prove in every transaction.

    What a transaction changed counts only once it is `committed`; any doubt is answered by `forget`.
    """

    __slots__ = ("_limit", "_new", "_old", "_uncommitted")

    def __init__(self, limit: int = ROWS_MAX) -> None:
        self._limit = limit
        self._new: Rows = {}
        self._old: Rows = {}
        self._uncommitted: Mapping[RowKey, Any] = {}

    def find(self, keys: Iterable[RowKey]) -> tuple[Rows, list[RowKey]]:
        """(rows known, None where there is none; keys that must be read)."""
        new, old = self._new, self._old
        known: Rows = {}
        missing: list[RowKey] = []
        for key in keys:
            if key in new:
                known[key] = new[key]
            elif key in old:
                known[key] = old[key]
            else:
                missing.append(key)
        return known, missing

    def write(self, changed: Mapping[RowKey, Any]) -> None:
        """Note what the open transaction writes."""
        self._uncommitted = changed

    def committed(self) -> None:
        """The transaction is in the database."""
        if self._limit:
            self._new.update(self._uncommitted)
        self._uncommitted = {}
        if len(self._new) > self._limit:
            self._old, self._new = self._new, {}

    def forget(self) -> None:
        """Know nothing."""
        self._new = {}
        self._old = {}
        self._uncommitted = {}
