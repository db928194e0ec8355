"""Run the real program as a process: what it prints, how it ends, and an app for it to work on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests import forked
from tests.logs import fresh_name

BANK = Path(__file__).parents[2] / "examples" / "demo_bank.py"


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status and output of a command that ran."""

    status: int
    out: str
    err: str

    def is_one_paragraph(self) -> bool:
        """Return whether stderr is one paragraph of at most 80 columns (but for long words), and no traceback."""
        lines = self.err.rstrip("\n").split("\n")
        return "Traceback" not in self.err and all(line and (len(line) <= 80 or " " not in line) for line in lines)

    def message(self) -> str:
        """Return the paragraph without its line breaks."""
        return " ".join(self.err.split())


@dataclass(frozen=True, slots=True)
class Program:
    """Runs `eventjet` in a folder, with an environment that holds nothing of this process's EVENTJET_*."""

    folder: Path
    environ: Mapping[str, str]

    def __call__(self, *arguments: str, without: tuple[str, ...] = (), timeout_s: float = 100, **more: str) -> Ended:
        """`without`: top-level modules that cannot be imported, as if they were not installed."""
        environ = {**self.environ, **more}
        if not without:
            done = forked.run("eventjet.cli", arguments, folder=self.folder, environ=environ, timeout_s=timeout_s)
            return Ended(done.returncode, done.stdout, done.stderr)
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ABSENT.replace("ABSENT", repr(without)), *arguments],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """Start the program as a process of its own session and a new interpreter, its output in pipes."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "eventjet.cli", *arguments],
            cwd=self.folder,
            env={**self.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


_ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from eventjet.cli.main import run
run()
"""


def clean_environ() -> dict[str, str]:
    """Return this process's environment without the variables that steer eventjet, at 80 columns."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
    return {**inherited, "COLUMNS": "80"}


@pytest.fixture
def bank(tmp_path: Path, eventjet_nats: NatsServer) -> Program:
    """A program in a folder with `bank.py`, a log of its own on the session's server, and a SQLite file."""
    name = fresh_name("bank")
    source = BANK.read_text(encoding="utf-8").replace('App("bank"', f'App("{name}"')
    (tmp_path / "bank.py").write_text(source, encoding="utf-8")
    environ = {
        **clean_environ(),
        "EVENTJET_APP": "bank:bank",
        "EVENTJET_SERVERS": eventjet_nats.url,
        "EVENTJET_DATABASE": f"sqlite:///{tmp_path / 'read.db'}",
    }
    return Program(tmp_path, environ)


@pytest.fixture
def empty(tmp_path: Path) -> Program:
    """A program in an empty folder, with no app, no server and no database named."""
    return Program(tmp_path, clean_environ())


@pytest.fixture
def ended_processes() -> Iterator[Callable[[subprocess.Popen[str]], None]]:
    """A function that has a process killed after the test, whatever happened."""
    processes: list[subprocess.Popen[str]] = []
    yield processes.append
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
