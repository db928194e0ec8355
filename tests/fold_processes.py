"""Fold processes as tests find them: by a variable of the environment that their worker's test has set."""

from __future__ import annotations

import time
from pathlib import Path

from eventjet.parallel.process import PROGRAM

MARK = "EVENTJET_TEST_FOLDED"
"""The variable: with a value that no other test has, it is in every process that is started for this one."""
ENDS_S = 60.0


def fold_processes(value: str) -> list[int]:
    """Process ids of those that live, orphans too; the one that the others were forked from comes first."""
    found: list[int] = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and PROGRAM.encode() in (path / "cmdline").read_bytes():
                environ = (path / "environ").read_bytes().split(b"\0")
                found += [int(path.name)] if f"{MARK}={value}".encode() in environ else []
        except OSError:
            continue  # it has ended, or is somebody else's
    return sorted(found)


def all_ended(value: str) -> bool:
    """Whether none is left, soon: they are ended by a signal, which takes a moment."""
    deadline = time.monotonic() + ENDS_S
    while fold_processes(value):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
