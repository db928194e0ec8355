"""CPU time and memory of the parts of a rebuild, out of /proc: whatever a process started counts as its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER, POSTGRES, DRIVER, JVM, WORKERS = "nats-server", "PostgreSQL", "driver", "JVM", "Python workers"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1024 / 1024
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    program: str
    own_s: float
    reaped_s: float
    """Of children that ended."""
    resident_mb: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Who takes part: a server, a database, and the process that rebuilds, whose JVM and Python workers are found."""

    server: int
    postgres: int
    driver: int

    def cpu_s(self) -> dict[str, float]:
        """By part, since its processes began."""
        found: dict[str, float] = {}
        for part, process in self._each():
            # What a JVM starts are Python workers, and so were those that ended.
            if part == JVM:
                found[WORKERS] = found.get(WORKERS, 0.0) + process.reaped_s
                found[JVM] = found.get(JVM, 0.0) + process.own_s
            else:
                found[part] = found.get(part, 0.0) + process.own_s + process.reaped_s
        return found

    def resident_mb(self) -> dict[str, float]:
        """By part; pages that forked processes share count in each of them."""
        found: dict[str, float] = {}
        for part, process in self._each():
            found[part] = found.get(part, 0.0) + process.resident_mb
        return found

    def _each(self) -> Iterator[tuple[str, _Process]]:
        children: dict[int, list[_Process]] = {}
        known = {one.pid: one for one in _processes()}
        for one in known.values():
            children.setdefault(one.parent, []).append(one)
        waiting = [(SERVER, self.server), (POSTGRES, self.postgres), (DRIVER, self.driver)]
        while waiting:
            part, pid = waiting.pop()
            if pid not in known:
                continue
            if part == DRIVER and known[pid].program == "java":
                part = JVM
            yield part, known[pid]
            below = WORKERS if part == JVM else part
            waiting += [(below, child.pid) for child in children.get(pid, ())]


class Peak:
    """The most that each part held at any look."""

    def __init__(self) -> None:
        self.resident_mb: dict[str, float] = {}

    def look(self, parts: Parts) -> None:
        for part, held in parts.resident_mb().items():
            self.resident_mb[part] = max(held, self.resident_mb.get(part, 0.0))


@contextmanager
def peak_of(parts: Parts) -> Generator[Peak]:
    """Look at the memory every so often, from a thread."""
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            peak.look(parts)

    thread = threading.Thread(target=watch, name="benchmark-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.look(parts)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was added, by part."""
    return {part: value - before.get(part, 0.0) for part, value in after.items()}


def _processes() -> Iterator[_Process]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            head, _, tail = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has just ended
        fields = tail.split()
        own, reaped = (int(fields[at]) + int(fields[at + 1]) for at in (11, 13))
        yield _Process(
            int(folder.name),
            int(fields[1]),
            head.partition("(")[2],
            own / _TICKS,
            reaped / _TICKS,
            int(fields[21]) * _PAGE_MB,
        )
