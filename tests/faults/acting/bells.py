"""An app with a reactor that fails at random and a process that only waits, and a worker of it.

`python -m tests.faults.acting.bells <nats> <outside> <lease_s>`; each call of the handler is a line of `outside`: bell,
number and key. BELLS_PARTITIONS is into how many the reactor is divided.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime

from eventjet import App, Deadline, Reaction, Recorded, Retry, Step, aggregate, at, event, process, reactor
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers

FAILS = 0.03
"""How many of its calls fail."""


@event("bell.rung")
class Rung:
    n: int


@aggregate("bell")
class Bell:
    last: int = 0

    def ring(self, n: int) -> Rung:
        return Rung(n=n)

    def evolve(self, event: Rung) -> Bell:
        return replace(self, last=event.n)


@event("tower.counted")
class Counted:
    n: int


@aggregate("tower", snapshot_every=50)
class Tower:
    """Counts one bell."""

    counted: int = 0

    def count(self, n: int) -> Counted:
        return Counted(n=n)

    def evolve(self, event: Counted) -> Tower:
        return replace(self, counted=self.counted + 1)


@event("egg.laid")
class Laid:
    until: datetime


@event("egg.taken")
class Taken:
    pass


@process("egg")
class Egg:
    """Waits for its time."""

    until: datetime | None = None
    taken: bool = False

    def lay(self, until: datetime) -> Laid | None:
        return None if self.until else Laid(until=until)

    def take(self) -> Taken:
        return Taken()

    def step(self) -> Step[Egg, Taken] | None:
        return None

    def deadline(self) -> Deadline[Egg, Taken] | None:
        return at(self.until, Egg.take) if self.until is not None and not self.taken else None

    def evolve(self, event: Laid | Taken) -> Egg:
        return replace(self, until=event.until) if isinstance(event, Laid) else replace(self, taken=True)


class Outside:
    """Where the handler's calls are written, in one write each."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._chance = random.Random()

    def call(self, bell: str, n: int, key: str) -> None:
        os.write(self._file, f"{bell} {n} {key}\n".encode())
        if self._chance.random() < FAILS:
            raise RuntimeError("at random")


@reactor("echo", retry=Retry(tries=50, first_s=0.01, most_s=0.1))
async def echo(event: Recorded[Rung], to: Reaction[Outside]) -> None:
    to.deps.call(event.aggregate_id, event.data.n, to.key)
    await to.repository(Tower).execute(event.aggregate_id, Tower.count, event.data.n)


@asynccontextmanager
async def outside() -> AsyncGenerator[Outside]:
    yield Outside(sys.argv[2])


def bells_of(partitions: int) -> App:
    """The app, with its reactor divided into so many."""
    reactors = [replace(echo, partitions=partitions)]
    return App("bells", aggregates=[Bell, Tower], processes=[Egg], reactors=reactors, deps=outside)


bells = bells_of(int(os.environ.get("BELLS_PARTITIONS", "1")))


async def main(server: str, lease_s: float) -> None:
    """Work until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_workers(
        bells,
        Settings(servers=tuple(server.split(","))),
        stop=stop,
        on_ready=lambda: print("ready", flush=True),  # noqa: T201
        options=WorkerOptions(lease_s=lease_s, poll_s=0.2),
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main(sys.argv[1], float(sys.argv[3])))
