"""eventjet's own tables, as `own_tables` declares them.

From the first release on a revision makes what it made on its day, which a test holds: the one that changes
`own_tables` writes these tables down here as they were.
"""

from __future__ import annotations

from alembic.operations import Operations

from eventjet.sql.own_tables import metadata

revision = "0001"
down_revision = None


def upgrade(op: Operations) -> None:
    """Create the tables."""
    metadata.create_all(op.get_bind())
