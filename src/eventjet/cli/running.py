"""Run long work: show its progress on standard error, and end it in good order on a signal.

The signals are SIGINT (Ctrl-C), SIGTERM, and SIGHUP, which a closed terminal sends; on Windows SIGINT and SIGBREAK.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from eventjet.cli.output import INTERRUPTED, note
from eventjet.cli.target import AppTarget
from eventjet.errors import UnexpectedExit
from eventjet.runtime import is_cancelled, run_async, tune_gc

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from eventjet.dev.demo import ShowProgress
    from eventjet.rebuild.progress import Progress

T = TypeVar("T")

STOP_S = 20.0
"""Seconds that workers have to end after a signal; they give up their batches long before."""
_CUT_OFF_S = 5.0
"""Further seconds after their cancellation, until the process is ended."""
CLEARED_S = 60.0
"""Seconds that bulk work has to clean up after a signal."""
_ENDING: list[signal.Signals] = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
]
_LINE_EVERY_S = 1.0
_WORTH_S = 2.0
"""Seconds below which a phase gets no line when it is complete."""


def finished(left_behind: str, work: Callable[..., Coroutine[Any, Any, T]]) -> T:
    """Run bulk work and show its progress; `work` is called with the callback `progress`.

    A signal ends the work in good order; then `left_behind`, a sentence about what the work leaves behind, is
    printed and `KeyboardInterrupt` is raised.
    """
    with interruptible(CLEARED_S) as interruption, progress() as show_progress:

        def show(step: Progress) -> None:
            if step.note:
                note(step.note)
            show_progress(step.phase, step.done, step.total or None)

        try:
            return interruption.run(_run_and_announce_stop(work(progress=show)))
        except KeyboardInterrupt:
            note(f"Interrupted. {left_behind}")
            raise


async def _run_and_announce_stop(work: Coroutine[Any, Any, T]) -> T:
    """Run the work; when it is cancelled, print at once that it is stopping, since its clean-up may take a while."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        note("Stopping; what was begun is cleared away.")
        task.cancel()
        return await task


class Interruption:
    """A handler of signals that cancels the running work at the first signal, and ignores later ones.

    An exception out of a signal handler would break off the event loop within a step, and whatever waits for that step
    would wait in vain. So the handler cancels the task instead.
    """

    def __init__(self, bound_s: float) -> None:
        self._exit_timer = _exit_timer(bound_s)
        self._is_stopping = False
        self._task: asyncio.Task[Any] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work as `asyncio.run` does. Raises `KeyboardInterrupt` where a signal cancelled it."""

        async def main() -> T:
            self._task = asyncio.current_task()
            return await work

        try:
            return run_async(main())
        except asyncio.CancelledError as error:
            if self._is_stopping:
                raise KeyboardInterrupt from None
            raise UnexpectedExit.instead_of(error) from error
        finally:
            self._task = None

    def ignore_signals(self) -> None:
        """Ignore signals from now on, since the clean-up has begun for another reason."""
        self._is_stopping = True

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._exit_timer.start()
        task = self._task
        if task is None or task.done():
            raise KeyboardInterrupt
        task.get_loop().call_soon_threadsafe(task.cancel)

    def over(self) -> None:
        """Cancel the time limit, since the work has ended."""
        self._exit_timer.cancel()


def _exit_timer(seconds: float) -> threading.Timer:
    """Return a timer that ends this process, whatever its event loop does; local servers and JVMs end with it."""

    def cut_off() -> None:
        note(f"not over within {seconds:g} s: ended")
        os._exit(INTERRUPTED)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    return timer


@contextmanager
def interruptible(bound_s: float) -> Generator[Interruption]:
    """Let the ending signals end the work within the block, and the process `bound_s` after the signal."""
    interruption = Interruption(bound_s)
    with _handling(interruption.on_signal):
        try:
            yield interruption
        finally:
            interruption.over()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Generator[None]:
    """Handle the ending signals within the block, except those that are ignored, as SIGHUP is under `nohup`."""
    handled = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextmanager
def running_program(command: Sequence[str], environ: Mapping[str, str]) -> Generator[subprocess.Popen[str]]:
    """Yield a program whose standard output and error are read as its `stdout`; it has ended after the block.

    An ending signal ends the program and all that it has started, within `CLEARED_S`; then `KeyboardInterrupt` is
    raised. Not on Windows.
    """
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )

    def end(number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    killing = threading.Timer(CLEARED_S, end, (signal.SIGKILL,))
    killing.daemon = True

    def hear(_number: int, _frame: FrameType | None) -> None:
        if killing.ident is None:
            killing.start()
            end(signal.SIGTERM)

    with _handling(hear), process:
        try:
            yield process
        except BaseException:
            end(signal.SIGKILL)
            raise
        finally:
            process.wait()
            killing.cancel()
    if killing.ident is not None:
        raise KeyboardInterrupt


STATES = "each works or stands by, unless the log above says why it does not"
"""What `on_ready` of `run_until_stopped` means for the subscriptions where it is given nothing else to say."""
_LOOK_S = 5.0
"""Seconds that the look at the status may take before `ready` is said without it."""
_KEPT = ("not begun", "paused", "retired", "stopped")
"""Conditions in which no worker takes a subscription."""


async def run_until_stopped(
    at: AppTarget,
    names: Sequence[str],
    on_ready: Callable[[str], None],
    *,
    http: tuple[str, int] | None = None,
    until: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Run workers of the named subscriptions until a signal drains them; a second signal cancels them.

    `on_ready` is called with the subscriptions that do not work, in words; with an empty text if none is known. When
    `until` ends, the workers are drained too. Raises whatever error stops the workers or ends `until`. Their log goes
    to standard error. Where code of the application blocks the shutdown, the process is ended after 25 s.
    """
    from eventjet.subscriptions.supervisor import run_workers

    tune_gc()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    announcing: asyncio.Task[None] | None = None

    async def announce() -> None:
        on_ready(await _not_working(at, names))

    def ready() -> None:
        nonlocal announcing
        announcing = asyncio.create_task(announce())

    async def work() -> None:
        if names:
            await run_workers(at.app(), at.settings, names, stop=stop, on_ready=ready, http=http)
        else:
            on_ready("")
            await stop.wait()

    running, exit_timer = asyncio.ensure_future(work()), _exit_timer(STOP_S + _CUT_OFF_S)
    ending = asyncio.ensure_future(until or asyncio.Event().wait())

    def cut_off() -> None:
        note(f"not done within {STOP_S:g} s: ended; what was not committed is read again by the next worker")
        running.cancel()

    def on_signal() -> None:
        if stop.is_set():
            running.cancel()
            return
        if announcing is not None and not announcing.done():
            announcing.cancel()
            on_ready("")
        note("stopping: what is in hand is finished first")
        stop.set()
        loop.call_later(STOP_S, cut_off)

    def handle(_number: int, _frame: FrameType | None) -> None:
        if exit_timer.ident is None:
            exit_timer.start()  # not in the loop, which may be blocked; never cancelled, so it also covers the threads
        loop.call_soon_threadsafe(on_signal)

    ending.add_done_callback(lambda _: None if running.done() else on_signal())
    with _handling(handle):
        try:
            await running
        except asyncio.CancelledError as error:
            if is_cancelled(error):
                raise  # a signal came before the handler of this block was there
            if not stop.is_set():
                raise UnexpectedExit.instead_of(error) from error
        finally:
            is_over = ending.done()
            ending.cancel()
    if is_over:
        ending.result()


