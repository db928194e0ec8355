"""One lap of one subject, in a process of its own, measured and checked."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.readmodel import libpq, path_of

ROOT = Path(__file__).parent.parent
APP = "benchmarks.bank:bank"
_POLL_S = 0.05
_LIMIT_S = 600.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Lap:
    """What one lap took."""

    last: int
    """Events it had taken at the end."""
    count: int
    """Those of them that were measured."""
    wall_s: float
    client_cpu_s: float
    startup_s: float
    """Before that: interpreter, imports, connections."""
    memory_mb: float | None = None
    """The client's most, where it was looked at."""


def lap(command: list[str]) -> Lap:
    """Run a program that prints what `Clock` prints."""
    started = time.monotonic()
    result = result_of(command)
    startup_s = time.monotonic() - started - result["wall_s"]
    count = int(result["count"])
    return Lap(count, count, result["wall_s"], result["cpu_s"], startup_s)


def result_of(command: list[str]) -> dict[str, float]:
    """Run a program, and return the JSON of its last line."""
    result: dict[str, float] = json.loads(last_line(command))
    return result


def last_line(command: list[str]) -> str:
    """Run a program, and return the last line it prints."""
    return _run(command, _environment()).splitlines()[-1]


def worker_lap(server: str, database: str, count: int, app: str = APP) -> Lap:
    """`eventjet worker`, from the first look at its position once it says it is ready until the last is committed."""
    started = time.monotonic()
    with running_worker(server, database, app) as process, _position(database) as position:
        first, ready, ready_cpu_s = position(), time.monotonic(), _cpu_s(process.pid)
        deadline = time.monotonic() + _LIMIT_S
        while (at := position()) < count:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the worker stopped at position {at} of {count}")
            time.sleep(_POLL_S)
        ended = time.monotonic()
        cpu_s = _cpu_s(process.pid) - ready_cpu_s
        return Lap(at, at - first, ended - ready, cpu_s, ready - started, _memory_mb(process.pid))


@contextmanager
def running_worker(server: str, database: str, app: str = APP) -> Generator[subprocess.Popen[str]]:
    """`eventjet worker`, from when it says it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "eventjet.cli", "worker"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment_of(server, database, app),
    )
    try:
        _await_ready(process)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def initialise(server: str, database: str) -> None:
    """`eventjet init`."""
    _run([sys.executable, "-m", "eventjet.cli", "init"], environment_of(server, database))


def environment_of(server: str, database: str, app: str = APP) -> dict[str, str]:
    """Return the environment of a program of eventjet."""
    return {**_environment(), "EVENTJET_APP": app, "EVENTJET_SERVERS": server, "EVENTJET_DATABASE": database}


def _environment() -> dict[str, str]:
    """Return this process's environment with this folder first, so that a peer's own Python finds the programs here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line.rstrip())
        if line.startswith("ready:"):
            return
    raise RuntimeError(f"the worker ended before it was ready: {' '.join(lines)}")


@contextmanager
def _position(database: str) -> Generator[Callable[[], int]]:
    """Looks at the checkpoint, at little cost to the worker."""
    query = "select position from eventjet_projection"
    if database.startswith("sqlite"):
        connection: Any = sqlite3.connect(path_of(database), isolation_level=None, timeout=30)
    else:
        connection = psycopg.connect(libpq(database), autocommit=True)
    try:
        yield lambda: (connection.execute(query).fetchone() or (0,))[0]
    finally:
        connection.close()


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        words = " ".join(part for part in command if "://" not in part)
        raise RuntimeError(f"{words} ended with status {done.returncode}; see above")
    return done.stdout


def _cpu_s(pid: int) -> float:
    """Of a process and all that it has started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended, and its parent's figures have it
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_cpu_s, _children_of(pid)))


def _children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()
        ]
    except OSError:
        return []


def _memory_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max([int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")], default=0.0)
