"""Search aggregates by id prefix or last change, fold their state at a version, and compare two states."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection

from eventjet.app import App
from eventjet.codec.headers import RawRecord, event_id_of, stored_at
from eventjet.codec.json import read_json
from eventjet.codec.records import Decoder
from eventjet.codec.subjects import entity_shown, snapshot_bucket
from eventjet.commands.history import version_in
from eventjet.commands.loading import fold_records
from eventjet.commands.repository import Repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import FoldedState
from eventjet.domain.personal import masked
from eventjet.errors import CodecError, DefinitionError, HistoryBroken, Refused, StoreError, Unreachable
from eventjet.jetstream.client import Client
from eventjet.log.snapshots import KeyValueSnapshots, SnapshotCodec
from eventjet.log.store import EventStore
from eventjet.operations.events import plain_json
from eventjet.projections.resolve import ResolvedProjection
from eventjet.sql import checkpoint
from eventjet.sql.database import dialect_of
from eventjet.sql.locations import located
from eventjet.sql.statements import keys_from

MATCHES_MAX = 50
"""Aggregates on one page."""
_LAST_RECORDS = 200
_CHUNK = 50
_BYTES_MAX = 4_000_000
"""Limit on the bytes of the last records together: one record may have 900,000."""


@dataclass(frozen=True, slots=True)
class AggregateMatch:
    """An aggregate that has events in the log."""

    aggregate: str
    id: str
    version: int | None
    """Version of its last event; None where the record names none."""
    position: int
    at: datetime
    """When the server stored the last event."""


@dataclass(frozen=True, slots=True)
class IdMatches:
    """Ids that the index of a read model gives for a prefix."""

    ids: Sequence[str]
    model: str = ""
    """The read model whose index was used."""
    more_after: str = ""
    """The id after which the next page starts; empty where there are no more."""
    fault: str = ""
    """Why there is no search by prefix, only by whole id; empty where there is one."""


def ids_beginning(app: App, connection: Connection, aggregate: str, prefix: str, after: str = "") -> IdMatches:
    """Return the ids with a prefix, read from the key of a read model whose key is the aggregate's id, in key order.

    The key's index answers, never a scan: where no index is in the order of code points, `fault` names the index to
    declare.
    """
    remedy = ""
    for resolved in _models_keyed_by(app, aggregate):
        dialect = dialect_of(connection)
        stored_checkpoint = checkpoint.read(connection, resolved.name, resolved.revision)
        if stored_checkpoint is None or not stored_checkpoint.has_begun or stored_checkpoint.app != app.name:
            continue
        table = located(resolved.table, stored_checkpoint.location, dialect)
        table_ref = dialect.find_table(
            connection, (resolved.table.schema, resolved.table.name), stored_checkpoint.location
        )
        if table_ref is None:
            continue
        (key,) = resolved.key_columns
        column = resolved.table.c[key].name
        order = dialect.text_order(connection, table_ref, column)
        if order is None:
            remedy = remedy or _remedy(resolved, column)
            continue
        ids = list(connection.scalars(keys_from(table, key, order, prefix, after, MATCHES_MAX + 1)))
        more_after = ids[MATCHES_MAX - 1] if len(ids) > MATCHES_MAX else ""
        return IdMatches(ids[:MATCHES_MAX], resolved.name, more_after)
    return IdMatches((), fault=remedy or _no_index(app, aggregate))


async def looked_up(store: EventStore, aggregate: str, ids: Sequence[str]) -> list[AggregateMatch]:
    """Return the aggregates of this type among these ids; ids without events are left out."""

    async def match_of(aggregate_id: str) -> AggregateMatch | None:
        try:
            record = await store.newest(aggregate, aggregate_id)
        except Refused:
            return None  # a key of a table that cannot be an id
        return None if record is None else _match_of(aggregate, aggregate_id, record)

    return [match for match in await asyncio.gather(*map(match_of, ids)) if match is not None]


async def changed_last(store: EventStore) -> list[AggregateMatch]:
    """Return the aggregates that changed last, newest first: those of the last 200 records, or of fewer large ones."""
    state = await store.state()
    matches: dict[tuple[str, str], AggregateMatch] = {}
    end, size = state.last, 0
    while end >= max(state.first, state.last - _LAST_RECORDS + 1) and size < _BYTES_MAX:
        start = max(end - _CHUNK + 1, state.first)
        records = [record for record in await store.records_from(start, end - start + 1) if record[0] <= end]
        for record in reversed(records):
            size += len(record[4])
            aggregate, aggregate_id = entity_shown(record[2])
            if aggregate is not None and aggregate_id is not None:
                matches.setdefault((aggregate, aggregate_id), _match_of(aggregate, aggregate_id, record))
        end = start - 1
    return list(matches.values())[:MATCHES_MAX]


def _match_of(aggregate: str, aggregate_id: str, record: RawRecord) -> AggregateMatch:
    return AggregateMatch(aggregate, aggregate_id, version_in(record), record[0], stored_at(record))


def _models_keyed_by(app: App, aggregate: str) -> list[ResolvedProjection]:
    """Return the read models with a row for each aggregate of a type; those with the fewest aggregate types first."""

    def owners(resolved: ResolvedProjection) -> set[str | None]:
        return {kind.aggregate for kind in app.catalog.kinds() if kind.event_type in resolved.events}

    keyed = [
        resolved
        for resolved in app.projections.values()
        if isinstance(resolved, ResolvedProjection)
        and resolved.keyed_by_aggregate
        and len(resolved.key_columns) == 1
        and aggregate in owners(resolved)
    ]
    return sorted(keyed, key=lambda resolved: len(owners(resolved)))


def _remedy(resolved: ResolvedProjection, column: str) -> str:
    table = resolved.table.name
    return (
        f"Only whole ids can be found: the order of {table}.{column} in this database is not that of code points. "
        f'Declare Index("{table}_{column}_prefix", "{column}", postgresql_ops='
        f'{{"{column}": "text_pattern_ops"}}) in its Table and rebuild {resolved.name}.'
    )


def _no_index(app: App, aggregate: str) -> str:
    names = [resolved.name for resolved in _models_keyed_by(app, aggregate)]
    if names:
        return f"Only whole ids can be found until the read model {names[0]} has begun: start its worker."
    return (
        f"Only whole ids can be found: no read model of the app has the id of {aggregate} as its key. "
        "One with @projection and no `key` would be such an index."
    )


FOLDED_MAX = 20_000
"""Events that one call folds at most."""
FOLD_S = 1.5
"""Seconds that one call folds at most."""
_CACHE_EVERY = 500
"""Events between two states that are kept in memory."""
_CACHED_MAX = 512
"""States that are kept in memory: those that were used last, of all aggregates."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The state that a call of `TimeTravel.at` reached."""

    folded: FoldedState[Any]
    fault: str = ""
    """Why the version that was asked for was not reached; empty where it was."""
    goes_on: bool = False
    """Whether another call would fold farther, since only the limit on events or time ended this one."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The snapshot of an aggregate, and whether it is used."""

    position: int
    version: int
    written_s: float
    """When it was written, in seconds since 1970."""
    size: int
    """Size in bytes."""
    unused: str
    """Why loading does not use the snapshot; empty where it does."""


