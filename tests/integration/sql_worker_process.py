"""A worker process of the ledger by hand for the tests that kill it: `python -m … <nats> <database> <app> <batch_max>`.

Ends in good order on SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.integration.by_hand import LEDGER
from tests.integration.ledger_log import Ledger


async def main(server: str, database: str, name: str, batch_max: str) -> None:
    """Work until SIGTERM."""
    settings = Settings(servers=(server,), database=database)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = WorkerOptions(batch_max=int(batch_max), lease_s=1.0, poll_s=0.1)
    await run_workers(Ledger(settings, name=name, projections={"ledger": LEDGER}), settings, stop=stop, options=options)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
