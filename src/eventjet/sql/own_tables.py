"""The declarations of eventjet's own tables, which `migrations` creates; a test compares the two."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

metadata = sa.MetaData()

projections = sa.Table(
    "eventjet_projection",
    metadata,
    sa.Column("name", sa.String(48), primary_key=True),
    sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("generation", sa.Integer, nullable=False, server_default="1"),
    sa.Column("position", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("event_id", sa.Text, nullable=False, server_default=""),
    sa.Column("log", sa.Text, nullable=False, server_default=""),
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("owner", sa.Text),
    sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
    sa.Column("lease_s", sa.Double, nullable=False, server_default="0"),
    sa.Column("state", sa.String(16), nullable=False, server_default="new"),
    sa.Column("reason", sa.Text),
    sa.Column("location", sa.Text, nullable=False, server_default=""),
    sa.Column("tables", sa.Text, nullable=False, server_default="[]"),
    sa.Column("takes_over", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("identities", sa.Text, nullable=False, server_default="[]"),
    sa.Column("app", sa.String(48), nullable=False, server_default=""),
    sa.Column("code", sa.Text, nullable=False, server_default=""),
)
"""The checkpoints, one row for each (name, revision): see `checkpoint.Checkpoint`."""

RUN_ITSELF = -1
"""The part number, in the table of rebuilds, of the row that stands for the run itself."""
rebuilds = sa.Table(
    "eventjet_rebuild",
    metadata,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("projection", sa.String(48), nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
)
"""The runs of rebuilds: one row for each part of a run that was loaded; part -1 is the run itself, with its lease."""

quarantine = sa.Table(
    "eventjet_quarantine",
    metadata,
    sa.Column("projection", sa.String(48), primary_key=True),
    sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("aggregate", sa.Text, nullable=False),
    sa.Column("aggregate_id", sa.Text, nullable=False),
    sa.Column("event_id", sa.Text, nullable=False, server_default=""),
    sa.Column("event_type", sa.Text, nullable=False, server_default=""),
    sa.Column("resolution", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    sa.Column("traceback", sa.Text, nullable=False, server_default=""),
    sa.Column("payload", sa.LargeBinary),
    sa.Column("quarantined_at", sa.Double, nullable=False),
    sa.Column("resolved_at", sa.Double),
    sa.Index("ix_eventjet_quarantine_aggregate", "projection", "revision", "aggregate", "aggregate_id"),
)
"""The quarantine: one row for each event that a projection could not handle, or about which somebody decided.

`resolution` is `quarantined` (it failed), `blocked` (a quarantined event of its aggregate precedes it), `retry`
(somebody asked to try it again), `retried` (it was handled after all) or `dropped` (it never will be). The first three
block their aggregate. Times are seconds since 1970 by the database's clock.
"""

actions = sa.Table(
    "eventjet_action",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("app", sa.String(48), nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("details", sa.Text, nullable=False, server_default="{}"),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("result", sa.Text, nullable=False, server_default=""),
    sa.Column("ended_at", sa.Double),
    sa.Index("ix_eventjet_action_at", "app", "at"),
)
"""The audit log: one row for each action that somebody took in the console, written before it is carried out.

`outcome` is `begun`, then `done`, `refused`, `failed` or `cancelled`; `begun` stays where the console was killed.
`target` holds names, separated by commas. Times are seconds since 1970 by the database's clock.
"""


class Clock(FunctionElement[float]):
    """The database's clock in seconds since 1970, read as the statement runs: the clocks of workers do not matter."""

    type: TypeEngine[float] = sa.Double()
    inherit_cache = True
