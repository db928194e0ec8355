"""The progress of a job and its cancellation, shared by the job's threads and its caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from eventjet.observability import spans, tracing

Phase: TypeAlias = Literal[
    "start",
    "check",
    "spark",
    "read",
    "load",
    "sequential",
    "index",
    "catch up",
    "swap",
    "copy",
    "compare",
    "archive",
    "publish",
    "bodies",
]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress within one phase; `total` is 0 while it is not known."""

    phase: Phase
    done: int
    total: int
    note: str = ""
    """A message in words, reported once: for example the chosen engine and the reason."""


Report: TypeAlias = Callable[[Progress], None]


class Stopped(Exception):
    """Raised inside a thread whose caller no longer waits."""


class Watch:
    """A reporter of progress that measures phases, and stops work in threads soon after it was cancelled."""

    def __init__(self, report: Report | None = None) -> None:
        self._report = report
        self._stop = threading.Event()
        self._interrupts: list[Callable[[], None]] = []
        self.seconds: dict[str, float] = {}
        """Wall time by phase."""
        self.cores: int | None = None
        """How many cores Spark has on this machine; None when it runs elsewhere or not at all."""

    @contextmanager
    def phase(self, name: Phase, total: int = 0) -> Generator[None]:
        """Measure the wall time of a phase; phases of the same name add up."""
        self.report(name, 0, total)
        started = time.perf_counter()
        try:
            with tracing.span(spans.PHASE, name, {"eventjet.phase": name}):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def local_at_most_s(self) -> float | None:
        """Return an upper bound of the local engine's time, with no JVM and one core; None unless Spark ran here."""
        if self.cores is None:
            return None
        spent = sum(self.seconds.values()) - self.seconds.get("spark", 0.0)
        return spent + (self.cores - 1) * self.seconds.get("read", 0.0)

    def report(self, phase: Phase, done: int, total: int) -> None:
        """Report progress, from any thread; raises `Stopped` once the work was cancelled."""
        self.check()
        if self._report is not None:
            self._report(Progress(phase, done, total))

    def say(self, note: str) -> None:
        """Report a message in words, in the phase `start`."""
        if self._report is not None:
            self._report(Progress("start", 0, 0, note))

    def check(self) -> None:
        """Raise `Stopped` once the work was cancelled."""
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Sleep; raises `Stopped` as soon as the work is cancelled."""
        self._stop.wait(seconds)
        self.check()

    def stop(self) -> None:
        """Cancel the work: the next `report` or `check` raises, `wait` ends, and the interrupts are called."""
        self._stop.set()
        for interrupt in tuple(self._interrupts):
            interrupt()

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Generator[None]:
        """Call `interrupt`, which must not raise, if `stop` is called within the block or was called before it."""
        self._interrupts.append(interrupt)
        if self._stop.is_set():
            interrupt()
        try:
            yield
        finally:
            self._interrupts.remove(interrupt)
