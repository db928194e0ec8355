"""The live quarantine as a rebuild obeys it: taken over when it is planned, given back by the swap.

Written once for both databases: `Run` carries out a statement with named values, tables are named with their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from eventjet.errors import RebuildError
from eventjet.projections.bound import BoundProjection
from eventjet.projections.own_tables import quarantine
from eventjet.projections.quarantine import DECIDED, RETRIED
from eventjet.projections.sql import AnyBound

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


class DecidedMeanwhile(RebuildError):
    """The shadow was made with other decisions than there are now."""

    def __init__(self, bound: BoundProjection) -> None:
        self.projection = bound.name
        super().__init__(
            f"Somebody decided about parked events of {bound.name!r} while it was rebuilt, so what was made does not "
            "show it. Nothing was changed; run the rebuild again."
        )


def remembered(run: Run, table: str, bound: BoundProjection) -> Remembered:
    """What a quarantine holds now."""
    rows = run(f"select position, decision from {table} where {_OF}", _of(bound))
    found: dict[int, str] = dict(map(tuple, rows))  # a result of SQLAlchemy is a mapping to `dict`
    return Remembered(
        known={position: decision for position, decision in found.items() if decision != RETRIED},
        decided=frozenset((position, decision) for position, decision in found.items() if decision in DECIDED),
    )


def copy(run: Run, source: str, target: str, bound: BoundProjection) -> None:
    """One projection's rows into another quarantine, which has none of it."""
    run(f"insert into {target} ({_COLUMNS}) select {_COLUMNS} from {source} where {_OF}", _of(bound))


def give_back(run: Run, shadow: str, live: str, bound: BoundProjection, before: Remembered | None) -> None:
    """Put the shadow's rows in the place of the live ones, whose checkpoint is locked; raises `DecidedMeanwhile`."""
    if before is not None and remembered(run, live, bound).decided != before.decided:
        raise DecidedMeanwhile(bound)
    forget(run, live, bound)
    copy(run, shadow, live, bound)


def forget(run: Run, table: str, bound: AnyBound) -> None:
    """Remove one projection's rows: what was made from the whole log has nothing held back."""
    run(f"delete from {table} where {_OF}", _of(bound))


def _of(bound: AnyBound) -> dict[str, Any]:
    return {"projection": bound.name, "revision": bound.revision}
