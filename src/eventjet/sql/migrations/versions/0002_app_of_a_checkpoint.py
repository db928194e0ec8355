"""Each checkpoint says which app it belongs to; empty until the worker or the rebuild of one has taken it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0002"
down_revision = "0001"


def upgrade(op: Operations) -> None:
    """Add the column."""
    op.add_column("eventjet_projection", sa.Column("app", sa.String(48), nullable=False, server_default=""))