class TimeTravel:
    """States of aggregates at earlier versions, cached, for one connection and any tasks of its event loop."""

    def __init__(self, repositories: Repositories, client: Client | None) -> None:
        self._repositories = repositories
        self._store = repositories.store
        self._snapshots = None if client is None else KeyValueSnapshots(snapshot_bucket(repositories.app.name), client)
        self._classes = {info.name: cls for cls, info in repositories.app.aggregates.items()}
        self._codecs: dict[str, SnapshotCodec[Any]] = {}
        self._states: OrderedDict[tuple[str, str, int], FoldedState[Any]] = OrderedDict()
        """Folded states by aggregate, id and version, those that were used last at the end."""
        self._log = ("", 0)

    def knows(self, aggregate: str) -> bool:
        """Return whether the app declares an aggregate of this type, so that its events can be folded."""
        return aggregate in self._classes

    def snapshots(self, aggregate: str) -> bool:
        """Return whether the app keeps snapshots of this type."""
        return aggregate_info(self._classes[aggregate]).snapshot_every is not None

    async def at(self, aggregate: str, aggregate_id: str, version: int, limit: int = FOLDED_MAX) -> Reached:
        """Return the state at a version; version 0 is the initial state.

        Folding starts at the nearest cached state below the version; where that is more than 500 events away, at the
        snapshot if that is closer. It stops after `limit` events or 1.5 s. Raises what `EventStore` does; an error of
        application code becomes the `fault` of the answer.
        """
        folded = self._nearest(aggregate, aggregate_id, version) or FoldedState(self._classes[aggregate](), 0, 0)
        if version - folded.version > _CACHE_EVERY:
            snapshot = await self._usable_snapshot(aggregate, aggregate_id, version)
            folded = snapshot if snapshot is not None and snapshot.version > folded.version else folded
        return await self._fold(folded, (aggregate, aggregate_id), version, limit)

    async def snapshot(self, aggregate: str, aggregate_id: str) -> SnapshotInfo | None:
        """Return the stored snapshot, even where it cannot be used; None where there is none. Raises `StoreError`."""
        if self._snapshots is None:
            return None
        entry = await self._snapshots.entry(aggregate, aggregate_id)
        if entry is None:
            return None
        decoded = self._decoded(aggregate, entry[4])
        version, position = (
            (decoded.version, decoded.position) if decoded is not None else _version_and_position(entry[4])
        )
        unused = ""
        if not self.snapshots(aggregate):
            unused = "the aggregate has no `snapshot_every`"
        elif decoded is None:
            unused = "it was written by another revision, or with other fields or schemas; the next one replaces it"
        elif not await self._is_in_log(decoded):
            unused = "its last event is not at its position of this log"
        return SnapshotInfo(position, version, entry[1] / 1e9, len(entry[4]), unused)

    def _nearest(self, aggregate: str, aggregate_id: str, version: int) -> FoldedState[Any] | None:
        """Return the cached state of the highest version up to this one."""
        log = (self._store.identity, len(self._repositories.catalog.skipped))
        if log != self._log:
            self._states.clear()
            self._log = log
        entity = (aggregate, aggregate_id)
        key = max((key for key in self._states if key[:2] == entity and key[2] <= version), default=None)
        if key is None:
            return None
        self._states.move_to_end(key)
        return self._states[key]

    async def _fold(self, folded: FoldedState[Any], entity: tuple[str, str], version: int, events_max: int) -> Reached:
        begin, until = folded.version, time.monotonic() + FOLD_S
        decoder = Decoder(self._repositories.catalog)
        while folded.version < version:
            remaining = events_max - (folded.version - begin)
            if remaining <= 0 or time.monotonic() > until:
                why = f"It is {version - begin:,} events from the nearest known state, at version {begin:,}"
                return Reached(folded, f"{why}; this look came to version {folded.version:,}.", goes_on=True)
            limit = min(_CACHE_EVERY, remaining, version - folded.version)
            history = await self._store.history(*entity, after=folded.position, limit=limit)
            records = [record for record in history if (version_in(record) or 0) <= version]
            if not records:
                return Reached(folded, f"The log has no version {folded.version + 1:,} of it here.")
            # The application's code runs in a thread, so that the event loop serves pages meanwhile.
            previous = folded
            folded, fault = await asyncio.to_thread(_fold_until_fault, folded, records, decoder)
            if folded.version > previous.version:
                self._states[(*entity, folded.version)] = folded
                if len(self._states) > _CACHED_MAX:
                    self._states.popitem(last=False)
            if fault:
                return Reached(folded, fault)
            if folded.position <= previous.position:
                return Reached(folded, "Its records do not follow one another.")
        return Reached(folded)

    async def _usable_snapshot(self, aggregate: str, aggregate_id: str, version: int) -> FoldedState[Any] | None:
        """Return the snapshot if it belongs to this log and is not above the version, else None."""
        if self._snapshots is None:
            return None
        try:
            value = await self._snapshots.get(aggregate, aggregate_id)
            folded = None if value is None else self._decoded(aggregate, value)
            if folded is None or folded.version > version or not await self._is_in_log(folded):
                return None
        except (StoreError, Unreachable):
            return None  # a snapshot only shortens folding
        return folded

    async def _is_in_log(self, folded: FoldedState[Any]) -> bool:
        record = await self._store.at(folded.position)
        return record is not None and event_id_of(record) == folded.event_id

    def _decoded(self, aggregate: str, value: bytes) -> FoldedState[Any] | None:
        if aggregate not in self._codecs:
            try:
                self._codecs[aggregate] = SnapshotCodec[Any](self._classes[aggregate])
            except DefinitionError:
                return None  # a state that cannot be a snapshot, and need not be
        return self._codecs[aggregate].decode(value)


