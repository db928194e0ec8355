"""`CodeSeen`: whether the program's modules are still, on disk, what this process has imported.

A process that is started later imports what lies there then. After half a deploy that is other code, and it would fold
some aggregates otherwise than this process folds the rest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CodeSeen:
    """What was imported when it was made, by file: size and time of the last change."""

    files: dict[str, tuple[int, int] | None]

    @classmethod
    def now(cls) -> CodeSeen:
        """To be made soon after everything is imported."""
        loaded = list(sys.modules.values())
        origins = {str(file) for module in loaded if (file := getattr(module, "__file__", None))}
        return cls({origin: _state(origin) for origin in origins})

    def changed(self) -> str | None:
        """A file that is another one now, or gone; None when there is none."""
        return next((file for file, before in self.files.items() if _state(file) != before), None)


def _state(file: str) -> tuple[int, int] | None:
    """None for what is no file of its own, such as a module in an archive."""
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
