"""Fold the raw records of a partition into rows with the projection's own fold, the same in every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeAlias

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord
from eventjet.codec.records import Earlier, chained
from eventjet.domain.quarantined import Quarantined
from eventjet.domain.recorded import Recorded
from eventjet.projections.app_ref import Application
from eventjet.projections.by_state import StateRow
from eventjet.projections.columns import key_forms
from eventjet.projections.fold import (
    BlockedAggregates,
    Fold,
    Offered,
    Offering,
    QuarantiningFold,
    Reader,
    RowKey,
    Rows,
    reader,
)
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import ColumnValues, RowCodec
from eventjet.projections.state_fold import Cell, Joined, StateId
from eventjet.rebuild.plan import Route
from eventjet.rebuild.runs import Target

ENTRIES_MAX = 50_000
"""The maximum number of entries' rows that wait for the next load."""


Entry: TypeAlias = tuple[tuple[Any, ...], int, str, bytes | None]
"""(the parts of a key as numbers and text, position of an event, its aggregate or empty, the state after it or None)
"""


class Folding:
    """The fold of one projection over one partition's events, in the order of the log; it keeps all rows in memory.

    `resolutions` maps the positions in the projection's live quarantine to their resolutions; `quarantined` are the
    other events that the fold quarantined.
    """

    def __init__(self, resolved: ResolvedProjection, dialect: ColumnValues, resolutions: Mapping[int, str]) -> None:
        self.resolved = resolved
        self.quarantined: list[Quarantined] = []
        self._dialect = dialect
        self.codec = RowCodec(resolved.table, resolved.row_type, dialect)
        self.events = frozenset(resolved.events)
        self._key_forms = [key_forms(column) for column in resolved.table.primary_key.columns]
        self._rows: Rows = {}
        self._cells: dict[StateId, Cell] = {}
        self.own_key: str | None = None
        """The token of the only key for which the next event is folded; None for all keys of the event."""
        self.blocked = BlockedAggregates(resolutions=resolutions)
        self._quarantining = QuarantiningFold(resolved, self.codec) if resolved.quarantines else None
        several = resolved.reads and resolved.key_of is None
        self._fold = Fold(replace(resolved, keys_of=self._keys_of) if several else resolved, self.codec)

    def take(self, events: Iterable[Recorded[Any]]) -> None:
        """Fold the next events; raises `HandlerFailed`, `RowRefused` and `ProjectionStopped`."""
        if self._fold.states is None:
            self._apply(self._fold(self._rows, events))
            return
        joining = self._fold.join(events, self._cells)
        self._cells.update(joining.cells)
        self._apply(self._fold(self._rows, joining.events, joining.keys))

    def take_offers(self, offers: Iterable[Offered]) -> None:
        """Fold the next events of a projection that quarantines, and quarantine those that cannot be folded."""
        assert self._quarantining is not None
        folded = self._quarantining(self._rows, offers, self.blocked)
        self.blocked.aggregates.update(folded.blocked)
        self.quarantined += folded.quarantined
        self._apply(folded.changed)

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return an iterator over the rows as the database driver takes them, in the table's column order."""
        return map(self.codec.dump, self._rows.values())

    def entries_of(self, events: Iterable[Recorded[Any]]) -> Iterator[tuple[str, Entry]]:
        """Fold the states of the next events, and yield an entry with the token of its key for each key of an event."""
        joins, forms = self.resolved.joins, self._key_forms
        assert joins is not None
        joining = self._fold.join(events, self._cells)
        self._cells.update(joining.cells)
        for joined, key in zip(joining.events, joining.keys, strict=True):
            state = None
            if joins.takes_state and joined.aggregate:
                state = self._fold.encoded(joined)
            parts = tuple([dump(part) for part, (dump, _) in zip(key, forms, strict=True)])
            yield key_token(key), (parts, joined.position, joined.aggregate, state)

    def take_entries(self, pairs: Sequence[tuple[Entry, RawRecord]], decode: Reader) -> None:
        """Fold entries with the records of their events, in the log's order; raises `HandlerFailed`, `RowRefused`."""
        joins, forms = self.resolved.joins, self._key_forms
        assert joins is not None
        joined: list[Joined] = []
        keys: list[RowKey] = []
        for (parts, _, aggregate, encoded), record in pairs:
            state = None if encoded is None else joins.sources[aggregate].codec.decode(encoded)
            event = decode(record)
            assert event is not None, "an earlier task has decoded it"
            joined.append(Joined(event, aggregate, state))
            keys.append(tuple([load(part) for part, (_, load) in zip(parts, forms, strict=True)]))
        self._apply(self._fold(self._rows, joined, keys))

    def state_rows(self) -> Iterator[Sequence[Any]]:
        """Return an iterator over the rows of the table of states; none where the projection has no `by_state`."""
        joins, states = self.resolved.joins, self._fold.states
        if joins is None or states is None:
            return
        dump = RowCodec(joins.table, StateRow, self._dialect).dump
        for state_id, cell in self._cells.items():
            yield from map(dump, self._fold.state_rows({state_id: cell}))

    def drain(self) -> list[Sequence[Any]]:
        """Return the rows and remove them from memory; for entries, whose rows no later event changes."""
        rows = list(self.rows())
        self._rows.clear()
        return rows

    def is_due(self) -> bool:
        """Tell whether enough rows of entries wait for `drain` to be called."""
        return not self.resolved.reads and len(self._rows) >= ENTRIES_MAX

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
    """The folds of several projections over one pass of the log, which decodes each record once.

    Projections that quarantine decode their own records, because an error of decoding is one of their outcomes; and so
    do those with `by_state`, because they need more events.
    """

    def __init__(self, each: Sequence[Folding], catalog: Catalog, predecessors: Earlier | None) -> None:
        """`catalog` has the log's skip markers. Without `predecessors` none is checked: an earlier task has done so."""
        self.each = each
        self._joined = [
            (folding, reader(catalog, folding.resolved, (), predecessors))
            for folding in self.each
            if folding.resolved.joins is not None
        ]
        self._plain = [
            folding for folding in self.each if not folding.resolved.quarantines and folding.resolved.joins is None
        ]
        self._decode = chained(catalog, {event for folding in self._plain for event in folding.events}, predecessors)
        self._quarantining = [
            (folding, Offering(catalog, folding.events, folding.blocked.resolutions, predecessors))
            for folding in self.each
            if folding.resolved.quarantines
        ]

    def take_of(self, route: Route) -> Callable[[Any], None]:
        """Return the method that folds what comes to a task by this route."""
        return {Route.BY_KEY: self.take_keyed, Route.BY_STATE: self.take_joined}.get(route, self.take)

    def take(self, records: Sequence[RawRecord]) -> None:
        """Fold the next records; raises `CodecError`, `ProjectionError`, `StoreUnavailable` and `Unreachable`."""
        for folding, offer in self._quarantining:
            offer.expect(records)
            folding.take_offers([offered for record in records if (offered := offer(record)) is not None])
        for folding, decode in self._joined:
            decode.expect(records)
            folding.take([event for record in records if (event := decode(record)) is not None])
        if not self._plain:
            return
        decode = self._decode
        decode.expect(records)
        events = [event for record in records if (event := decode(record)) is not None]
        for folding in self._plain:
            folding.take(
                events if len(self._plain) == 1 else [event for event in events if type(event.data) in folding.events]
            )

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

    def take_joined(self, pairs: Sequence[tuple[Entry, RawRecord]]) -> None:
        """Fold entries of a projection with `by_state`, each with the record of its event, in the order of the log."""
        ((folding, decode),) = self._joined
        folding.take_entries(pairs, decode)


def foldings_of(app: Application, targets: Sequence[Target]) -> list[Folding]:
    """Return the folds whose rows are loaded into these targets, in their order."""
    return [Folding(fold_of(app, target.projection), target.database.dialect, target.resolutions) for target in targets]


def fold_of(app: Application, name: str) -> ResolvedProjection:
    """Return a folded projection by name; the passes that an engine runs have no others."""
    resolved = app.projections[name]
    assert isinstance(resolved, ResolvedProjection)
    return resolved


def key_token(key: RowKey) -> str:
    """Return a key as text; different keys of one table, whose parts have the same types, have different texts."""
    # Members of an enum may be written alike.
    parts = [part.name if isinstance(part, Enum) else str(part) for part in key]
    return parts[0] if len(parts) == 1 else "".join(f"{len(part)}:{part}" for part in parts)
