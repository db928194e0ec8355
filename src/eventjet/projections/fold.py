"""`Fold` applies events in the order of the log to rows, the same way in workers, rebuilds and tests. Pure.

`QuarantiningFold` is the fold of a projection that quarantines: it keeps an event that fails aside and goes on. Such an
event blocks its aggregate: later events of the aggregate wait in order until somebody decides. An event is either in
the rows or in the quarantine, never in both and never in neither. `reader` decodes the records for either fold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, Protocol, TypeAlias

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import MSG_ID, TYPE, RawRecord, event_id_of, header
from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.codec.records import Earlier, chained
from eventjet.codec.subjects import entity_of
from eventjet.domain.identity import decode_id
from eventjet.domain.quarantined import BLOCKED, DROPPED, QUARANTINED, AggregateKey, Quarantined
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy
from eventjet.errors import (
    CodecError,
    HandlerFailed,
    StoreError,
    UndecodableEvent,
    UnencodableEvent,
    UnexpectedExit,
    UnknownEvent,
)
from eventjet.projections.by_state import StateRow
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import AnyResolved
from eventjet.projections.state_fold import Cell, Joined, Joining, StateFold, StateId, StateReader
from eventjet.text import TEXT_MAX, cut, shown, with_escapes

RowKey: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = dict[RowKey, Any]
"""Rows by key; None for a row that does not exist."""

_PASSED_ON = (CodecError, StoreError, HandlerFailed)
"""Errors that an iterator of events may raise: not the handler's fault, or already named after their event."""
_UNCHANGED: Any = object()


