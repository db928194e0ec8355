"""A process that rebuilds when it is told to, with what each part of it spends and holds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.bank import balances, bank
from benchmarks.laps import ROOT, environment_of
from benchmarks.usage import Parts, difference, peak_of
from eventjet.dev import NatsServer, PostgresServer
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings

_POLL_S = 0.01
_BULK = "ej_read_"
"""How the names of consumers begin that read a range of the log."""
_IDLE_MAX_S = 40.0
_START_S = 300
_SECONDS_A_MILLION = 600
"""How long a start and a million events may take before a run counts as hung."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """One rebuild."""

    events: int
    rows: int
    wall_s: float
    """Of the call, until the new table was swapped in."""
    session_s: float
    """What a Spark session took that had to be started."""
    phases_s: Mapping[str, float]
    cpu_s: Mapping[str, float]
    """By part."""
    peak_mb: Mapping[str, float]
    """By part."""

    @property
    def cpu_us_an_event(self) -> float:
        return sum(self.cpu_s.values()) / self.events * 1e6


class Rebuilder:
    """Keeps its process, and with it imports and Spark's session, from one rebuild to the next."""

    def __init__(self, nats: NatsServer, postgres: PostgresServer, database: str, events: int, master: str) -> None:
        self.database = database
        self._used_at = -math.inf
        self._limit_s = _START_S + _SECONDS_A_MILLION * events / 1e6
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.subjects.rebuilding", master],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment_of(nats.url, database),
        )
        self._parts = Parts(nats.pid, postgres.pid, self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it go on to the end of its input, and then end it."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def warm(self, engine: str, archive: Path | None = None) -> Rebuild:
        """As `rebuild`, after one that does not count where the last was long ago: Spark ends Python workers that idle.

        They have a minute, of which the rebuild itself takes some.
        """
        if time.monotonic() - self._used_at > _IDLE_MAX_S:
            self.rebuild(engine, archive)
        return self.rebuild(engine, archive)

    def rebuild(self, engine: str, archive: Path | None = None) -> Rebuild:
        """Raises `RuntimeError` when the process ends instead, having written why, and when it takes far too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(self._limit_s, self._process.kill)
        before = self._parts.cpu_s()
        with peak_of(self._parts) as peak:
            limit.start()
            self._process.stdin.write(f"{engine} {archive or ''}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            limit.cancel()
        if not answer:
            raise RuntimeError(f"the rebuild by {engine} ended with status {self._process.wait()}; see above")
        self._used_at = time.monotonic()
        cpu_s = difference(before, self._parts.cpu_s())
        return Rebuild(**json.loads(answer), cpu_s=cpu_s, peak_mb=peak.resident_mb)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run of `eventjet rebuild`, from nothing."""

    wall_s: float
    """From the start of its interpreter to its end."""
    first_task_s: float
    """Until the first consumer of the log was there, its own or a task's."""


def run_program(nats: NatsServer, database: str, *options: str, limit_s: float = 600.0) -> ProgramRun:
    """Raises `RuntimeError` when it does not end well."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "eventjet.cli", "rebuild", balances.name, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment_of(nats.url, database),
    )
    limit = threading.Timer(limit_s, process.kill)
    limit.start()
    try:
        first_task_s = _until_read(nats.url, process) - started
        output, _ = process.communicate()
    finally:
        limit.cancel()
        process.kill()
        process.wait()
    if process.returncode or first_task_s == math.inf:
        raise RuntimeError(f"eventjet rebuild ended with status {process.returncode}, having said: {output}")
    return ProgramRun(time.monotonic() - started, first_task_s)


def make_archive(nats: NatsServer, folder: Path, master: str, *options: str) -> None:
    """What there is of the log, sealed by `eventjet archive`; goes on with an archive that is there."""
    command = [sys.executable, "-m", "eventjet.cli", "archive", str(folder), "--master", master, *options]
    subprocess.run(command, cwd=ROOT, env=environment_of(nats.url, ""), check=True)


def _until_read(server: str, process: subprocess.Popen[str]) -> float:
    """When somebody began to read the log in bulk; seen from outside, so nothing has to be added to what is timed."""
    with NatsConnection.open(Endpoint.of(Settings(servers=(server,)))) as link:
        while process.poll() is None:
            names = link.api(f"CONSUMER.NAMES.{bank.name}")["consumers"] or ()
            if any(name.startswith(_BULK) for name in names):
                return time.monotonic()
            time.sleep(_POLL_S)
    return math.inf
