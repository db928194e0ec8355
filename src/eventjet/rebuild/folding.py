"""Fold the raw records of a partition into rows with the projection's own fold, the same in every engine.

`ChunkLoader` loads the rows that one process folds, part by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eventjet.codec.headers import RawRecord
from eventjet.codec.records import Earlier, chained
from eventjet.domain.quarantined import Quarantined
from eventjet.domain.recorded import Recorded
from eventjet.projections.app_ref import Application
from eventjet.projections.fold import BlockedAggregates, Fold, Offered, Offering, ParkingFold, RowKey, Rows, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import Part, Target
from eventjet.rebuild.workspace import load_part

ENTRIES_HELD_MAX = 50_000
"""The maximum number of entries' rows that wait for the next load."""
_REPORT_EVERY = 2_000


class Folding:
    """The fold of one projection over one partition's events, in the order of the log; it keeps all rows in memory.

    `resolutions` maps the positions in the projection's live quarantine to their resolutions; `parked` are the other
    events that the fold quarantined.
    """

    def __init__(self, resolved: ResolvedProjection, dialect: ColumnValues, resolutions: Mapping[int, str]) -> None:
        self.resolved = resolved
        self.parked: list[Quarantined] = []
        self.codec = RowCodec(resolved.table, resolved.row_type, dialect)
        self.events = frozenset(resolved.events)
        self._rows: Rows = {}
        self.own_key: str | None = None
        """The token of the only key for which the next event is folded; None for all keys of the event."""
        self.blocked = BlockedAggregates(known=resolutions)
        self._parking = ParkingFold(resolved, self.codec) if resolved.quarantines else None
        several = resolved.reads and resolved.key_of is None
        self._fold = Fold(replace(resolved, keys_of=self._keys_of) if several else resolved, self.codec)

    def take(self, events: Iterable[Recorded[Any]]) -> None:
        """Fold the next events; raises `HandlerFailed` and `RowRefused`."""
        self._apply(self._fold(self._rows, events))

    def take_offers(self, offers: Iterable[Offered]) -> None:
        """Fold the next events of a projection that quarantines, and quarantine those that cannot be folded."""
        assert self._parking is not None
        folded = self._parking(self._rows, offers, self.blocked)
        self.blocked.aggregates.update(folded.blocked)
        self.parked += folded.parked
        self._apply(folded.changed)

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return an iterator over the rows as the database driver takes them, in the table's column order."""
        return map(self.codec.dump, self._rows.values())

    def drain(self) -> list[Sequence[Any]]:
        """Return the rows and remove them from memory; for entries, whose rows no later event changes."""
        rows = list(self.rows())
        self._rows.clear()
        return rows

    def is_due(self) -> bool:
        """Tell whether enough rows of entries wait for `drain` to be called."""
        return not self.resolved.reads and len(self._rows) >= ENTRIES_HELD_MAX

    def __len__(self) -> int:
        return len(self._rows)

    def _apply(self, changed: Rows) -> None:
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
    """The folds of several projections over one pass of the log, which decodes each record once."""

    def __init__(
        self, app: Application, targets: Sequence[Target], skipped: Mapping[int, str], predecessors: Earlier | None
    ) -> None:
        """Without `predecessors`, no predecessor is checked, because an earlier task has checked them.

        `skipped` are the positions with a skip marker, and the reasons.
        """
        catalog = app.catalog.of_log(skipped)
        self.each = [
            Folding(fold_of(app, target.projection), target.database.dialect, target.known) for target in targets
        ]
        event_types = {event for folding in self.each for event in folding.events}
        self._decode = chained(catalog, event_types, predecessors)
        self._offer: Offering | None = None
        if any(folding.resolved.quarantines for folding in self.each):
            self._offer = Offering(
                catalog, event_types, {position for target in targets for position in target.known}, predecessors
            )
            self._readers = [reader(catalog, folding.resolved, folding.blocked.known) for folding in self.each]

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
        """Fold (token, record) pairs, one for each key that a record's event has in this partition."""
        (folding,) = self.each

        def events() -> Iterator[Recorded[Any]]:
            for token, record in records:
                folding.own_key = token
                event = self._decode(record)
                if event is not None:
                    yield event

        folding.take(events())

    def _take_offers(self, offers: Sequence[Offered]) -> None:
        """Give each projection its own events; an unreadable record is decoded again for each, which may raise."""
        for folding, decode in zip(self.each, self._readers, strict=True):
            event_types, known = folding.events, folding.blocked.known
            own_offers = [
                offer
                for offer in offers
                if offer.position in known
                or (
                    type(offer.event.data) in event_types
                    if offer.event is not None
                    else decode(offer.record) is not None
                )
            ]
            if folding.resolved.quarantines:
                folding.take_offers(own_offers)
            else:
                folding.take([_event_of(offer) for offer in own_offers])


