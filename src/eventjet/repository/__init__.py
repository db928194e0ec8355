"""Load, decide, append, and on conflict decide again."""

from __future__ import annotations

from eventjet.repository.importing import Imported, ImportReport
from eventjet.repository.planned import Committed, Planned
from eventjet.repository.repository import Command, Repository

__all__ = ["Command", "Committed", "ImportReport", "Imported", "Planned", "Repository"]
