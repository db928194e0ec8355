"""THE fold: events in the order of the log onto rows, the same in every engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias, cast

from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, EventjetError, HandlerFailed, StoreError
from eventjet.projections.projection import Projection
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec

RowKey: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[RowKey, Any]
"""Key → row, or None where there is none."""


_PASSED_ON = (CodecError, StoreError)
"""What an engine's iterator of events may raise: not the handler's doing."""


class Fold:
    """One projection's function over many events. Holds no rows."""

    __slots__ = ("_apply", "_codec", "_resolved")

    def __init__(self, resolved: ResolvedProjection, codec: RowCodec) -> None:
        self._resolved = resolved
        self._codec = codec
        self._apply = self._append if not resolved.reads else self._fold_one if resolved.key_of else self._fold_several

    def keys(self, events: Iterable[Recorded[Any]]) -> list[RowKey]:
        """Every key the events touch, once; raises `HandlerFailed`."""
        found: dict[RowKey, None] = {}
        key_of = self._resolved.key_of
        event: Recorded[Any] | None = None
        try:
            if key_of is not None:
                for event in events:
                    found[key_of(event)] = None
            else:
                keys_of = self._resolved.keys_of
                for event in events:
                    found.update(dict.fromkeys(keys_of(event)))
        except _PASSED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return list(found)

    def __call__(self, rows: Mapping[RowKey, Any], events: Iterable[Recorded[Any]]) -> Rows:
        """The rows that changed, normalised; None where one is gone. `rows` holds what there was and stays as it is.

        Events are in the order of the log. Raises `HandlerFailed` with the event that could not be taken.
        """
        return self._apply(rows, events)

    def _fold_one(self, rows: Mapping[RowKey, Any], events: Iterable[Recorded[Any]]) -> Rows:
        key_of = self._resolved.key_of
        assert key_of is not None
        fold = cast("Projection[Any, Any]", self._resolved.declared).fold
        normalise = self._codec.normalise
        key_in = self._codec.key
        changed: Rows = {}
        before_batch = rows.get
        event: Recorded[Any] | None = None
        try:
            for event in events:
                key = key_of(event)
                before = changed[key] if key in changed else before_batch(key)
                after = fold(before, event)
                if after is before:
                    continue
                if after is not None:
                    after = normalise(after, before)
                    if key_in(after) != key:
                        raise ValueError(stranger(key_in(after), key))
                changed[key] = after
        except _PASSED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return without_ghosts(changed, rows)

    def _fold_several(self, rows: Mapping[RowKey, Any], events: Iterable[Recorded[Any]]) -> Rows:
        apply = self._resolved.apply
        codec = self._codec
        changed: Rows = {}
        event: Recorded[Any] | None = None
        try:
            for event in events:
                for key in self._resolved.keys_of(event):
                    before = changed[key] if key in changed else rows.get(key)
                    after = apply(before, event, key)
                    if after is before:
                        continue
                    if after is not None:
                        after = codec.normalise(after, before)
                        if codec.key(after) != key:
                            raise ValueError(stranger(codec.key(after), key))
                    changed[key] = after
        except _PASSED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return without_ghosts(changed, rows)

    def _append(self, rows: Mapping[RowKey, Any], events: Iterable[Recorded[Any]]) -> Rows:  # noqa: ARG002 - reads none
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
                        raise ValueError(stranger(codec.key(fitted), (event.position, index)))
                    made[key] = fitted
        except _PASSED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return made

    def _fail(self, event: Recorded[Any] | None, error: Exception) -> NoReturn:
        position, aggregate_id = (event.position, event.aggregate_id) if event is not None else (0, "")
        raise HandlerFailed(self._resolved.name, position, aggregate_id, _reason(error)) from error


def without_ghosts(changed: Rows, rows: Mapping[RowKey, Any]) -> Rows:
    """Leave out rows that came and went within these events."""
    if None not in changed.values():
        return changed
    return {key: row for key, row in changed.items() if row is not None or rows.get(key) is not None}


def stranger(got: RowKey, key: RowKey) -> str:
    """What is wrong with a row of another key."""
    return f"it returned a row with the key {got!r} for the key {key!r}"


def _reason(error: Exception) -> str:
    text = str(error).rstrip(".")
    if isinstance(error, EventjetError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
