"""The quarantine of a projection: the fold that parks what it cannot take and goes on. Pure, the same in every engine.

A parked event blocks its aggregate: later events of it wait in order until somebody gives a verdict. An event is either
in the rows or in the quarantine, never in both and never in neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import MSG_ID, TYPE, RawRecord, header
from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.codec.records import Earlier, chained
from eventjet.codec.subjects import entity_of
from eventjet.domain.parked import BLOCKED, DROPPED, PARKED, AggregateKey, Parked
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, UndecodableEvent, UnexpectedExit, UnknownEvent
from eventjet.projections.fold import RowKey, Rows, row_steps, without_ghosts
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import AnyResolved
from eventjet.shown import TEXT_MAX, cut

_REASON_MAX = TEXT_MAX + 100
"""With how long it was, where it was cut already."""
_NAME_MAX = 200
_SUBJECT_MAX = 400
_STRANGE = "?"
_NEWER_MAX = 1_000


class Offered:
    """One record for a projection that quarantines: its event, or why there is none. Holds the record until then."""

    __slots__ = ("error", "event", "record")

    def __init__(self, record: RawRecord, event: Recorded[Any] | None, error: Exception | None = None) -> None:
        self.record = record
        self.event = event
        self.error = error

    @property
    def position(self) -> int:
        return self.record[0]

    @property
    def event_id(self) -> str:
        return header(self.record[3], MSG_ID) or ""

    @property
    def aggregate_key(self) -> AggregateKey:
        """Whose event it is; known without decoding it."""
        return aggregate_key_of(self.record[2])

    def failed(self, error: Exception) -> Offered:
        """The same, to be parked: the database refused what came of it."""
        return Offered(self.record, None, error)


@dataclass(slots=True)
class BlockedAggregates:
    """What is blocked at some position of the log."""

    aggregates: set[AggregateKey] = field(default_factory=set[AggregateKey])
    """Aggregates whose events wait."""
    known: Mapping[int, str] = field(default_factory=dict[int, str])
    """Positions further on whose resolution is known already: parked, blocked, to be tried again or dropped."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """What came of some events."""

    changed: Rows
    parked: Sequence[Parked]
    blocked: Collection[AggregateKey]
    """Aggregates that are blocked from here on."""


class Offering:
    """Decodes records into offers. None for what the projection does not take and no resolution is known of.

    Raises `UnknownEvent` for a newer schema of an event that is known: a newer deploy can read it.
    """

    __slots__ = ("_catalog", "_decode", "_known")

    def __init__(
        self, catalog: Catalog, events: Collection[type], known: Collection[int] = (), earlier: Earlier | None = None
    ) -> None:
        self._catalog = catalog
        self._decode = chained(catalog, events, earlier)
        self._known = known

    def expect(self, records: Sequence[RawRecord]) -> None:
        self._decode.expect(records)

    def __call__(self, record: RawRecord) -> Offered | None:
        try:
            event = self._decode(record)
        except CodecError as error:
            if isinstance(error, UnknownEvent) and is_newer(self._catalog, error):
                raise
            return Offered(record, None, error)
        if event is None and record[0] not in self._known:
            return None
        return Offered(record, event)


class Reader(Protocol):
    """What turns records into a batch's events: `Recorded`, or `Offered` where the projection quarantines."""

    def __call__(self, record: RawRecord, /) -> Any: ...

    def expect(self, records: Sequence[RawRecord]) -> None:
        """Say which records come next, in the order of the log."""
        ...


def reader(
    catalog: Catalog, resolved: AnyResolved, known: Collection[int] = (), earlier: Earlier | None = None
) -> Reader:
    """What reads the events of a projection; it asks `earlier` for what they follow, and without that for nothing."""
    if resolved.quarantines:
        return Offering(catalog, resolved.events, known, earlier)
    return chained(catalog, resolved.events, earlier)


