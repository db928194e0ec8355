"""PostgreSQL behind the `Dialect` port."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.compiler import compiles

from eventjet.sql.clock import Clock


class Postgres:
    """PostgreSQL through psycopg: async, sync and COPY."""

    name = "postgresql"
    clock = "extract(epoch from clock_timestamp())::float8"


@compiles(Clock, Postgres.name)
def _clock(_element: Clock, _compiler: Any, **_: Any) -> str:  # pyright: ignore[reportUnusedFunction]  registered
    return Postgres.clock
