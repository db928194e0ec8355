"""Load, decide, append, and on conflict decide again."""

from __future__ import annotations

from eventjet.repository.decisions import Committed, Planned
from eventjet.repository.importing import Imported, ImportReport
from eventjet.repository.repository import Command, Repository

__all__ = ["Command", "Committed", "ImportReport", "Imported", "Planned", "Repository"]