class ParkingFold:
    """`Fold` for a projection that quarantines: keyed by the aggregate id, one row an event. Holds no rows."""

    __slots__ = ("_codec", "_key_of", "_resolved")

    def __init__(self, resolved: ResolvedProjection, codec: RowCodec) -> None:
        assert resolved.keyed_by_aggregate
        assert resolved.key_of is not None
        self._resolved = resolved
        self._codec = codec
        self._key_of = resolved.key_of

    def keys(self, offers: Iterable[Offered]) -> list[RowKey]:
        """Every key the readable ones touch, once; a key that is refused is met again when it is folded."""
        found: dict[RowKey, None] = {}
        key_of = self._key_of
        for offer in offers:
            if offer.event is not None:
                try:
                    found[key_of(offer.event)] = None
                except BaseException:  # noqa: BLE001, S112 - the fold parks it
                    continue
        return list(found)

    def __call__(self, rows: Mapping[RowKey, Any], offers: Iterable[Offered], blocked: BlockedAggregates) -> Sorted:
        """The rows that changed, normalised, None where one is gone; and what was not taken. Changes none of these."""
        key_of = self._key_of
        aggregates, known = blocked.aggregates, blocked.known
        changed: Rows = {}
        take, _ = row_steps(self._resolved, self._codec, rows, changed)
        parked: list[Parked] = []
        fresh: set[AggregateKey] = set()
        for offer in offers:
            if (aggregates or fresh or known) and _waits(offer, aggregates, known, fresh, parked):
                continue
            try:
                if offer.error is not None:
                    raise offer.error
                if offer.event is not None:
                    take(((offer.event, key_of(offer.event)),))
            except BaseException as raised:  # noqa: BLE001 - whatever it is, it is kept with its event
                error = UnexpectedExit.instead_of(raised)
                fresh.add(offer.aggregate_key)
                parked.append(parked_for(offer, error, private=self._resolved.is_private))
        return Sorted(without_ghosts(changed, rows), parked, fresh)


def _waits(
    offer: Offered,
    aggregates: Collection[AggregateKey],
    known: Mapping[int, str],
    fresh: set[AggregateKey],
    parked: list[Parked],
) -> bool:
    """Whether an event is not to be tried: its aggregate is blocked, or its resolution says so."""
    resolution = known.get(offer.position)
    if resolution == DROPPED:
        return True
    key = offer.aggregate_key
    is_blocked = key in fresh or key in aggregates
    if resolution is None:
        if is_blocked:
            parked.append(blocked_by(offer))
        return is_blocked
    if not is_blocked:
        fresh.add(key)
    elif resolution != BLOCKED:
        # An earlier event of its aggregate could not be taken this time.
        parked.append(blocked_by(offer))
    return True


def blocked_by(offer: Offered) -> Parked:
    """The event as it waits behind another one of its aggregate."""
    return _kept(offer, BLOCKED)


def parked_for(offer: Offered, error: Exception, *, private: bool) -> Parked:
    """The parked event, with what can be told of the reason; `private` where something personal is at hand."""
    told = _plain(traceback_of(error, private=private))
    return _kept(offer, PARKED, _reason(error, private=private), told, offer.record[4])


def is_of(event_id: str, record: RawRecord | None) -> bool:
    """Whether a record is the event that was parked with this id: after a restore another may have its position."""
    return record is not None and blocked_by(Offered(record, None)).event_id == event_id


def is_newer(catalog: Catalog, error: UnknownEvent) -> bool:
    """Whether the event is known in an older schema, so that only a newer deploy can read it."""
    older = range(1, min(error.schema, _NEWER_MAX))
    return any(catalog.resolve(error.type_name, schema) is not None for schema in older)


@lru_cache(maxsize=65_536)
def aggregate_key_of(subject: bytes) -> AggregateKey:
    """Whose event a subject says it is; never raises. What names no entity stands for itself."""
    text = subject.decode("utf-8", "backslashreplace")
    try:
        aggregate, aggregate_id = entity_of(text.encode())
    except ValueError:
        return _STRANGE, _bounded(text)
    return aggregate, aggregate_id


def _kept(offer: Offered, resolution: str, reason: str = "", told: str = "", payload: bytes | None = None) -> Parked:
    block = offer.record[3]
    event_id, event_type = ((header(block, name) or "")[:_NAME_MAX] for name in (MSG_ID, TYPE))
    return Parked(
        offer.position, *offer.aggregate_key, _plain(event_id), _plain(event_type), resolution, reason, told, payload
    )


def _bounded(subject: str) -> str:
    """A subject that fits into an index."""
    text = _plain(subject)
    if len(text.encode()) <= _SUBJECT_MAX:
        return text
    return f"{text[:100]}…{hashlib.sha256(text.encode()).hexdigest()}"


def _reason(error: Exception, *, private: bool) -> str:
    """One line."""
    if isinstance(error, UndecodableEvent):
        text = f"it cannot be decoded: {error.reason}"
    elif isinstance(error, UnknownEvent):
        text = f"{error.type_name!r} schema {error.schema} is not declared"
    else:
        text = reason_of(error, private=private)
    return cut(_plain(next(iter(text.strip().splitlines()), "").rstrip(".: ")), _REASON_MAX) or type(error).__name__


def _plain(text: str) -> str:
    """The text as every database takes it."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
