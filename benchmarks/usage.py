"""CPU time and memory of the parts of a rebuild, out of /proc: whatever a process started counts as its own."""

from __future__ import annotations

import os
import resource
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
        seconds: dict[str, float] = {}
        for part, process in self._each():
            # What a JVM starts are Python workers, and so were those that ended.
            if part == JVM:
                seconds[WORKERS] = seconds.get(WORKERS, 0.0) + process.reaped_s
                seconds[JVM] = seconds.get(JVM, 0.0) + process.own_s
            else:
                seconds[part] = seconds.get(part, 0.0) + process.own_s + process.reaped_s
        return seconds

    def resident_mb(self) -> dict[str, float]:
        """By part; pages that forked processes share count in each of them."""
        megabytes: dict[str, float] = {}
        for part, process in self._each():
            megabytes[part] = megabytes.get(part, 0.0) + process.resident_mb
        return megabytes

    def _each(self) -> Iterator[tuple[str, _Process]]:
        children: dict[int, list[_Process]] = {}
        processes = {process.pid: process for process in _processes()}
        for process in processes.values():
            children.setdefault(process.parent, []).append(process)
        waiting = [(SERVER, self.server), (POSTGRES, self.postgres), (DRIVER, self.driver)]
        while waiting:
            part, pid = waiting.pop()
            if pid not in processes:
                continue
            if part == DRIVER and processes[pid].program == "java":
                part = JVM
            yield part, processes[pid]
            below = WORKERS if part == JVM else part
            waiting += [(below, child.pid) for child in children.get(pid, ())]


class Peak:
    """The most that each part held at any look."""

    def __init__(self) -> None:
        self.resident_mb: dict[str, float] = {}

    def look(self, parts: Parts) -> None:
        for part, megabytes in parts.resident_mb().items():
            self.resident_mb[part] = max(megabytes, self.resident_mb.get(part, 0.0))


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


def own_cpu_s() -> float:
    """Return the CPU time of this process, all threads, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_peak_mb() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mb(pid: int) -> float:
    """Return the memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB


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
