"""THE fold: events in the order of the log onto rows, the same in every engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import length_hint
from typing import Any, NoReturn, TypeAlias

from eventjet.codec.reasons import reason_of
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, HandlerFailed, StoreError
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.shown import shown

RowKey: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[RowKey, Any]
"""Key → row, or None where there is none."""

_PASSED_ON = (CodecError, StoreError)
"""What an engine's iterator of events may raise: not the handler's doing."""


class Fold:
    """One projection's function over many events. Holds no rows."""

    __slots__ = ("_codec", "_resolved")

    def __init__(self, resolved: ResolvedProjection, codec: RowCodec) -> None:
        self._resolved = resolved
        self._codec = codec

    def keys(self, events: Iterable[Recorded[Any]]) -> list[RowKey]:
        """Every key the events touch, once; raises `HandlerFailed`."""
        found: dict[RowKey, None] = {}
        keys_of = self._resolved.keys_of
        event: Recorded[Any] | None = None
        try:
            for event in events:
                found.update(dict.fromkeys(keys_of(event)))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return list(found)

    def each_key(self, events: Sequence[Recorded[Any]]) -> list[RowKey] | None:
        """The key of each event, event by event, which `__call__` takes; None where one may touch several.

        Raises `HandlerFailed`.
        """
        key_of = self._resolved.key_of
        if key_of is None:
            return None
        coming = iter(events)
        try:
            return [key_of(event) for event in coming]
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(events[len(events) - length_hint(coming) - 1], error)

    def __call__(
        self, rows: Mapping[RowKey, Any], events: Iterable[Recorded[Any]], each_key: Sequence[RowKey] | None = None
    ) -> Rows:
        """The rows that changed, normalised; None where one is gone. `rows` holds what there was and stays as it is.

        Events are in the order of the log; `each_key` is what `each_key` gave for them, where it was asked before.
        Raises `HandlerFailed` with the event that could not be taken.
        """
        if not self._resolved.reads:
            return self._append(events)
        key_of, keys_of = self._resolved.key_of, self._resolved.keys_of
        changed: Rows = {}
        step = row_step(self._resolved, self._codec, rows, changed)
        event: Recorded[Any] | None = None
        try:
            if each_key is not None:
                for event, key in zip(events, each_key, strict=True):
                    step(event, key)
            elif key_of is not None:
                for event in events:
                    step(event, key_of(event))
            else:
                for event in events:
                    for key in keys_of(event):
                        step(event, key)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return without_ghosts(changed, rows)

    def _append(self, events: Iterable[Recorded[Any]]) -> Rows:
        codec = self._codec
        alone = len(self._resolved.key_columns) == 1
        made: Rows = {}
        event: Recorded[Any] | None = None
        try:
            for event in events:
                for index, row in enumerate(self._resolved.entries(event)):
                    fitted = codec.normalise(row)
                    key = (event.position,) if alone else (event.position, index)
                    if codec.key(fitted) != key or (alone and index):
                        raise ValueError(_stranger(codec.key(fitted), (event.position, index)))
                    made[key] = fitted
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return made

    def _fail(self, event: Recorded[Any] | None, error: Exception) -> NoReturn:
        if isinstance(error, _PASSED_ON):
            raise error
        reason = reason_of(error, private=self._resolved.is_private)
        position, aggregate_id = (event.position, event.aggregate_id) if event is not None else (0, "")
        raise HandlerFailed(self._resolved.name, position, aggregate_id, reason) from error


def row_step(
    resolved: ResolvedProjection, codec: RowCodec, rows: Mapping[RowKey, Any], changed: Rows
) -> Callable[[Recorded[Any], RowKey], None]:
    """What folds one event onto the row of one key: out of `changed`, or else of `rows`, and into `changed`."""
    apply, normalise, key_in = resolved.apply, codec.normalise, codec.key
    before_batch = rows.get
    fold = resolved.fold_alone

    def step(event: Recorded[Any], key: RowKey) -> None:
        before = changed[key] if key in changed else before_batch(key)
        after = apply(before, event, key) if fold is None else fold(before, event)
        if after is before:
            return
        if after is not None:
            after = normalise(after, before)
            if key_in(after) != key:
                raise ValueError(_stranger(key_in(after), key))
        changed[key] = after

    return step


def without_ghosts(changed: Rows, rows: Mapping[RowKey, Any]) -> Rows:
    """Leave out rows that came and went within these events."""
    if None not in changed.values():
        return changed
    return {key: row for key, row in changed.items() if row is not None or rows.get(key) is not None}


def _stranger(got: RowKey, key: RowKey) -> str:
    return f"it returned a row with the key {shown(got)} for the key {shown(key)}"
