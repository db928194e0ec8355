"""Locks of files, which end with the process that has them: who has one lives."""

from __future__ import annotations

from typing import IO


def try_lock(file: IO[bytes]) -> bool:
    """Lock the open file for this process if nobody has; False where there are no such locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
