"""Fold processes as tests find them: by what their worker's test has set, and by how they are named."""

from __future__ import annotations

import time
from pathlib import Path

MARK = "EVENTJET_TEST_FOLDED"
"""A variable: with a value that no other test has, it is in every process that is started for this one."""
ENDS_S = 60.0
_STARTS_S = 60.0
_NAMES = ("eventjet fold", "eventjet forks")


def fold_processes(value: str) -> list[int]:
    """Process ids of those that live, orphans too."""
    return _found(value, _NAMES[:1])


def folded_by(value: str, number: int) -> bool:
    """Whether so many of them live at once, soon: they are forked one after the other."""
    deadline = time.monotonic() + _STARTS_S
    while len(fold_processes(value)) != number:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def fork_servers(value: str) -> list[int]:
    """Process ids of what forks them."""
    return _found(value, _NAMES[1:])


def _found(value: str, names: tuple[str, ...]) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and (path / "comm").read_text().rstrip() in names and _is_marked(path, value):
                found.append(int(path.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return sorted(found)


def _is_marked(path: Path, value: str) -> bool:
    """By the variable, or, where it was set after its program began, by the file that has what it writes."""
    environ = (path / "environ").read_bytes().split(b"\0")
    return f"{MARK}={value}".encode() in environ or value in (path / "fd" / "2").readlink().name


def all_ended(value: str) -> bool:
    """Whether none is left, soon: they are ended by a signal, which takes a moment."""
    deadline = time.monotonic() + ENDS_S
    while _found(value, _NAMES):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
