"""A process that runs commands and remembers nothing of them: `python -m tests.faults.trials.client <nats> <app>`."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from decimal import Decimal

from tests.faults.tally import Tally, tally_app

ENTITIES = 2_000
WRITERS = 4
FIRST = 100_000_000
"""A number beyond those of all commands that are checked."""
PAUSE_S = 0.05


async def main(server: str, app: str) -> None:
    """Run commands until SIGTERM, or until the process is killed."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with tally_app(app).connect(servers=server) as jet:
        print("ready", flush=True)  # noqa: T201
        tallies = jet.repository(Tally)

        async def write(writer: int) -> None:
            chance, number = random.Random(writer), FIRST + writer
            while not stop.is_set():
                number += WRITERS
                await tallies.execute(f"e-{chance.randrange(ENTITIES)}", Tally.add, Decimal(number) / 100)
                await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*map(write, range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
