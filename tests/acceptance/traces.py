"""What a program leaves behind: processes and files, recognised by its temporary folder."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Traces:
    """A temporary folder of its own; every process that works for the program names it in arguments or environment."""

    folder: Path

    def processes(self) -> list[str]:
        """Return the command lines of the living processes."""
        mark = str(self.folder).encode()
        commands: list[str] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    arguments = (entry / "cmdline").read_bytes()
                    named = mark in arguments or mark in (entry / "environ").read_bytes()
                    if named and "Z" not in (entry / "stat").read_text().rpartition(")")[2].split()[:1]:
                        commands.append(arguments.replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    continue
        return commands

    def files(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def await_process(self, part: str, timeout_s: float) -> None:
        """Return once a process with this in its command line works for the program."""
        deadline = time.monotonic() + timeout_s
        while not any(part in command for command in self.processes()):
            assert time.monotonic() < deadline, f"no {part} within {timeout_s} s"
            time.sleep(0.05)

    def await_no_process(self, part: str, timeout_s: float) -> None:
        """Return once no process with this in its command line works for the program."""
        deadline = time.monotonic() + timeout_s
        while any(part in command for command in self.processes()):
            assert time.monotonic() < deadline, f"{part} after {timeout_s} s"
            time.sleep(0.01)

    def await_nothing(self, timeout_s: float) -> None:
        """Return once neither a process nor a file is left."""
        deadline = time.monotonic() + timeout_s
        while leftovers := (self.processes(), self.files()):
            if leftovers == ([], []):
                return
            assert time.monotonic() < deadline, leftovers
            time.sleep(0.05)


@contextmanager
def traces() -> Iterator[Traces]:
    """Make the folder directly under the temporary one, and passable: PostgreSQL may run as another user."""
    folder = Path(tempfile.mkdtemp(prefix="ejt-"))
    folder.chmod(0o755)
    try:
        yield Traces(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
