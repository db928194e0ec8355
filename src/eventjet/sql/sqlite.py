"""SQLite behind the `Dialect` port."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from eventjet.sql.clock import Clock


class Sqlite:
    """SQLite through sqlite3 and aiosqlite: one file, one writer at a time."""

    name = "sqlite"
    clock = "(julianday('now') - 2440587.5) * 86400.0"


@compiles(Clock, Sqlite.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return f"({Sqlite.clock})"
