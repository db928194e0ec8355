"""An app that acts and can be broken from outside, and the program in its folder."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eventjet import App
from eventjet.app import load_app
from tests.acceptance.conftest import Program

BOUND_S = 120.0
SOURCE = """
from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from eventjet import App, Deadline, Incoming, Reaction, Recorded, Retry, Step, after, aggregate, at, do, event, inbox
from eventjet import process, reactor

BROKEN = Path(__file__).with_name("broken")


@event("box.filled")
class Filled:
    n: int


@aggregate("box")
class Box:
    def fill(self, n: int) -> Filled:
        return Filled(n=n)

    def take(self, weight: Decimal) -> Filled:
        if BROKEN.exists():
            raise LookupError("no box")
        return Filled(n=int(weight))

    def evolve(self, event: Filled) -> Box:
        return self


@reactor("letters", retry=Retry(tries=TRIES, first_s=0.01))
async def letters(event: Recorded[Filled], to: Reaction[object]) -> None:
    if BROKEN.exists():
        raise ValueError("no stamp")


@inbox("post", stream=NAME + "_post", subject=NAME + "_post.>", retry=Retry(tries=1, first_s=0.01))
async def post(message: Incoming[dict], to: Reaction[object]) -> None:
    raise ValueError("no door")


@event("trip.begun")
class Begun:
    name: str
    at: datetime
    weight: Decimal


@event("trip.ended")
class Ended:
    pass


@process("trip")
class Trip:
    name: str = ""
    at: datetime = datetime(2030, 1, 1, tzinfo=UTC)
    weight: Decimal = Decimal(0)

    def begin(self, name: str) -> Begun:
        return Begun(name=name, at=self.at, weight=Decimal("2.50"))

    def end(self) -> Ended:
        return Ended()

    def give_up(self) -> Ended:
        return Ended()

    def step(self) -> Step[Trip, Ended] | None:
        if self.name == "raise":
            raise KeyError("oops")
        if self.name == "step":
            return do(Box, "b", Box.take, self.weight).then(Trip.end)
        return None

    def deadline(self) -> list[Deadline[Trip, Ended]]:
        if self.name in ("", "soon"):
            return [after(timedelta(seconds=1), Trip.end)] if self.name else []
        return [at(datetime(2090, 1, 1, tzinfo=UTC), Trip.give_up), at(datetime(2080, 1, 1, tzinfo=UTC), Trip.end)]

    def evolve(self, event: Begun | Ended) -> Trip:
        if isinstance(event, Ended):
            return replace(self, name="")
        if event.name == "unfolded" and BROKEN.exists():
            raise KeyError("never")
        return replace(self, name=event.name, weight=event.weight)


app = App(NAME, aggregates=[Box], PARTS)
"""


@dataclass(frozen=True, slots=True)
class Office:
    """The program in a folder with an app that can be broken, and the app in this process."""

    program: Program
    module: str
    name: str
    url: str

    def __call__(self, *arguments: str) -> Any:
        return self.program(*arguments)

    def json(self, *arguments: str, status: int = 0) -> Any:
        done = self.program(*arguments, "--json")
        assert done.status == status, done.err
        return json.loads(done.out)

    def declare(self, parts: str, *, tries: int = 1) -> None:
        """Write the app's module."""
        text = SOURCE.replace("NAME", repr(self.name)).replace("PARTS", parts).replace("TRIES", str(tries))
        (self.program.folder / f"{self.module}.py").write_text(text, encoding="utf-8")

    def breaks(self) -> None:
        (self.program.folder / "broken").touch()

    def mends(self) -> None:
        (self.program.folder / "broken").unlink()

    def execute(self, kind: str, name: str, decision: str, *arguments: Any) -> int:
        """Execute a decision; return the position."""
        app: App = load_app(f"{self.module}:app", self.program.folder)
        cls: Any = next(declared for declared in [*app.aggregates, *app.processes] if declared.__name__ == kind)

        async def run() -> int:
            async with app.connect(servers=self.url) as jet:
                committed = await jet.repository(cls).execute(name, getattr(cls, decision), *arguments)
                return committed.position

        return asyncio.run(run())

    @contextmanager
    def working(self, *names: str) -> Iterator[subprocess.Popen[str]]:
        worker = self.program.start("worker", *names)
        try:
            yield worker
        finally:
            worker.kill()
            worker.communicate()

    def eventually(self, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + BOUND_S
        while not (result := look()):
            assert time.monotonic() < deadline, "it did not come to be"
            time.sleep(0.1)
        return result

    def quarantined(self, name: str, count: int) -> list[Any]:
        """Return the quarantined events, once there are so many."""

        def look() -> list[Any]:
            entries = self.json("quarantine", "list", name)
            return entries if len(entries) == count else []

        return self.eventually(look)