def difference(before: FoldedState[Any], after: FoldedState[Any]) -> StateDifference:
    """Return the fields that differ between two states of an aggregate, with personal data masked."""
    states = [plain_json(folded.state) for folded in (before, after)]
    masked_states = [masked(state, type(folded.state)) for state, folded in zip(states, (before, after), strict=True)]
    return compare_states(states[0], states[1], masked_states[0], masked_states[1])


def _fold_until_fault(
    folded: FoldedState[Any], records: Sequence[RawRecord], decoder: Decoder
) -> tuple[FoldedState[Any], str]:
    """Fold records as far as possible; return the state and why folding stopped, empty where it did not."""
    try:
        return fold_records(folded, records, decoder), ""
    except (DefinitionError, CodecError, HistoryBroken):
        pass
    for record in records:  # fold each by itself to name the record that fails
        try:
            folded = fold_records(folded, [record], decoder)
        except DefinitionError as error:
            return folded, f"Version {folded.version + 1:,}, at position {record[0]:,}: {'; '.join(error.faults)}"
        except (CodecError, HistoryBroken) as error:
            return folded, f"Position {record[0]:,}: {error}"
    return folded, ""


def _version_and_position(value: bytes) -> tuple[int, int]:
    """Return version and position from a snapshot that this app cannot decode; zeros where it has none."""
    try:
        snapshot = read_json(value)["snapshot"]
        return int(snapshot["version"]), int(snapshot["position"])
    except (ValueError, KeyError, TypeError):
        return 0, 0


