"""A worker process for the tests that kill it: `python -m tests.integration.worker_process <nats> <database> <app>
<batch_max> <lease_s>`.

Prints `ready` once it works or stands by; ends in good order on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.integration.ledger_log import Ledger


async def main(server: str, database: str, name: str, options: WorkerOptions) -> None:
    """Work until SIGTERM."""
    settings = Settings(servers=(server,), database=database)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_workers(
        Ledger(settings, name=name),
        settings,
        ["balances"],
        stop=stop,
        on_ready=lambda: print("ready", flush=True),  # noqa: T201
        options=options,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    server, database, name, batch_max, lease_s = sys.argv[1:]
    options = WorkerOptions(batch_max=int(batch_max), lease_s=float(lease_s))
    asyncio.run(main(server, database, name, options))
