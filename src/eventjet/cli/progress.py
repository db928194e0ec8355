"""Progress on standard error: bars on a terminal, otherwise lines such as `phase=load done=50000 total=200000`."""

from __future__ import annotations

import sys
import time
from typing import Protocol, Self

_EVERY_S = 1.0
_WORTH_S = 2.0
"""What is over sooner needs no progress."""


class ProgressView(Protocol):
    """Told where a phase stands, as often as one likes; a context manager."""

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def progress() -> ProgressView:
    """The one that fits standard error."""
    return Bars() if sys.stderr.isatty() else Lines()


class Lines:
    """At most one line a second for a phase, and one when a long phase is complete."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._told: dict[str, tuple[float, int]] = {}

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None:
        now = time.monotonic()
        began = self._began.setdefault(phase, now)
        told_at, told = self._told.get(phase, (began, -1))
        complete = total is not None and done >= total and now - began > _WORTH_S
        if done != told and (complete or now - told_at > _EVERY_S):
            self._told[phase] = (now, done)
            of = "" if total is None else f" total={total}"
            part = f" step={step}" if step else ""
            print(f"phase={phase.replace(' ', '-')}{part} done={done}{of}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Pace:
    """How fast a step goes, from when it began to move."""

    def __init__(self, task: int) -> None:
        self.task = task
        self._step = ""
        self._done = 0
        self._began = time.monotonic()

    def rate(self, step: str, done: int) -> str:
        """What a bar shows; empty while there is too little to tell."""
        now = time.monotonic()
        if (step and step != self._step) or done < self._done or not self._done:
            self._step, self._done, self._began = step, done, now
        seconds = now - self._began
        return f"{(done - self._done) / seconds:,.0f}/s" if seconds > _EVERY_S and done > self._done else ""


class Bars:
    """One bar a phase, with rate and time left; rich is imported when the first is drawn."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]:>15}"),
            TextColumn("{task.fields[rate]:>9}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            expand=False,
        )
        self._tasks: dict[str, _Pace] = {}

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None:
        from rich.progress import TaskID

        if phase not in self._tasks:
            self._complete()
            self._tasks[phase] = _Pace(int(self._bars.add_task(phase, total=total, rate="", count="")))
        pace = self._tasks[phase]
        self._bars.update(
            TaskID(pace.task),
            completed=done,
            total=total,
            count=f"{done:,}" if done else "",
            rate=pace.rate(step, done),
            description=f"{phase} {step}".rstrip(),
        )

    def _complete(self) -> None:
        """A phase is over when the next begins, even one whose size was never known."""
        for task in self._bars.tasks:
            if not task.finished:
                self._bars.update(task.id, total=max(task.completed, 1), completed=max(task.completed, 1))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
