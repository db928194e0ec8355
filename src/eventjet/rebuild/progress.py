"""How far a rebuild is, and how it is told to stop: what its threads and its caller share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["start", "read", "load", "in order", "index", "catch up", "swap", "copy", "compare"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of one phase; `total` is 0 while it is not known."""

    phase: Phase
    done: int
    total: int


Report: TypeAlias = Callable[[Progress], None]


class Stopped(Exception):
    """Raised inside a thread whose caller no longer waits."""


class Watch:
    """Reports progress, measures phases, and lets work in threads stop soon after it was cancelled."""

    def __init__(self, report: Report | None = None) -> None:
        self._report = report
        self._stop = threading.Event()
        self._interrupts: list[Callable[[], None]] = []
        self.seconds: dict[str, float] = {}
        """Wall time by phase."""

    @contextmanager
    def phase(self, name: Phase, total: int = 0) -> Generator[None]:
        """Measure a phase; phases of the same name add up."""
        self.tell(name, 0, total)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def tell(self, phase: Phase, done: int, total: int) -> None:
        """Report, from any thread; raises `Stopped` once the work is not wanted any more."""
        self.check()
        if self._report is not None:
            self._report(Progress(phase, done, total))

    def check(self) -> None:
        """Raise `Stopped` once the work is not wanted any more."""
        if self._stop.is_set():
            raise Stopped

    def stop(self) -> None:
        """Make the next `tell` and `check` raise, and end what is being waited for."""
        self._stop.set()
        for interrupt in tuple(self._interrupts):
            interrupt()

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Generator[None]:
        """Call `interrupt`, which must not raise, should `stop` come meanwhile."""
        self._interrupts.append(interrupt)
        try:
            yield
        finally:
            self._interrupts.remove(interrupt)
