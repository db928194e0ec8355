"""`Clock`: the database's time, so that the clocks of workers do not matter.

Each dialect says how it is written: `postgres.py` and `sqlite.py` register the compilers.
"""

from __future__ import annotations

from sqlalchemy import Double
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine


class Clock(FunctionElement[float]):
    """Seconds since 1970 as the statement runs."""

    type: TypeEngine[float] = Double()
    inherit_cache = True
