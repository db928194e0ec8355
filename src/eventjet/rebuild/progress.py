"""How far a rebuild is, and how it is told to stop: what its threads and its caller share."""

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
]


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of one phase; `total` is 0 while it is not known."""

    phase: Phase
    done: int
    total: int
    note: str = ""
    """What there is to say in words, once: which engine was chosen, and why."""


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
        self.cores: int | None = None
        """That Spark had on this machine; None where it ran elsewhere or not at all."""

    @contextmanager
    def phase(self, name: Phase, total: int = 0) -> Generator[None]:
        """Measure a phase; phases of the same name add up."""
        self.tell(name, 0, total)
        started = time.perf_counter()
        try:
            with tracing.span(spans.PHASE, name, {"eventjet.phase": name}):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def local_at_most_s(self) -> float | None:
        """What the local engine would have taken at the most; None where Spark did not run on this machine.

        It would have had no JVM to start, and would have done one after the other what the cores did together.
        """
        if self.cores is None:
            return None
        spent = sum(self.seconds.values()) - self.seconds.get("spark", 0.0)
        return spent + (self.cores - 1) * self.seconds.get("read", 0.0)

    def tell(self, phase: Phase, done: int, total: int) -> None:
        """Report, from any thread; raises `Stopped` once the work is not wanted any more."""
        self.check()
        if self._report is not None:
            self._report(Progress(phase, done, total))

    def say(self, note: str) -> None:
        """Report something in words, while the work is being prepared."""
        if self._report is not None:
            self._report(Progress("start", 0, 0, note))

    def check(self) -> None:
        """Raise `Stopped` once the work is not wanted any more."""
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Let time pass; raises `Stopped` as soon as the work is not wanted any more."""
        self._stop.wait(seconds)
        self.check()

    def stop(self) -> None:
        """Make the next `tell` and `check` raise, and end what is being waited for."""
        self._stop.set()
        for interrupt in tuple(self._interrupts):
            interrupt()

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Generator[None]:
        """Call `interrupt`, which must not raise, should `stop` come meanwhile or have come before."""
        self._interrupts.append(interrupt)
        if self._stop.is_set():
            interrupt()
        try:
            yield
        finally:
            self._interrupts.remove(interrupt)
