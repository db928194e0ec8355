"""A process that works on the transfers: `python -m tests.faults.acting.worker <nats> <outside> <lease_s>`.

Each mail is a line of the file `outside`: its key. Prints `ready`; ends in good order on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from eventjet import App
from eventjet.examples.transfer.accounts import Account, Book
from eventjet.examples.transfer.app import Outside, receipts
from eventjet.examples.transfer.transfers import Transfer
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers


class FileMails:
    """Mails as lines of a file, appended in one write each."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def send(self, text: str, *, key: str) -> None:
        os.write(self._file, f"{key}\n".encode())


class ToFile(Outside):
    """What the reactor needs, with mails that a test can count."""

    def __init__(self, path: str) -> None:
        self.mails = FileMails(path)


@asynccontextmanager
async def outside() -> AsyncGenerator[Outside]:
    yield ToFile(sys.argv[2])


transfers = App("transfers", aggregates=[Account, Book], processes=[Transfer], reactors=[receipts], deps=outside)


async def main(server: str, lease_s: float) -> None:
    """Work until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_workers(
        transfers,
        Settings(servers=tuple(server.split(","))),
        stop=stop,
        on_ready=lambda: print("ready", flush=True),  # noqa: T201
        options=WorkerOptions(lease_s=lease_s, poll_s=0.2),
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main(sys.argv[1], float(sys.argv[3])))
