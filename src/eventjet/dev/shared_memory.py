"""The System V segment a killed PostgreSQL leaves behind: a few bytes, of which a machine holds a limited number."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_SEGMENT_LINE = 6
_IPC_RMID = 0


def release_shared_memory(postmaster_file: Path, pid: int) -> None:
    """Remove the segment named in a dead postmaster's pid file; one that shut down in good order left neither."""
    try:
        lines = postmaster_file.read_text(encoding="utf-8").splitlines()
        owner, segment = int(lines[0]), int(lines[_SEGMENT_LINE].split()[1])
    except (OSError, ValueError, IndexError):
        return
    if owner == pid and sys.platform == "linux":
        ctypes.CDLL(None).shmctl(segment, _IPC_RMID, None)