Change: TypeAlias = Literal["same", "changed", "added", "removed"]

ROWS_MAX = 200
"""Fields that one comparison lists at most."""
_COMPARED_MAX = 20_000
_DEPTH_MAX = 8
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A field, or an item nested in one, in both states."""

    path: str
    """For example `lines[2].amount`."""
    before: Any
    after: Any
    change: Change


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The fields of two states side by side."""

    fields: Sequence[Field]
    cut: int
    """How many fields are not listed."""

    @property
    def changed(self) -> int:
        """Return how many of the listed fields differ."""
        return sum(field.change != "same" for field in self.fields)


def compare_states(before: Any, after: Any, shown_before: Any, shown_after: Any) -> StateDifference:
    """Compare two states as JSON, given plain and then masked; a masked value shows only whether it changed."""
    fields = list(islice(_fields("", (before, after, shown_before, shown_after), 0), _COMPARED_MAX))
    # Where there are too many fields, list the changed ones only.
    listed = fields if len(fields) <= ROWS_MAX else [item for item in fields if item.change != "same"][:ROWS_MAX]
    return StateDifference(listed, len(fields) - len(listed))


def _fields(path: str, sides: Sequence[Any], depth: int) -> Iterator[Field]:
    """Yield the fields of a value; `sides` are it before and after, and then both as they may be shown."""
    change = _change(sides[0], sides[1])
    if depth < _DEPTH_MAX and (change == "changed" or depth == 0):
        if all(isinstance(side, dict) for side in sides):
            for name in dict.fromkeys([*sides[0], *sides[1]]):
                values = [side.get(name, _ABSENT) for side in sides]
                yield from _fields(f"{path}.{name}" if path else name, values, depth + 1)
            return
        if all(isinstance(side, list) for side in sides):
            for index in range(max(len(sides[0]), len(sides[1]))):
                values = [side[index] if index < len(side) else _ABSENT for side in sides]
                yield from _fields(f"{path}[{index}]", values, depth + 1)
            return
    before, after = (None if side is _ABSENT else side for side in sides[2:])
    yield Field(path, before, after, change)


def _change(before: Any, after: Any) -> Change:
    if before is _ABSENT:
        return "added"
    if after is _ABSENT:
        return "removed"
    return "same" if type(before) is type(after) and before == after else "changed"
