"""Work that takes long: its progress on standard error, and the signals that end it in good order.

Those are Ctrl-C, SIGTERM, and SIGHUP, which comes when the terminal is closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from eventjet.cli.output import INTERRUPTED, note
from eventjet.cli.target import AppTarget
from eventjet.errors import UnexpectedExit
from eventjet.runtime import settle_process

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from eventjet.dev.demo import ShowProgress
    from eventjet.rebuild.progress import Progress

T = TypeVar("T")

STOP_S = 20.0
"""How long workers may take to end, which give up their batches long before."""
_CUT_OFF_S = 5.0
"""How much longer, once they were told that it is over."""
CLEARED_S = 60.0
"""How long bulk work may take to clear away what it has begun."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LINE_EVERY_S = 1.0
_WORTH_S = 2.0
"""What is over sooner needs no progress."""


def finished(consolation: str, work: Callable[..., Coroutine[Any, Any, T]]) -> T:
    """Run bulk work, a function of a `progress`, and show that.

    A signal that asks for an end ends it in good order, and then `consolation` says what became of things.
    """
    with interruptible(CLEARED_S) as interruption, progress() as shown:

        def show(step: Progress) -> None:
            if step.note:
                note(step.note)
            shown(step.phase, step.done, step.total or None)

        try:
            return interruption.run(_told_when_stopping(work(progress=show)))
        except KeyboardInterrupt:
            note(f"Interrupted. {consolation}")
            raise


async def _told_when_stopping(work: Coroutine[Any, Any, T]) -> T:
    """Run it; when it is cancelled, say at once that it is ending, which may take a while."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        note("Stopping; what was begun is cleared away.")
        task.cancel()
        return await task


class Interruption:
    """The first signal that asks for an end, which ends what runs in good order; later ones change nothing.

    The loop of `run` is never broken off in the midst of a step, as an exception out of a handler would do: what it
    was doing would be left as it was, and be waited for in vain.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound = _bound(bound_s)
        self._asked = False
        self._task: asyncio.Task[Any] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """As `asyncio.run`; raises `KeyboardInterrupt` when the work was cancelled because a signal came."""

        async def main() -> T:
            self._task = asyncio.current_task()
            return await work

        try:
            return asyncio.run(main())
        except asyncio.CancelledError as error:
            if self._asked:
                raise KeyboardInterrupt from None
            raise UnexpectedExit.instead_of(error) from error
        finally:
            self._task = None

    def calm(self) -> None:
        """From here on signals change nothing: the clean-up has begun for another reason."""
        self._asked = True

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        """The handler."""
        if self._asked:
            return
        self._asked = True
        self._bound.start()
        task = self._task
        if task is None or task.done():
            raise KeyboardInterrupt
        task.get_loop().call_soon_threadsafe(task.cancel)

    def over(self) -> None:
        """What was to be ended has ended."""
        self._bound.cancel()


def _bound(seconds: float) -> threading.Timer:
    """Ends this process so long after its start, whatever the loop does; servers and JVMs end by themselves then."""

    def cut_off() -> None:
        note(f"not over within {seconds:g} s: ended")
        os._exit(INTERRUPTED)

    bound = threading.Timer(seconds, cut_off)
    bound.daemon = True
    return bound


@contextmanager
def interruptible(bound_s: float) -> Generator[Interruption]:
    """Let Ctrl-C, SIGTERM and SIGHUP end what runs within the block, after so many seconds at the latest."""
    interruption = Interruption(bound_s)
    with _handling(interruption.ask):
        try:
            yield interruption
        finally:
            interruption.over()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Generator[None]:
    """Not those that are ignored: `nohup` has programs ignore SIGHUP, and a shell those in the background SIGINT."""
    heard = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


async def run_until_stopped(
    at: AppTarget,
    names: Sequence[str],
    on_ready: Callable[[], None],
    *,
    http: tuple[str, int] | None = None,
) -> None:
    """Run workers of the named projections until a signal drains them; a second one ends them at once.

    Raises what stops them. Their log goes to standard error. Where code of the application blocks the way out, the
    process is ended.
    """
    from eventjet.subscriptions.supervisor import run_workers

    settle_process()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    async def work() -> None:
        if names:
            await run_workers(at.app(), at.settings, names, stop=stop, on_ready=on_ready, http=http)
        else:
            on_ready()
            await stop.wait()

    running, bound = asyncio.ensure_future(work()), _bound(STOP_S + _CUT_OFF_S)

    def cut_off() -> None:
        note(f"not done within {STOP_S:g} s: ended; what was not committed is read again by the next worker")
        running.cancel()

    def asked() -> None:
        if stop.is_set():
            running.cancel()
            return
        note("stopping: what is in hand is finished first")
        stop.set()
        loop.call_later(STOP_S, cut_off)

    def hear(_number: int, _frame: FrameType | None) -> None:
        if bound.ident is None:
            bound.start()  # here, as the loop may be blocked; it lasts until the process is gone, with all its threads
        loop.call_soon_threadsafe(asked)

    with _handling(hear):
        try:
            await running
        except asyncio.CancelledError as error:
            if not stop.is_set():
                raise UnexpectedExit.instead_of(error) from error


async def until_signalled() -> None:
    """Wait for a signal that asks for an end; a second one ends the process at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    with _handling(lambda _number, _frame: loop.call_soon_threadsafe(asked)):
        await stop.wait()


@contextmanager
def progress() -> Generator[ShowProgress]:
    """Bars on a terminal, otherwise lines such as `phase=load done=50000 total=200000`."""
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
    """At most one line a second for a phase, and one when a long phase is complete."""

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
            of = "" if total is None else f" total={total}"
            part = f" step={step}" if step else ""
            print(f"phase={phase.replace(' ', '-')}{part} done={done}{of}", file=sys.stderr, flush=True)


class _Bars:
    """One bar a phase, with rate and time left."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int | None = None, step: str = "") -> None:
        if phase not in self._tasks:
            # One phase is over when the next begins, even where its size was never known.
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
