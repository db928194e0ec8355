"""Raw records in, rows out: the projection's own fold over whole partitions, the same in every engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eventjet.codec.headers import RawRecord
from eventjet.codec.records import Earlier, chained
from eventjet.domain.parked import Parked
from eventjet.domain.recorded import Recorded
from eventjet.projections.app_ref import Application
from eventjet.projections.fold import BlockedAggregates, Fold, Offered, Offering, ParkingFold, RowKey, Rows, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.rebuild.runs import Target

ENTRIES_HELD_MAX = 50_000
"""Rows of entries that wait for the next load."""


class Folding:
    """One projection over the events of one partition, in the order of the log. Holds the partition's rows.

    Where the projection quarantines, `known` is what was decided about events of it, and `parked` what is held back
    beyond that.
    """

    def __init__(self, resolved: ResolvedProjection, dialect: ColumnValues, known: Mapping[int, str]) -> None:
        self.resolved = resolved
        self.parked: list[Parked] = []
        self.codec = RowCodec(resolved.table, resolved.row_type, dialect)
        self.events = frozenset(resolved.events)
        self._rows: Rows = {}
        self.own_key: str | None = None
        """The token of the one key that the next event has come for; None for all of its keys."""
        self.held = BlockedAggregates(known=known)
        self._parking = ParkingFold(resolved, self.codec) if resolved.quarantines else None
        several = resolved.reads and resolved.key_of is None
        self._fold = Fold(replace(resolved, keys_of=self._keys_of) if several else resolved, self.codec)

    def take(self, events: Iterable[Recorded[Any]]) -> None:
        """Fold the next events; raises `HandlerFailed` and `RowRefused`."""
        self._keep(self._fold(self._rows, events))

    def take_offers(self, offers: Iterable[Offered]) -> None:
        """Fold the next events and park those that cannot be taken; for a projection that quarantines."""
        assert self._parking is not None
        found = self._parking(self._rows, offers, self.held)
        self.held.aggregates.update(found.blocked)
        self.parked += found.parked
        self._keep(found.changed)

    def rows(self) -> Iterator[Sequence[Any]]:
        """What the driver takes, row by row, in the table's column order."""
        return map(self.codec.dump, self._rows.values())

    def drain(self) -> list[Sequence[Any]]:
        """`rows`, and forget them: for entries, which later events do not change."""
        made = list(self.rows())
        self._rows.clear()
        return made

    def is_due(self) -> bool:
        """Whether so many entries wait that they should be drained."""
        return not self.resolved.reads and len(self._rows) >= ENTRIES_HELD_MAX

    def __len__(self) -> int:
        return len(self._rows)

    def _keep(self, changed: Rows) -> None:
        rows = self._rows
        for key, row in changed.items():
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row

    def _keys_of(self, event: Recorded[Any]) -> tuple[RowKey, ...]:
        keys = self.resolved.keys_of(event)
        if self.own_key is None:
            return keys
        return tuple(key for key in keys if key_token(key) == self.own_key)


class Foldings:
    """Several projections over one reading of the log: each record is decoded once."""

    def __init__(
        self, app: Application, targets: Sequence[Target], voids: Mapping[int, str], earlier: Earlier | None
    ) -> None:
        """Without `earlier`, whoever read the records before has held each to the one before it."""
        catalog = app.catalog.of_log(voids)
        self.each = [Folding(fold_of(app, one.projection), one.database.dialect, one.known) for one in targets]
        wanted = {one for folding in self.each for one in folding.events}
        self._decode = chained(catalog, wanted, earlier)
        self._offer: Offering | None = None
        if any(folding.resolved.quarantines for folding in self.each):
            self._offer = Offering(catalog, wanted, {one for target in targets for one in target.known}, earlier)
            self._own = [reader(catalog, one.resolved, one.held.known) for one in self.each]

    def take(self, records: Sequence[RawRecord]) -> None:
        """Fold the next records; raises `CodecError`, `ProjectionError`, `StoreUnavailable` and `Unreachable`."""
        if self._offer is not None:
            offer = self._offer
            offer.expect(records)
            self._take_offers([offered for record in records if (offered := offer(record)) is not None])
            return
        decode = self._decode
        decode.expect(records)
        events = [event for record in records if (event := decode(record)) is not None]
        if len(self.each) == 1:
            self.each[0].take(events)
            return
        for folding in self.each:
            folding.take([event for event in events if type(event.data) in folding.events])

    def take_keyed(self, records: Iterable[tuple[str, RawRecord]]) -> None:
        """As `take`, for records that come once for each key they touch, with its token: a partition sees its own."""
        (folding,) = self.each

        def events() -> Iterator[Recorded[Any]]:
            for token, record in records:
                folding.own_key = token
                event = self._decode(record)
                if event is not None:
                    yield event

        folding.take(events())

    def _take_offers(self, offers: Sequence[Offered]) -> None:
        """Each projection's own: what has no event is looked at again with its eyes, and may raise."""
        for folding, own in zip(self.each, self._own, strict=True):
            wanted, known = folding.events, folding.held.known
            mine = [
                one
                for one in offers
                if one.position in known
                or (type(one.event.data) in wanted if one.event is not None else own(one.record) is not None)
            ]
            if folding.resolved.quarantines:
                folding.take_offers(mine)
            else:
                folding.take([_readable(one) for one in mine])


def _readable(offer: Offered) -> Recorded[Any]:
    """The event, for a projection that parks none."""
    if offer.event is None:
        assert offer.error is not None
        raise offer.error
    return offer.event


def fold_of(app: Application, name: str) -> ResolvedProjection:
    """A projection that is folded, as every one is that a plan has an engine for."""
    found = app.projections[name]
    assert isinstance(found, ResolvedProjection)
    return found


class Tokens:
    """The tokens of the keys that events of one projection touch."""

    def __init__(self, resolved: ResolvedProjection, dialect: ColumnValues) -> None:
        self._fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type, dialect))

    def __call__(self, event: Recorded[Any]) -> list[str]:
        """One for each key; raises `HandlerFailed`."""
        return [key_token(key) for key in self._fold.keys((event,))]


def key_token(key: RowKey) -> str:
    """A key as text, injectively among the keys of one table: the types of its parts are the table's."""
    parts = [str(part) for part in key]
    return parts[0] if len(parts) == 1 else "".join(f"{len(part)}:{part}" for part in parts)