def _event_of(offer: Offered) -> Recorded[Any]:
    """Return the decoded event, or raise its error, for a projection that does not quarantine."""
    if offer.event is None:
        assert offer.error is not None
        raise offer.error
    return offer.event


class ChunkLoader:
    """A loader that folds records with several projections and loads the rows in parts, numbered from `first`."""

    def __init__(self, foldings: Foldings, targets: Sequence[Target], watch: Watch, first: int = 0) -> None:
        self._watch = watch
        self._first = first
        self._foldings = foldings
        self._pairs = list(zip(targets, foldings.each, strict=True))
        self._parts: list[Part] = []

    def take(self, records: list[RawRecord]) -> None:
        """Fold the next records, and load the rows of entries when enough of them wait."""
        self._foldings.take(records)
        for target, folding in self._pairs:
            if folding.is_due():
                self._load(target, folding)

    def finish(self, events: int) -> list[Part]:
        """Load the remaining rows; the last part of each projection is counted with all `events` that were taken."""
        total = sum(len(folding) for _, folding in self._pairs)
        done = 0
        for target, folding in self._pairs:
            rows = len(folding)
            self._load(target, folding, events, done, total)
            done += rows
        return self._parts

    def _load(self, target: Target, folding: Folding, events: int = 0, done: int = 0, total: int = 0) -> None:
        number = self._first + len(self._parts)
        parked, folding.parked = folding.parked, []
        rows = self._with_progress(iter(folding.rows() if folding.resolved.reads else folding.drain()), done, total)
        self._parts.append(Part(target.projection, events, load_part(target, number, rows), parked))

    def _with_progress(self, rows: Iterator[Sequence[Any]], done: int, total: int) -> Iterator[Sequence[Any]]:
        """Yield the rows and report progress from `done` of `total` on; without a total, only check for `Stopped`."""
        for number, row in enumerate(rows, start=done):
            if number % _REPORT_EVERY == 0:
                self._watch.tell("load", number, total) if total else self._watch.check()
            yield row


def fold_of(app: Application, name: str) -> ResolvedProjection:
    """Return a folded projection by name; the passes that an engine runs have no others."""
    resolved = app.projections[name]
    assert isinstance(resolved, ResolvedProjection)
    return resolved


class Tokens:
    """A function from an event to the tokens of the keys whose rows it changes, for one projection."""

    def __init__(self, resolved: ResolvedProjection, dialect: ColumnValues) -> None:
        self._fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type, dialect))

    def __call__(self, event: Recorded[Any]) -> list[str]:
        """Return one token for each key of the event; raises `HandlerFailed`."""
        return [key_token(key) for key in self._fold.keys((event,))]


def key_token(key: RowKey) -> str:
    """Return a key as text; different keys of one table, whose parts have the same types, have different texts."""
    parts = [str(part) for part in key]
    return parts[0] if len(parts) == 1 else "".join(f"{len(part)}:{part}" for part in parts)
