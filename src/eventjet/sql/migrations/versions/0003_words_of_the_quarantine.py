"""Calls what is in the quarantine `quarantined`, as every other place does, and no longer `parked`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0003"
down_revision = "0002"


def upgrade(op: Operations) -> None:
    """Rename the column and the resolution."""
    op.alter_column("eventjet_quarantine", "parked_at", new_column_name="quarantined_at")
    quarantine = sa.table("eventjet_quarantine", sa.column("resolution", sa.String))
    op.execute(sa.update(quarantine).where(quarantine.c.resolution == "parked").values(resolution="quarantined"))
