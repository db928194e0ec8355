"""Where an embedded server lives: a folder that was given and stays, or a temporary one that goes."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


class Home:
    """Made on first use; a temporary one is gone after `remove`, or when this object or the program is."""

    def __init__(self, given: Path | None, prefix: str = "eventjet-", *, scrap: Path | None = None) -> None:
        """`scrap` is the temporary folder that a given folder is part of."""
        self._given = None if given is None else given.absolute()
        self._prefix = prefix
        self._scrap = scrap
        self._made: Path | None = None
        self._removal: weakref.finalize[[Path, bool], Home] | None = None

    @property
    def temporary(self) -> bool:
        return self._given is None or self._scrap is not None

    @property
    def scrap(self) -> Path | None:
        """What a supervisor removes when the program ends without having closed its server."""
        return self.path() if self._given is None else self._scrap

    def part(self, name: str) -> Home:
        """A folder within this one, which goes when this one goes."""
        return Home(self.path() / name, scrap=self.scrap)

    def path(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            return self._given
        if self._made is None:
            # Directly under the temporary folder: its parents can be reached by the user PostgreSQL runs as.
            self._made = Path(tempfile.mkdtemp(prefix=self._prefix))
            self._removal = weakref.finalize(self, shutil.rmtree, self._made, True)
        return self._made

    def remove(self) -> None:
        """Remove the folder if it is a temporary one."""
        if self._removal is not None:
            self._removal()
        self._made = self._removal = None
