"""What a projection makes of events: the same fold, and the same handlers, as in every engine; no server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar, overload

from eventjet.codec.catalog import Catalog
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import events_of
from eventjet.projections.application import Declared
from eventjet.projections.fold import Fold
from eventjet.projections.projection import Entries, Projection
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import SqlProjection, resolve_sql, subscription
from eventjet.writers.sql_trial import TableRows, rows_after

R = TypeVar("R")
E = TypeVar("E")

_START = datetime(2026, 1, 1, tzinfo=UTC)


class Projected(Generic[R]):
    """The rows a projection came to."""

    def __init__(self, rows: Iterable[R]) -> None:
        self._rows = list(rows)

    def rows(self, *expected: R) -> None:
        """Exactly these rows, in any order."""
        missing, extra = list(expected), list[R]()
        for row in self._rows:
            if row in missing:
                missing.remove(row)
            else:
                extra.append(row)
        if missing or extra:
            raise AssertionError(f"the rows are {self._rows!r}\nexpected {list(expected)!r}")

    def row(self) -> R:
        """The only row."""
        if len(self._rows) != 1:
            raise AssertionError(f"the rows are {self._rows!r}, not one")
        return self._rows[0]


class Named(Protocol):
    """A table: what of it is needed here."""

    @property
    def name(self) -> str: ...


class ProjectedTables:
    """The tables that handlers came to."""

    def __init__(self, found: TableRows) -> None:
        self._found = found

    def rows(self, table: Named, *expected: Mapping[str, Any]) -> None:
        """Exactly these rows, in any order; columns that they do not name are not looked at."""
        found = self._found[table.name]
        names = list(expected[0]) if expected else []
        Projected([{name: row[name] for name in names} for row in found]).rows(*map(dict, expected))


def on(aggregate_id: str, *events: E) -> list[Recorded[E]]:
    """Events of one aggregate as the log would record them: versions from 1, a minute between them.

    `projected` gives positions over all of its histories.
    """
    return [
        Recorded(event, aggregate_id, number, number, _START + timedelta(minutes=number), f"{aggregate_id}-{number}")
        for number, event in enumerate(events, 1)
    ]


@overload
def projected(
    projection: Projection[R, E] | Entries[R, E], /, *histories: Iterable[Recorded[object]]
) -> Projected[R]: ...
@overload
def projected(projection: SqlProjection, /, *histories: Iterable[Recorded[object]]) -> ProjectedTables: ...
def projected(projection: Declared, /, *histories: Iterable[Recorded[object]]) -> Projected[Any] | ProjectedTables:
    """Take the histories, one after the other; events the projection does not take are passed over.

    Handlers of a `SqlProjection` run on a SQLite file that is gone afterwards.
    """
    given = [recorded for history in histories for recorded in history]
    events = [replace(recorded, position=position) for position, recorded in enumerate(given, 1)]
    if isinstance(projection, SqlProjection):
        subscribed = subscription(projection)
    else:
        function, place = (projection.fold, 1) if isinstance(projection, Projection) else (projection.rows, 0)
        subscribed = events_of(function, function.__code__.co_varnames[place])
    catalog = Catalog([*subscribed, *(type(recorded.data) for recorded in events)])
    if isinstance(projection, SqlProjection):
        by_hand = resolve_sql(projection, catalog)
        taken = [recorded for recorded in events if type(recorded.data) in by_hand.handlers]
        # In a thread, so that a test may be a coroutine itself.
        with ThreadPoolExecutor(1) as thread:
            return ProjectedTables(thread.submit(asyncio.run, rows_after(by_hand, taken)).result())
    resolved = resolve(projection, catalog)
    fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type))
    rows = fold({}, [recorded for recorded in events if type(recorded.data) in resolved.events])
    return Projected(row for row in rows.values() if row is not None)
