"""eventjet's own tables in the database of the read models. All of them are declared here.

`migrations` makes them; whoever changes one here adds a revision there, or a test says that they differ.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
)
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

metadata = MetaData()

projections = Table(
    "eventjet_projection",
    metadata,
    Column("name", String(48), primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("generation", Integer, nullable=False, server_default="1"),
    Column("position", BigInteger, nullable=False, server_default="0"),
    Column("event_id", Text, nullable=False, server_default=""),
    Column("log", Text, nullable=False, server_default=""),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("owner", Text),
    Column("lease_until", Double, nullable=False, server_default="0"),
    Column("state", String(16), nullable=False, server_default="new"),
    Column("reason", Text),
    Column("location", Text, nullable=False, server_default=""),
    Column("tables", Text, nullable=False, server_default="[]"),
    Column("takes_over", Boolean, nullable=False, server_default=false()),
)
"""One row for each (name, revision).

`generation` counts the rebuilds swapped in; `epoch` rises whenever an owner is deposed. `location` is where its tables
are: empty where they are declared, else a schema on PostgreSQL and a suffix of their names on SQLite. `tables` names
them, as JSON. `takes_over` is true while a revision built beside another one is to have the declared location once it
has caught up.
"""

rebuilds = Table(
    "eventjet_rebuild",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("projection", String(48), nullable=False),
    Column("revision", Integer, nullable=False),
    Column("rows", BigInteger, nullable=False, server_default="0"),
    Column("lease_until", Double, nullable=False, server_default="0"),
)
"""One row for each part of a run that was loaded; part -1 is the run itself, with its lease."""

quarantine = Table(
    "eventjet_quarantine",
    metadata,
    Column("projection", String(48), primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("aggregate", Text, nullable=False),
    Column("aggregate_id", Text, nullable=False),
    Column("event_id", Text, nullable=False, server_default=""),
    Column("event_type", Text, nullable=False, server_default=""),
    Column("resolution", String(16), nullable=False),
    Column("reason", Text, nullable=False, server_default=""),
    Column("traceback", Text, nullable=False, server_default=""),
    Column("payload", LargeBinary),
    Column("parked_at", Double, nullable=False),
    Column("resolved_at", Double),
    Index("ix_eventjet_quarantine_aggregate", "projection", "revision", "aggregate", "aggregate_id"),
)
"""One row for each event that a projection did not take, or that somebody gave a verdict on.

`resolution` is `parked` (it failed), `blocked` (a parked event of its aggregate precedes it), `retry` (somebody asked
to try it again), `retried` (it was taken after all) or `dropped` (it never will be). The first three block their
aggregate. Times are seconds since 1970 by the database's clock.
"""


class Clock(FunctionElement[float]):
    """Seconds since 1970 by the database as the statement runs, so that the clocks of workers do not matter.

    `postgres.py` and `sqlite.py` register how it is written.
    """

    type: TypeEngine[float] = Double()
    inherit_cache = True
