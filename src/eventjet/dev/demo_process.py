"""One `eventjet` command of the demo as a process of its own, which ends when the demo does."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eventjet.dev.process import Program, ServerProcess
from eventjet.errors import DemoFailed

_POLL_S = 0.1
_TAIL_BYTES = 2_000
Step = Callable[[str, int, int | None], None]
"""Told the name of a step, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended, and what it printed apart from its progress."""

    status: int
    output: str


class DemoCommand:
    """Started when it is made; `finished` or `stop` ends it."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = f"eventjet {' '.join(arguments)}"
        self._log = log
        self._read = 0
        self._rest = b""
        log.unlink(missing_ok=True)
        self._process = ServerProcess(
            Program(
                component=f"`{self.name}`",
                # Not from the current folder, where anything may lie.
                command=[sys.executable, "-P", "-m", "eventjet.cli", *arguments],
                log=log,
                grace_s=25.0,
                environ={name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
                | dict(environ),
            )
        )

    @property
    def running(self) -> bool:
        return self._process.running

    async def finished(self, timeout_s: float, step: Step | None = None) -> Finished:
        """Wait for its end; raises `DemoFailed` when that takes too long. Ends it when cancelled."""
        output: list[str] = []
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                ended = not self.running
                self._take(output, step)
                if ended:
                    return Finished(self._process.wait(0) or 0, "\n".join(output))
                if time.monotonic() > deadline:
                    raise DemoFailed(f"`{self.name}`", f"it was not done within {timeout_s:g} s")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self._process.kill()
            raise

    def stop(self) -> int:
        """Ask it to end and wait for that; returns its exit status. Blocks."""
        self._process.stop()
        return self._process.wait(0) or 0

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def tail(self) -> str:
        """The end of what it printed."""
        return self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def _take(self, output: list[str], step: Step | None) -> None:
        """Read what was printed since; lines of progress go to `step`, the others to `output`."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            fresh = file.read()
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if not text.startswith("phase="):
                output.append(text)
            elif step is not None:
                values = {name: value for name, _, value in (part.partition("=") for part in text.split())}
                total = values.get("total")
                step(values["phase"], int(values["done"]), None if total is None else int(total))