async def _not_working(at: AppTarget, names: Sequence[str]) -> str:
    """Return in words what no worker takes, and what has quarantined events; empty for nothing, or if unreadable."""
    from eventjet.subscriptions.status import StatusReader

    try:
        async with asyncio.timeout(_LOOK_S), StatusReader(at.app(), at.settings, names) as reader:
            statuses = (await reader.read()).projections
    except Exception:  # noqa: BLE001 - whatever it is, the workers' own log says it
        return ""
    names_by_word: defaultdict[str, list[str]] = defaultdict(list)
    for status in statuses:
        word = status.condition.word
        if status.declared and (word in _KEPT or status.quarantined):
            names_by_word[word if word in _KEPT else "quarantined"].append(status.name)
    kept = [f"{word}: {', '.join(names_by_word[word])}" for word in sorted(names_by_word)]
    return "; ".join([*kept, "`eventjet status` says why"]) if kept else ""


async def until_signalled() -> None:
    """Wait for a signal that asks the process to end; a second signal ends it at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    with _handling(lambda _number, _frame: loop.call_soon_threadsafe(on_signal)):
        await stop.wait()


@contextmanager
def progress() -> Generator[ShowProgress]:
    """Show progress as bars on a terminal, otherwise as lines such as `phase=load done=50000 total=200000`."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[count]:>15}"),
        TextColumn("{task.fields[rate]:>9}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    ) as bars:
        yield _Bars(bars)


class Lines:
    """Progress as lines: at most one line a second for a phase, and one when a phase of over 2 s is complete."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._printed: dict[str, tuple[float, int]] = {}

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None:
        now = time.monotonic()
        began = self._began.setdefault(phase, now)
        printed_at, printed = self._printed.get(phase, (began, -1))
        complete = total is not None and done >= total and now - began > _WORTH_S
        if done != printed and (complete or now - printed_at > _LINE_EVERY_S):
            self._printed[phase] = (now, done)
            total_text = "" if total is None else f" total={total}"
            step_text = f" step={step}" if step else ""
            print(f"phase={phase.replace(' ', '-')}{step_text} done={done}{total_text}", file=sys.stderr, flush=True)


class _Bars:
    """Progress as one bar for each phase, with its rate and the time left."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None:
        if phase not in self._tasks:
            # A phase is complete when the next one begins, even if its total was never known.
            for task in self._bars.tasks:
                if not task.finished:
                    self._bars.update(task.id, total=max(task.completed, 1), completed=max(task.completed, 1))
            self._tasks[phase] = self._bars.add_task(phase, total=total, rate="", count="")
        task = self._tasks[phase]
        speed = self._bars.tasks[task].speed
        self._bars.update(
            task,
            completed=done,
            total=total,
            count=f"{done:,}" if done else "",
            rate=f"{speed:,.0f}/s" if speed else "",
            description=f"{phase} {step}".rstrip(),
        )
