"""Running workers until they are told to stop: SIGTERM and SIGINT drain, a second one ends at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from eventjet.cli.target import AppTarget
from eventjet.cli.terminal import note

DRAIN_S = 20.0
"""How long workers may take to finish their batch."""


async def run_until_stopped(
    at: AppTarget, names: Sequence[str], on_ready: Callable[[], None], *, http: tuple[str, int] | None = None
) -> None:
    """Run workers of the named projections; raises what stops them. Their log goes to standard error."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("eventjet").setLevel(logging.INFO)
    stop = asyncio.Event()
    running = asyncio.ensure_future(_work(at, names, stop, on_ready, http))
    loop = asyncio.get_running_loop()

    def told() -> None:
        if stop.is_set():
            running.cancel()
        stop.set()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, told)
    try:
        await _finished(running, stop)
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _work(
    at: AppTarget,
    names: Sequence[str],
    stop: asyncio.Event,
    on_ready: Callable[[], None],
    http: tuple[str, int] | None,
) -> None:
    from eventjet.workers.supervisor import run_workers

    if names:
        app = at.app()
        # Batches of thousands of events live for a moment and make no cycles: looked for at the usual rate, they
        # cost an eighth of a worker's time.
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        await run_workers(app, at.settings, names, stop=stop, on_ready=on_ready, http=http)
    else:
        on_ready()
        await stop.wait()


async def _finished(running: asyncio.Future[None], stop: asyncio.Event) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        note("stopping: the batches in hand are finished first")
        await asyncio.wait({running}, timeout=DRAIN_S)
        if not running.done():
            note(f"not done within {DRAIN_S:g} s: ended; what was not committed is read again by the next worker")
            running.cancel()
    with suppress(asyncio.CancelledError):
        await running