class Fold:
    """Applies one projection's function to many events. Holds no rows."""

    __slots__ = ("_codec", "_resolved", "states")

    def __init__(self, resolved: ResolvedProjection, codec: RowCodec) -> None:
        self._resolved = resolved
        self._codec = codec
        self.states = None if resolved.joins is None else StateFold(resolved)
        """The fold of the states that give the keys; None where events have their keys."""

    def join(self, events: Iterable[Recorded[Any]], cells: Mapping[StateId, Cell]) -> Joining:
        """Return events with states and keys, for `__call__`; raises `HandlerFailed` and `ProjectionStopped`."""
        assert self.states is not None
        return self.states.join(events, cells, self._fail)

    def named(self, event: Recorded[Any]) -> StateId | None:
        """Return the key of the state that an event of another aggregate names, if any; raises `HandlerFailed`."""
        assert self.states is not None
        try:
            return self.states.named(event)
        except BaseException as error:  # noqa: BLE001 - whatever a function of the application raises names its event
            self._fail(event, error)

    def state_rows(self, cells: Mapping[StateId, Cell]) -> list[StateRow]:
        """Return the states that events changed as rows; raises `HandlerFailed` for one that cannot be stored."""
        assert self.states is not None
        rows: list[StateRow] = []
        for state_id, cell in cells.items():
            try:
                rows.append(self.states.row(state_id, cell))
            except UnencodableEvent as error:
                raise self._unstorable(cell.position, decode_id(state_id[1]), error) from error
        return rows

    def encoded(self, joined: Joined) -> bytes:
        """Return the state that goes with an event as JSON; raises `HandlerFailed` where it cannot be stored."""
        joins = self._resolved.joins
        assert joins is not None
        try:
            return joins.sources[joined.aggregate].codec.encode(joined.state)
        except UnencodableEvent as error:
            raise self._unstorable(joined.position, joined.aggregate_id, error) from error

    def _unstorable(self, position: int, aggregate_id: str, error: UnencodableEvent) -> HandlerFailed:
        reason = "the state after it cannot be stored as JSON"
        reason += "" if self._resolved.is_private else f" ({error.reason})"
        return HandlerFailed(self._resolved.name, position, aggregate_id, reason)

    def keyed(self, events: Iterable[Recorded[Any]]) -> tuple[Sequence[Recorded[Any]], Sequence[RowKey]]:
        """Return (events, the key of each), with an event repeated for each of its keys; raises `HandlerFailed`."""
        key_of, keys_of = self._resolved.key_of, self._resolved.keys_of
        keyed: list[Recorded[Any]] = []
        keys: list[RowKey] = []
        event: Recorded[Any] | None = None
        try:
            if key_of is not None:
                keyed = list(events)
                return keyed, [key_of(event := each) for each in keyed]
            for event in events:
                for key in keys_of(event):
                    keyed.append(event)
                    keys.append(key)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return keyed, keys

    def __call__(self, rows: Mapping[RowKey, Any], events: Iterable[Any], keys: Sequence[RowKey] | None = None) -> Rows:
        """Return the rows that the events change, normalised; None for a deleted row.

        `rows` holds the rows before and is not changed. Events must be in the order of the log. `keys` are given with
        the events that `keyed` or `join` returned with them. Raises `HandlerFailed` with the event that could not be
        handled.
        """
        if not self._resolved.reads:
            return self._append(events)
        if keys is None:
            events, keys = self.keyed(events)
        changed: Rows = {}
        take, current = row_steps(self._resolved, self._codec, rows, changed)
        try:
            take(zip(events, keys, strict=True))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(current(), error)
        return without_transient(changed, rows)

    def _append(self, events: Iterable[Recorded[Any]]) -> Rows:
        codec = self._codec
        alone = len(self._resolved.key_columns) == 1
        rows: Rows = {}
        event: Recorded[Any] | None = None
        try:
            for event in events:
                for index, row in enumerate(self._resolved.entries(event)):
                    fitted = codec.normalise(row)
                    key = (event.position,) if alone else (event.position, index)
                    if codec.key(fitted) != key or (alone and index):
                        raise ValueError(_wrong_key(codec.key(fitted), (event.position, index)))
                    rows[key] = fitted
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises names its event
            self._fail(event, error)
        return rows

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
    """Return (a function that folds events, each with its key; a function that returns the event being folded).

    Rows are read from `changed`, else from `rows`, and stored in `changed`. When an event raises, the events before it
    are folded. The second function returns None before the first event.
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
            argument = own_copy(before) if is_open else before
            after = apply(argument, event, key) if fold is None else fold(argument, event)
            if after is argument and (argument is before or is_same(argument, before)):
                continue
            if after is not None:
                after = normalise(after, before)
                if key_in(after) != key:
                    raise ValueError(_wrong_key(key_in(after), key))
            changed[key] = after

    return take, lambda: event


def without_transient(changed: Rows, rows: Mapping[RowKey, Any]) -> Rows:
    """Leave out rows that were created and deleted within these events."""
    if None not in changed.values():
        return changed
    return {key: row for key, row in changed.items() if row is not None or rows.get(key) is not None}


def _wrong_key(actual: RowKey, key: RowKey) -> str:
    return f"it returned a row with the key {shown(actual)} for the key {shown(key)}"


_REASON_MAX = TEXT_MAX + 100
"""Longer than `TEXT_MAX`, to leave room for the length that is noted in a text that was cut already."""
_NAME_MAX = 200
_SUBJECT_MAX = 400
_UNKNOWN_AGGREGATE = "?"
_NEWER_MAX = 1_000


class Offered:
    """One record for a projection that quarantines, with its event, its error, or its position alone."""

    __slots__ = ("error", "event", "record")

    def __init__(self, record: RawRecord, event: Recorded[Any] | None, error: Exception | None = None) -> None:
        self.record = record
        self.event = event
        self.error = error

    @property
    def position(self) -> int:
        """The record's position in the log."""
        return self.record[0]

    @property
    def event_id(self) -> str:
        """The id in the record's header; empty where that has none."""
        return event_id_of(self.record)

    @property
    def aggregate_key(self) -> AggregateKey:
        """The aggregate of the event; known without decoding it."""
        return aggregate_key_of(self.record[2])

    def failed(self, error: Exception) -> Offered:
        """Return the same record with an error, to be quarantined because the database refused its row."""
        return Offered(self.record, None, error)


