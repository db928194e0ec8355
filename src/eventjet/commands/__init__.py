"""Load, decide, append, and on conflict decide again."""

from __future__ import annotations

from eventjet.commands.decisions import Committed, Planned
from eventjet.commands.importing import Imported, ImportReport
from eventjet.commands.repository import Command, Repository

__all__ = ["Command", "Committed", "ImportReport", "Imported", "Planned", "Repository"]
