"""Aggregates by the beginning of their id, and those that changed last: by an index and by the end of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from eventjet.app import App
from eventjet.codec.headers import RawRecord, stored_at
from eventjet.codec.subjects import entity_shown
from eventjet.commands.timeline import version_in
from eventjet.errors import Refused
from eventjet.log.store import EventStore
from eventjet.projections.resolve import ResolvedProjection
from eventjet.sql import checkpoint
from eventjet.sql.dialect import dialect_of
from eventjet.sql.locations import located
from eventjet.sql.statements import keys_from

FOUND_MAX = 50
"""Aggregates of one page."""
_LAST_RECORDS = 200
_CHUNK = 50
_BYTES_MAX = 4_000_000
"""Of the last records: they may be of 900,000 each."""


@dataclass(frozen=True, slots=True)
class AggregateFound:
    """One aggregate that is in the log."""

    aggregate: str
    id: str
    version: int | None
    """Of its last event; None where that tells none."""
    position: int
    at: datetime
    """When the log got it."""


@dataclass(frozen=True, slots=True)
class IdsFound:
    """What an index knows."""

    ids: Sequence[str]
    model: str = ""
    """The read model whose index it is."""
    more_after: str = ""
    """The id after which there are more; empty where these are all."""
    fault: str = ""
    """Why only whole ids can be found."""


def ids_beginning(app: App, connection: Connection, aggregate: str, prefix: str, after: str = "") -> IdsFound:
    """Ids that have a row in a read model whose key is the aggregate's id, by that key's own index, in its order.

    Never a scan: where no index of the database is in the order of code points it says which one to declare.
    """
    remedy = ""
    for resolved in _keyed(app, aggregate):
        dialect = dialect_of(connection)
        held = checkpoint.read(connection, resolved.name, resolved.revision)
        if held is None or not held.has_begun or held.app != app.name:
            continue
        table = located(resolved.table, held.location, dialect)
        there = dialect.find_table(connection, (resolved.table.schema, resolved.table.name), held.location)
        if there is None:
            continue
        (key,) = resolved.key_columns
        column = resolved.table.c[key].name
        order = dialect.text_order(connection, there, column)
        if order is None:
            remedy = remedy or _remedy(resolved, column)
            continue
        found = list(connection.scalars(keys_from(table, key, order, prefix, after, FOUND_MAX + 1)))
        more = found[FOUND_MAX - 1] if len(found) > FOUND_MAX else ""
        return IdsFound(found[:FOUND_MAX], resolved.name, more)
    return IdsFound((), fault=remedy or _no_index(app, aggregate))


async def looked_up(store: EventStore, aggregate: str, ids: Sequence[str]) -> list[AggregateFound]:
    """Those of these ids that have a history of this type. Raises what `EventStore` does."""

    async def one(aggregate_id: str) -> AggregateFound | None:
        try:
            record = await store.newest(aggregate, aggregate_id)
        except Refused:
            return None  # a key of a table that cannot be an id
        return None if record is None else _found(aggregate, aggregate_id, record)

    return [found for found in await asyncio.gather(*map(one, ids)) if found is not None]


async def changed_last(store: EventStore) -> list[AggregateFound]:
    """The aggregates of the log's last 200 records, or fewer where they are large, the newest first."""
    state = await store.state()
    found: dict[tuple[str, str], AggregateFound] = {}
    end, size = state.last, 0
    while end >= max(state.first, state.last - _LAST_RECORDS + 1) and size < _BYTES_MAX:
        start = max(end - _CHUNK + 1, state.first)
        records = [record for record in await store.some(start, end - start + 1) if record[0] <= end]
        for record in reversed(records):
            size += len(record[4])
            aggregate, aggregate_id = entity_shown(record[2])
            if aggregate is not None and aggregate_id is not None:
                found.setdefault((aggregate, aggregate_id), _found(aggregate, aggregate_id, record))
        end = start - 1
    return list(found.values())[:FOUND_MAX]


def _found(aggregate: str, aggregate_id: str, record: RawRecord) -> AggregateFound:
    return AggregateFound(aggregate, aggregate_id, version_in(record), record[0], stored_at(record))


def _keyed(app: App, aggregate: str) -> list[ResolvedProjection]:
    """Read models with a row for each aggregate of a type, those of this type alone first."""

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
    begun = [resolved.name for resolved in _keyed(app, aggregate)]
    if begun:
        return f"Only whole ids can be found until the read model {begun[0]} has begun: start its worker."
    return (
        f"Only whole ids can be found: no read model of the app has the id of {aggregate} as its key. "
        "One with @projection and no `key` would be such an index."
    )