@dataclass(slots=True)
class BlockedAggregates:
    """The aggregates that are blocked at some position of the log."""

    aggregates: set[AggregateKey] = field(default_factory=set[AggregateKey])
    """Aggregates whose events wait in the quarantine."""
    resolutions: Mapping[int, str] = field(default_factory=dict[int, str])
    """Resolutions of later positions that are in the quarantine already: quarantined, blocked, retry or dropped."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The result of a `QuarantiningFold`: the rows that changed, and the events that go into the quarantine."""

    changed: Rows
    quarantined: Sequence[Quarantined]
    blocked: Collection[AggregateKey]
    """Aggregates that these events have blocked."""


class Offering:
    """Decodes records for a projection that quarantines; an error of decoding becomes part of the `Offered` record.

    Returns None for an event that the projection does not take, unless its position is in the quarantine. Raises
    `UnknownEvent` for a newer schema of a known event, which a newer deploy can read.
    """

    __slots__ = ("_catalog", "_decode", "_quarantined_positions")

    def __init__(
        self,
        catalog: Catalog,
        events: Collection[type],
        quarantined_positions: Collection[int] = (),
        earlier: Earlier | None = None,
    ) -> None:
        self._catalog = catalog
        self._decode = chained(catalog, events, earlier)
        self._quarantined_positions = quarantined_positions

    def expect(self, records: Sequence[RawRecord]) -> None:
        self._decode.expect(records)

    def __call__(self, record: RawRecord) -> Offered | None:
        try:
            event = self._decode(record)
        except CodecError as error:
            if isinstance(error, UnknownEvent) and is_newer(self._catalog, error):
                raise
            return Offered(record, None, error)
        if event is None and record[0] not in self._quarantined_positions:
            return None
        return Offered(record, event)


class Reader(Protocol):
    """Decodes records into a batch's events: `Recorded`, or `Offered` where the projection quarantines."""

    def __call__(self, record: RawRecord, /) -> Any: ...

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Announce the records that are decoded next, in the order of the log."""
        ...


def reader(
    catalog: Catalog, resolved: AnyResolved, quarantined_positions: Collection[int] = (), earlier: Earlier | None = None
) -> Reader:
    """Return the reader for a projection's events, which checks their predecessors through `earlier`, if given."""
    if resolved.quarantines:
        return Offering(catalog, resolved.events, quarantined_positions, earlier)
    if isinstance(resolved, ResolvedProjection) and resolved.joins is not None:
        return StateReader(chained(catalog, resolved.decoded, earlier), resolved.joins)
    return chained(catalog, resolved.events, earlier)


class QuarantiningFold:
    """The fold of a projection that quarantines: its key is the aggregate id, one row an event. Holds no rows."""

    __slots__ = ("_codec", "_key_of", "_resolved")

    def __init__(self, resolved: ResolvedProjection, codec: RowCodec) -> None:
        assert resolved.keyed_by_aggregate
        assert resolved.key_of is not None
        self._resolved = resolved
        self._codec = codec
        self._key_of = resolved.key_of

    def keys(self, offers: Iterable[Offered]) -> list[RowKey]:
        """Return every key that the decoded events touch, once; an event whose key raises fails again in the fold."""
        keys: dict[RowKey, None] = {}
        key_of = self._key_of
        for offer in offers:
            if offer.event is not None:
                try:
                    keys[key_of(offer.event)] = None
                except BaseException:  # noqa: BLE001, S112 - the fold quarantines it
                    continue
        return list(keys)

    def __call__(self, rows: Mapping[RowKey, Any], offers: Iterable[Offered], blocked: BlockedAggregates) -> Sorted:
        """Fold the events that are not blocked, and quarantine the others; changes none of the arguments."""
        key_of = self._key_of
        aggregates, resolutions = blocked.aggregates, blocked.resolutions
        changed: Rows = {}
        take, _ = row_steps(self._resolved, self._codec, rows, changed)
        quarantined: list[Quarantined] = []
        newly_blocked: set[AggregateKey] = set()
        for offer in offers:
            if (aggregates or newly_blocked or resolutions) and _waits(
                offer, aggregates, resolutions, newly_blocked, quarantined
            ):
                continue
            try:
                if offer.error is not None:
                    raise offer.error
                if offer.event is not None:
                    take(((offer.event, key_of(offer.event)),))
            except BaseException as exception:  # noqa: BLE001 - whatever it is, it is kept with its event
                error = UnexpectedExit.instead_of(exception)
                newly_blocked.add(offer.aggregate_key)
                quarantined.append(quarantined_for(offer, error, private=self._resolved.is_private))
        return Sorted(without_transient(changed, rows), quarantined, newly_blocked)


