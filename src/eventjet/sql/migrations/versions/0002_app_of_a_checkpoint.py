"""Adds to each checkpoint its app and the code that made its rows; empty until a worker or a rebuild notes them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0002"
down_revision = "0001"


def upgrade(op: Operations) -> None:
    """Add the columns."""
    op.add_column("eventjet_projection", sa.Column("app", sa.String(48), nullable=False, server_default=""))
    op.add_column("eventjet_projection", sa.Column("code", sa.Text, nullable=False, server_default=""))
