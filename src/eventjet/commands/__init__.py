"""Execute commands on aggregates: load, decide, append, and decide again after a conflict. And import many events."""

from __future__ import annotations

from eventjet.commands.blobs import Blobs
from eventjet.commands.execute import Planned
from eventjet.commands.importing import Imported, ImportReport
from eventjet.commands.repository import Command, Repository
from eventjet.domain.decision import Committed

__all__ = ["Blobs", "Command", "Committed", "ImportReport", "Imported", "Planned", "Repository"]
