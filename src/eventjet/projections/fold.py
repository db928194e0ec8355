"""THE fold: events in the order of the log onto rows, the same in every engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, NoReturn, TypeAlias

from eventjet.codec.reasons import reason_of
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy
from eventjet.errors import CodecError, HandlerFailed, StoreError, UnexpectedExit
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.shown import shown

RowKey: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[RowKey, Any]
"""Key → row, or None where there is none."""

_PASSED_ON = (CodecError, StoreError, HandlerFailed)
"""What an iterator of events may raise: not the handler's doing, or told already."""
_UNCHANGED: Any = object()


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
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
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
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
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
        changed: Rows = {}
        take, current = row_steps(self._resolved, self._codec, rows, changed)
        try:
            take(self._keyed(events) if each_key is None else zip(events, each_key, strict=True))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(current(), error)
        return without_ghosts(changed, rows)

    def _keyed(self, events: Iterable[Recorded[Any]]) -> Iterator[tuple[Recorded[Any], RowKey]]:
        """Each event with its key, or with each of its keys."""
        key_of, keys_of = self._resolved.key_of, self._resolved.keys_of
        event: Recorded[Any] | None = None
        try:
            if key_of is not None:
                for event in events:
                    yield event, key_of(event)
            else:
                for event in events:
                    for key in keys_of(event):
                        yield event, key
        except BaseException as error:
            trace = error.__traceback__
            if isinstance(error, GeneratorExit) and (trace is None or trace.tb_next is None):
                raise  # whoever takes these takes no more
            self._fail(event, error)  # see `__call__`

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
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return made

    def _fail(self, event: Recorded[Any] | None, raised: BaseException) -> NoReturn:
        error = UnexpectedExit.instead_of(raised)
        if isinstance(error, _PASSED_ON):
            raise error
        reason = reason_of(error, private=self._resolved.is_private)
        position, aggregate_id = (event.position, event.aggregate_id) if event is not None else (0, "")
        raise HandlerFailed(self._resolved.name, position, aggregate_id, reason) from error


def row_steps(
    resolved: ResolvedProjection, codec: RowCodec, rows: Mapping[RowKey, Any], changed: Rows
) -> tuple[Callable[[Iterable[tuple[Recorded[Any], RowKey]]], None], Callable[[], Recorded[Any] | None]]:
    """(what folds events onto the rows of their keys, which of them it is at, None before the first).

    A row comes out of `changed`, or else of `rows`, and goes into `changed`. Where it raises, those before are folded.
    """
    apply, normalise, key_in = resolved.apply, codec.normalise, codec.key
    is_open, is_same = codec.is_open, codec.is_same
    changed_by_now, before_batch = changed.get, rows.get
    fold = resolved.fold_alone
    event: Recorded[Any] | None = None

    def take(pairs: Iterable[tuple[Recorded[Any], RowKey]]) -> None:
        nonlocal event
        for event, key in pairs:
            before = changed_by_now(key, _UNCHANGED)
            if before is _UNCHANGED:
                before = before_batch(key)
            given = own_copy(before) if is_open else before
            after = apply(given, event, key) if fold is None else fold(given, event)
            if after is given and (given is before or is_same(given, before)):
                continue
            if after is not None:
                after = normalise(after, before)
                if key_in(after) != key:
                    raise ValueError(_stranger(key_in(after), key))
            changed[key] = after

    return take, lambda: event


def without_ghosts(changed: Rows, rows: Mapping[RowKey, Any]) -> Rows:
    """Leave out rows that came and went within these events."""
    if None not in changed.values():
        return changed
    return {key: row for key, row in changed.items() if row is not None or rows.get(key) is not None}


def _stranger(got: RowKey, key: RowKey) -> str:
    return f"it returned a row with the key {shown(got)} for the key {shown(key)}"