def _waits(
    offer: Offered,
    aggregates: Collection[AggregateKey],
    resolutions: Mapping[int, str],
    newly_blocked: set[AggregateKey],
    quarantined: list[Quarantined],
) -> bool:
    """Whether an event must not be folded, as its aggregate is blocked or its resolution says so.

    Adds the event to `quarantined` where it must wait and is not in the quarantine as such yet, and its aggregate to
    `newly_blocked` where a known resolution begins to block it.
    """
    resolution = resolutions.get(offer.position)
    if resolution == DROPPED:
        return True
    key = offer.aggregate_key
    is_blocked = key in newly_blocked or key in aggregates
    if resolution is None:
        if is_blocked:
            quarantined.append(blocked_by(offer))
        return is_blocked
    if not is_blocked:
        newly_blocked.add(key)
    elif resolution != BLOCKED:
        # An earlier event of its aggregate failed this time.
        quarantined.append(blocked_by(offer))
    return True


def blocked_by(offer: Offered) -> Quarantined:
    """Return the quarantine's row for an event that waits behind an earlier event of its aggregate."""
    return _quarantined_as(offer, BLOCKED)


def quarantined_for(offer: Offered, error: Exception, *, private: bool) -> Quarantined:
    """Return the quarantine's row for an event that failed; `private` keeps personal data out of it."""
    traceback = with_escapes(traceback_of(error, private=private))
    return _quarantined_as(offer, QUARANTINED, _reason(error, private=private), traceback, offer.record[4])


def is_of(event_id: str, record: RawRecord | None) -> bool:
    """Whether a record is the event quarantined under this id: after a restore another may have its position."""
    return record is not None and blocked_by(Offered(record, None)).event_id == event_id


def is_newer(catalog: Catalog, error: UnknownEvent) -> bool:
    """Whether the event is known in an older schema, so that only a newer deploy can read it."""
    older = range(1, min(error.schema, _NEWER_MAX))
    return any(catalog.resolve(error.type_name, schema) is not None for schema in older)


@lru_cache(maxsize=65_536)
def aggregate_key_of(subject: bytes) -> AggregateKey:
    """Return the aggregate that a subject names; never raises. A subject that names none stands for itself."""
    text = subject.decode("utf-8", "backslashreplace")
    try:
        aggregate, aggregate_id = entity_of(text.encode())
    except ValueError:
        return _UNKNOWN_AGGREGATE, _bounded(text)
    return aggregate, aggregate_id


def _quarantined_as(
    offer: Offered, resolution: str, reason: str = "", traceback: str = "", payload: bytes | None = None
) -> Quarantined:
    block = offer.record[3]
    event_id, event_type = ((header(block, name) or "")[:_NAME_MAX] for name in (MSG_ID, TYPE))
    return Quarantined(
        offer.position,
        *offer.aggregate_key,
        with_escapes(event_id),
        with_escapes(event_type),
        resolution,
        reason,
        traceback,
        payload,
    )


def _bounded(subject: str) -> str:
    """Return a subject as text that fits into an index: a long one as its beginning and its SHA-256."""
    text = with_escapes(subject)
    if len(text.encode()) <= _SUBJECT_MAX:
        return text
    return f"{text[:100]}…{hashlib.sha256(text.encode()).hexdigest()}"


def _reason(error: Exception, *, private: bool) -> str:
    """Return why an event failed, in one line."""
    if isinstance(error, UndecodableEvent):
        text = f"it cannot be decoded: {error.reason}"
    elif isinstance(error, UnknownEvent):
        text = f"{error.type_name!r} schema {error.schema} is not declared"
    else:
        text = reason_of(error, private=private)
    return (
        cut(with_escapes(next(iter(text.strip().splitlines()), "").rstrip(".: ")), _REASON_MAX) or type(error).__name__
    )
