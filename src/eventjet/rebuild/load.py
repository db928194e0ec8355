"""Rows into a shadow, whole or not at all, and once only: a task that is tried again finds its part in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eventjet.rebuild import postgres_load, sqlite_load
from eventjet.sql.database import Database
from eventjet.sql.statements import Parked


@dataclass(frozen=True, slots=True)
class Target:
    """Where one projection's rows go; a value that can be pickled."""

    run: str
    purpose: str
    """What the database shows of the sessions that load."""
    projection: str
    revision: int
    database: Database
    """Where the shadow is: the live one on PostgreSQL, a file of the run's own on SQLite."""
    schema: str | None
    """The run's schema; None on SQLite."""
    table: str
    columns: tuple[str, ...]
    known: Mapping[int, str] = field(default_factory=dict[int, str], repr=False, hash=False)
    """Positions that are in the live quarantine, with what was decided; empty where nothing is quarantined."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one task folded and loaded of one projection."""

    projection: str
    number: int
    events: int
    rows: int
    parked: Sequence[Parked] = ()
    """What it could not take."""


_LOADERS = {"postgresql": postgres_load.load, "sqlite": sqlite_load.load}


def load_part(target: Target, number: int, rows: Iterable[Sequence[Any]]) -> int:
    """Load one part with its row in the ledger; return how many rows the ledger says it has. Raises `RowsRefused`."""
    return _LOADERS[target.database.dialect.name](target, number, rows)
