"""eventjet's own tables.

They are written down here again on purpose: a revision makes what it made on its day, whatever `own_tables` says since.
"""

from __future__ import annotations

from alembic.operations import Operations
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

revision = "0001"
down_revision = None


def upgrade(op: Operations) -> None:
    """Create the tables."""
    _tables().create_all(op.get_bind())


def _tables() -> MetaData:
    made = MetaData()
    Table(
        "eventjet_projection",
        made,
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
    Table(
        "eventjet_rebuild",
        made,
        Column("run", String(64), primary_key=True),
        Column("part", Integer, primary_key=True, autoincrement=False),
        Column("projection", String(48), nullable=False),
        Column("revision", Integer, nullable=False),
        Column("rows", BigInteger, nullable=False, server_default="0"),
        Column("lease_until", Double, nullable=False, server_default="0"),
    )
    Table(
        "eventjet_quarantine",
        made,
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
    return made
