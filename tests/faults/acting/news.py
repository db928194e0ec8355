"""An app that publishes, and a worker of it: `python -m tests.faults.acting.news <nats> <unused> <lease_s>`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from eventjet import App, Recorded, event, publication
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers
from tests.faults.acting.bells import Bell, Rung

STREAM = "town"


@event("bell.heard")
class Heard:
    """Public."""

    n: int
    part: int


@publication("news", stream=STREAM, source="https://town.example/news", start="beginning")
def news(event: Recorded[Rung]) -> list[Heard]:
    """One message of most, two of every third."""
    return [Heard(n=event.data.n, part=part) for part in range(1 + (event.data.n % 3 == 0))]


town = App("town_bells", aggregates=[Bell], publications=[news])


async def main(server: str, lease_s: float) -> None:
    """Work until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_workers(
        town,
        Settings(servers=tuple(server.split(","))),
        stop=stop,
        options=WorkerOptions(lease_s=lease_s, poll_s=0.2),
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main(sys.argv[1], float(sys.argv[3])))
