"""The live quarantine as a rebuild obeys it: taken over when it is planned, given back by the swap.

Written once for both databases: `Run` carries out a statement with named values, tables are named with their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from eventjet.errors import DecidedMeanwhile
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.quarantine.fold import DECIDED, RETRIED
from eventjet.sql.own_tables import quarantine

Run: TypeAlias = Callable[[str, dict[str, Any]], Iterable[Any]]

TABLE = quarantine.name
_COLUMNS = ", ".join(column.name for column in quarantine.columns)
_OF = "projection = :projection and revision = :revision"


@dataclass(frozen=True, slots=True)
class Remembered:
    """A quarantine at one moment."""

    known: Mapping[int, str]
    """Positions that are not in the rows, with what was decided."""
    decided: frozenset[tuple[int, str]]
    """What people decided, and what came of it."""


def remembered(run: Run, table: str, resolved: ResolvedProjection) -> Remembered:
    """What a quarantine holds now."""
    rows = run(f"select position, decision from {table} where {_OF}", _of(resolved))
    found: dict[int, str] = dict(map(tuple, rows))  # a result of SQLAlchemy is a mapping to `dict`
    return Remembered(
        known={position: decision for position, decision in found.items() if decision != RETRIED},
        decided=frozenset((position, decision) for position, decision in found.items() if decision in DECIDED),
    )


def copy(run: Run, source: str, target: str, resolved: ResolvedProjection) -> None:
    """One projection's rows into another quarantine, which has none of it."""
    run(f"insert into {target} ({_COLUMNS}) select {_COLUMNS} from {source} where {_OF}", _of(resolved))


def give_back(run: Run, shadow: str, live: str, resolved: ResolvedProjection, before: Remembered | None) -> None:
    """Put the shadow's rows in the place of the live ones, whose checkpoint is locked; raises `DecidedMeanwhile`."""
    if before is not None and remembered(run, live, resolved).decided != before.decided:
        raise DecidedMeanwhile(resolved)
    forget(run, live, resolved)
    copy(run, shadow, live, resolved)


def forget(run: Run, table: str, resolved: AnyResolved) -> None:
    """Remove one projection's rows: what was made from the whole log has nothing held back."""
    run(f"delete from {table} where {_OF}", _of(resolved))


def _of(resolved: AnyResolved) -> dict[str, Any]:
    return {"projection": resolved.name, "revision": resolved.revision}
