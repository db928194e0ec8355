"""`Witness`: events folded onto a few rows, and since which event each live row is not what the log says. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from eventjet.domain.recorded import Recorded
from eventjet.projections.fold import BlockedAggregates, Fold, ParkingFold, RowKey, Rows
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec


class Witness:
    """Sees the events of a projection in the order of the log, each as its `reader` gives it."""

    def __init__(
        self,
        resolved: ResolvedProjection,
        live: Mapping[RowKey, Any],
        known: Mapping[int, str],
        are_equal: Callable[[Any, Any], bool],
    ) -> None:
        """`live` has the rows to watch, None where there is none; `known` what was decided of events in quarantine.

        `are_equal` tells of a folded row and a live one whether the database stores them alike.
        """
        self._live = live
        self._are_equal = are_equal
        self._fold = _fold(resolved, live, known)
        self._equal = {key: row is None for key, row in live.items()}
        self._missed: dict[RowKey, int] = {}
        self.rows: dict[RowKey, Any] = {}
        """What was folded so far: key to row, None for one that is gone."""

    def see(self, event: Any) -> Rows:
        """Which of the watched rows an event changed. Raises `HandlerFailed`."""
        changed: Rows = {}
        for key, row in self._fold(self.rows, event).items():
            if key not in self._live:
                continue
            was_equal, self._equal[key] = self._equal[key], self._are_equal(row, self._live[key])
            self.rows[key] = changed[key] = row
            if self._equal[key]:
                self._missed.pop(key, None)
            elif was_equal:
                self._missed[key] = event.position
        return changed

    def missed_since(self, key: RowKey) -> int | None:
        """Position of the first event that the live row does not show; None where it is equal, or never was."""
        return self._missed.get(key)


def _fold(
    resolved: ResolvedProjection, live: Mapping[RowKey, Any], known: Mapping[int, str]
) -> Callable[[Rows, Any], Rows]:
    codec = RowCodec(resolved.table, resolved.row_type)
    if not resolved.quarantines:
        fold = Fold(_only(resolved, live), codec)
        return lambda rows, event: fold(rows, [event])
    parking = ParkingFold(resolved, codec)
    held = BlockedAggregates(known=known)

    def parked_apart(rows: Rows, event: Any) -> Rows:
        found = parking(rows, [event], held)
        held.aggregates.update(found.blocked)
        return found.changed

    return parked_apart


def _only(resolved: ResolvedProjection, live: Mapping[RowKey, Any]) -> ResolvedProjection:
    """The projection reduced to these keys: nothing is known here about the rows of others."""

    def keys_of(event: Recorded[Any]) -> tuple[RowKey, ...]:
        return tuple(key for key in resolved.keys_of(event) if key in live)

    return replace(resolved, key_of=None, keys_of=keys_of) if resolved.reads else resolved
