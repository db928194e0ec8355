"""A private temporary folder for the length of a `with`; those of killed processes are removed by the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX = "eventjet-spark-"

_ALIVE = "alive"
"""A file that is locked for as long as the folder's process lives."""


@contextmanager
def scratch_folder() -> Generator[Path]:
    """Only this user can look into it; it may hold secrets."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        made = folder / "new"
        with made.open("wb") as file:
            _try_lock(file)
            # Nobody sees it by its name before it is locked.
            made.rename(folder / _ALIVE)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # What is not ours, or has just been made and is not locked yet, is left alone.
        with suppress(OSError), (folder / _ALIVE).open("r+b") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid() and _try_lock(file):
                shutil.rmtree(folder, ignore_errors=True)


def _try_lock(file: IO[bytes]) -> bool:
    """Lock the file if nobody has; False where there are no such locks."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
