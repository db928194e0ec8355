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
_POLL_S = 0.01
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
    told = json.loads(_run(command).splitlines()[-1])
    startup_s = time.monotonic() - started - told["wall_s"]
    return Lap(told["count"], told["count"], told["wall_s"], told["cpu_s"], startup_s)


def python(module: str, *arguments: str, executable: str = sys.executable) -> list[str]:
    return [executable, "-m", f"benchmarks.subjects.{module}", *arguments]


def worker_lap(server: str, database: str, count: int) -> Lap:
    """`eventjet worker`, from the first look at its position once it says it is ready until the last is committed."""
    started = time.monotonic()
    settings = {"EVENTJET_APP": APP, "EVENTJET_SERVERS": server, "EVENTJET_DATABASE": database}
    process = subprocess.Popen(
        [sys.executable, "-m", "eventjet.cli", "worker"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**_environment(), **settings},
    )
    try:
        told = _until_ready(process)
        with _position(database) as position:
            first, ready, ready_cpu_s = position(), time.monotonic(), _cpu_s(process.pid)
            deadline = time.monotonic() + _LIMIT_S
            while (at := position()) < count:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the worker stopped at position {at} of {count}; it had said {told}")
                time.sleep(_POLL_S)
        ended = time.monotonic()
        cpu_s = _cpu_s(process.pid) - ready_cpu_s
        return Lap(at, at - first, ended - ready, cpu_s, ready - started, _memory_mb(process.pid))
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _until_ready(process: subprocess.Popen[str]) -> list[str]:
    """What it says up to and including that it is ready."""
    assert process.stderr is not None
    told: list[str] = []
    for line in process.stderr:
        told.append(line.rstrip())
        if line.startswith("ready:"):
            return told
    raise RuntimeError(f"the worker ended before it was ready: {' '.join(told)}")


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


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment(), timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        shown = " ".join(part for part in command if "://" not in part)
        raise RuntimeError(f"{shown} ended with status {done.returncode}; see above")
    return done.stdout


def _environment() -> dict[str, str]:
    """This folder first, so that a peer's own environment finds the programs here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (most,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(most.split()[1]) / 1024
