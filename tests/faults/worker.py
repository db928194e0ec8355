"""A worker process for the fault tests: `python -m tests.faults.worker <nats> <database> <app> <batch_max> <lease_s>
<projection>…`.

Prints `ready` once it works or stands by; ends in good order on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.faults.audit import sessions_of


async def main(server: str, database: str, name: str, options: WorkerOptions, projections: list[str]) -> None:
    """Work until SIGTERM."""
    os.environ["EVENTJET_TEST_WORKED"] = f"{'wary' if projections == ['wary'] else 'tally'}:{name}"
    from tests.faults.worked import app  # which it is the variable says

    settings = Settings(servers=tuple(server.split(",")), database=sessions_of(str(os.getpid()), database))
    await work(app, settings, options, projections)


async def work(app: Any, settings: Settings, options: WorkerOptions, projections: Sequence[str] = ()) -> None:
    """Work until SIGTERM, and say when it is ready."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_workers(
        app,
        settings,
        projections,
        stop=stop,
        on_ready=lambda: print("ready", flush=True),  # noqa: T201
        options=options,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    server, database, name, batch_max, lease_s, *projections = sys.argv[1:]
    options = WorkerOptions(batch_max=int(batch_max), lease_s=float(lease_s), poll_s=0.1)
    asyncio.run(main(server, database, name, options, projections))
