"""One `eventjet` command of the demo as a process of its own, which ends when the demo does."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from eventjet.dev.process import ServerProcess
from eventjet.dev.supervisor import Program
from eventjet.errors import DemoFailed

_POLL_S = 0.1
Step = Callable[[str, int, int | None], None]
"""Told the name of a step, how much of it is done, and of how much."""


class DemoCommand(ServerProcess):
    """Started when it is made; `finished`, `stop` or `kill` ends it."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._name = f"`eventjet {' '.join(arguments)}`"
        self._read = 0
        self._rest = b""
        # Not from the current folder, where anything may lie.
        program = Program([sys.executable, "-P", "-m", "eventjet.cli", *arguments], grace_s=25.0)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
        super().__init__(self._name, program, log, {**ours, **environ})

    async def finished(self, timeout_s: float, step: Step = lambda _name, _done, _total: None) -> tuple[int, str]:
        """Wait for its end; its exit status, and what it printed apart from its progress.

        Raises `DemoFailed` when that takes too long. Ends it when cancelled.
        """
        output: list[str] = []
        deadline = time.monotonic() + timeout_s
        try:
            while self.running:
                output += self._printed(step)
                if time.monotonic() > deadline:
                    raise DemoFailed(self._name, f"it was not done within {timeout_s:g} s")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise
        output += self._printed(step)
        return self.wait(0) or 0, "\n".join(output)

    def _printed(self, step: Step) -> Iterator[str]:
        """The lines printed since; those of progress go to `step` instead."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            fresh = log.read()
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if not text.startswith("phase="):
                yield text
                continue
            values = {name: value for name, _, value in (part.partition("=") for part in text.split())}
            total = values.get("total")
            step(values["phase"], int(values["done"]), None if total is None else int(total))
