"""eventjet's own worker: `python -m benchmarks.subjects.worker <nats> <database>`.

Prints one line of JSON once it reads: when that was, and the CPU time it took to come so far. Ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

from benchmarks.bank import bank
from eventjet.settings import Settings
from eventjet.workers.supervisor import run_workers


async def main(server: str, database: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = Settings(servers=(server,), database=database)
    await run_workers(bank, settings, ["account_balance"], stop=stop, on_ready=_ready)


def _ready() -> None:
    print(json.dumps({"ready": time.monotonic(), "cpu": time.process_time()}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
