"""Tests of projections without a server: the same fold and the same handlers as in every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar, cast, overload

from eventjet.domain.recorded import Recorded
from eventjet.errors import UsageError
from eventjet.projections.app_ref import Declared
from eventjet.projections.fold import Fold
from eventjet.projections.projection import Entries, Projection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.row_table import TableSource, table_from
from eventjet.projections.sql_projection import ResolvedSql, SqlProjection
from eventjet.testing.read_model import TableRows, read_model_case, resolved_alone
from eventjet.testing.scenarios import as_read, as_stored
from eventjet.text import listed, suggestion

R = TypeVar("R")
E = TypeVar("E")

_START = datetime(2026, 1, 1, tzinfo=UTC)


class Projected(Generic[R]):
    """The rows that a projection made of the events."""

    def __init__(self, rows: Iterable[R]) -> None:
        self._rows = list(rows)

    def rows(self, *expected: R) -> None:
        """Assert that the projection made exactly these rows, in any order."""
        missing, extra = list(expected), list[R]()
        for row in self._rows:
            if row in missing:
                missing.remove(row)
            else:
                extra.append(row)
        if missing or extra:
            raise AssertionError(f"the rows are {self._rows!r}\nexpected {list(expected)!r}")

    def row(self) -> R:
        """Return the only row; raises `AssertionError` unless there is exactly one."""
        if len(self._rows) != 1:
            raise AssertionError(f"the rows are {self._rows!r}, not one")
        return self._rows[0]


class ProjectedTables:
    """The tables that the handlers of a SQL projection wrote."""

    def __init__(self, rows: TableRows, columns: Mapping[str, Sequence[str]]) -> None:
        self._rows = rows
        self._columns = columns

    def rows(self, table: TableSource, *expected: Mapping[str, Any]) -> None:
        """Assert that the table has exactly these rows, in any order, in the columns that the first row names.

        `table` is a `Table` or a mapped class of the projection. Raises `UsageError` for another table or column.
        """
        name = table_from(table).name
        if name not in self._columns:
            raise UsageError(f"The projection has no table {name!r}. Its tables are {listed(self._columns)}.")
        names = list(expected[0]) if expected else []
        if wrong := [each for row in expected for each in row if each not in self._columns[name]]:
            columns = self._columns[name]
            did_mean = suggestion(wrong[0], columns)
            raise UsageError(f"The table {name!r} has no column {wrong[0]!r}. {did_mean}It has {listed(columns)}.")
        rows = self._rows[name]
        Projected([{name: row[name] for name in names} for row in rows]).rows(*map(dict, expected))


def on(aggregate_id: str, *events: E) -> list[Recorded[E]]:
    """Return events of one aggregate as the log would give them: decoded, versions from 1, a minute apart.

    `projected` numbers the positions across all its histories. Raises `UnencodableEvent` for an event that could not be
    stored.

    ```python
    first, second = on("a-1", Opened(owner="ada"), Deposited(amount=Decimal(10)))
    assert (first.aggregate_id, second.version) == ("a-1", 2)
    ```
    """
    return [
        Recorded(event, aggregate_id, number, number, _START + timedelta(minutes=number), f"{aggregate_id}-{number}")
        for number, event in enumerate(as_stored(events), 1)
    ]


@overload
def projected(
    projection: Projection[R, E] | Entries[R, E], /, *histories: Iterable[Recorded[object]]
) -> Projected[R]: ...
@overload
def projected(projection: SqlProjection, /, *histories: Iterable[Recorded[object]]) -> ProjectedTables: ...
def projected(projection: Declared, /, *histories: Iterable[Recorded[object]]) -> Projected[Any] | ProjectedTables:
    """Return what a projection makes of histories, read one after the other; events that it does not take are skipped.

    Handlers of a `SqlProjection` run on a temporary SQLite file. Raises `UsageError` for what is no history.

    ```python
    history = on("a-1", Opened(owner="ada"), Deposited(amount=Decimal(10)))
    projected(balances, history).rows(Balance("a-1", "ada", Decimal(10)))
    ```
    """
    recorded_events: list[Recorded[object]] = []
    for history in histories:
        of_history = list(history if hasattr(history, "__iter__") else cast("list[Any]", [history]))
        for each in of_history:
            if not isinstance(each, Recorded):  # pyright: ignore[reportUnnecessaryIsInstance]  a test may give anything
                name = type(each).__name__
                raise UsageError(f'{name} is no recorded event. Write `projected(…, on("a-1", {name}(…)))`.')
        recorded_events += of_history
    events = [replace(as_read(recorded), position=position) for position, recorded in enumerate(recorded_events, 1)]
    resolved = resolved_alone(projection, [type(recorded.data) for recorded in events])
    if isinstance(resolved, ResolvedSql):
        handled = [recorded for recorded in events if type(recorded.data) in resolved.handlers]
        # In a thread, so that the test may itself be a coroutine.
        with ThreadPoolExecutor(1) as thread:
            rows = thread.submit(_rows_after, resolved, handled).result()
        return ProjectedTables(rows, {table.name: table.columns.keys() for table in resolved.tables})
    fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type))
    if fold.states is None:
        rows = fold({}, [recorded for recorded in events if type(recorded.data) in resolved.events])
    else:
        joining = fold.join(fold.states.numbered(events), {})
        rows = fold({}, joining.events, joining.keys)
        fold.state_rows(joining.cells)  # A worker stops at a state that it cannot store.
    return Projected(row for row in rows.values() if row is not None)


def _rows_after(resolved: ResolvedSql, events: Sequence[Recorded[Any]]) -> TableRows:
    with read_model_case(resolved) as case:
        return case.written(events, ())
