"""Servers killed and databases blocked while workers run and events arrive: the workers recover by themselves."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.sql.sqlite_connections import BUSY_TIMEOUT_S
from tests.faults.audit import Audit
from tests.faults.processes import WorkerProcess, await_it
from tests.faults.scene import Scene, scene

OUTAGES = int(os.environ.get("EVENTJET_TEST_OUTAGES", "2"))
"""The number of each kind, on each database."""
RATE = 200.0
RECOVERS_S = 300.0
LEASE_S = 1.0


@contextmanager
def servers(kind: str, folder: Path) -> Generator[tuple[NatsServer, PostgresServer | None, str]]:
    """Start servers of this test's own, since they are killed."""
    with ExitStack() as stack:
        nats = stack.enter_context(NatsServer())
        if kind == "sqlite":
            yield nats, None, f"sqlite:///{folder}/read.db"
        else:
            postgres = stack.enter_context(PostgresServer())
            yield nats, postgres, postgres.url


def blocked(path: str, seconds: float) -> None:
    """Lock SQLite for a while, as a stopped writer or a backup might."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("begin immediate")
        time.sleep(seconds)
        connection.execute("rollback")
    finally:
        connection.close()


class Weather:
    """Outages, each followed by a recovery without help."""

    def __init__(self, stage: Scene, recovers_s: float) -> None:
        self.recovered_s: dict[str, list[float]] = {}
        self._stage = stage
        self._recovers_s = recovers_s

    def strike(self, name: str, outage: Callable[[], None]) -> None:
        """Have events arrive before, during and after; both projections must apply some that came after it."""
        feed = self._stage.feed
        before = feed.stored
        await_it(lambda: feed.stored > before + 20, lambda: "events to arrive")
        outage()
        began = time.monotonic()
        self._stage.caught_up(feed.stored + 20, self._recovers_s)
        self.recovered_s.setdefault(name, []).append(time.monotonic() - began)
        self._stage.check()


@pytest.mark.slow
@pytest.mark.timeout(600 + 240 * OUTAGES)
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_workers_recover_from_killed_servers(kind: str, tmp_path: Path, processes: ExitStack) -> None:
    chance = random.Random(9)
    with (
        servers(kind, tmp_path) as (nats, postgres, database),
        scene(nats.url, database, tmp_path) as stage,
    ):
        recovers_s = RECOVERS_S
        weather = Weather(stage, recovers_s)
        stage.feed.rate = RATE
        stage.feed.allow(1_000_000)
        workers = [
            processes.enter_context(WorkerProcess(stage.ledger, tmp_path, lease_s=LEASE_S)).ready() for _ in range(2)
        ]

        def killed(server: NatsServer | PostgresServer) -> Callable[[], None]:
            def outage() -> None:
                server.kill()
                time.sleep(chance.random())
                server.start()

            return outage

        for round_ in range(OUTAGES):
            weather.strike("NATS killed (SIGKILL)", killed(nats))
            if postgres is not None:
                weather.strike("PostgreSQL killed (SIGKILL, every process)", killed(postgres))
            else:
                # The longest one outlasts a writer's wait for the lock.
                locked_s = BUSY_TIMEOUT_S + 2 if round_ == 0 and OUTAGES >= 20 else 0.5 + 2 * chance.random()
                outage = lambda locked_s=locked_s: blocked(str(tmp_path / "read.db"), locked_s)  # noqa: E731
                weather.strike("SQLite held by another writer", outage)
        stage.feed.end()
        verdict = stage.finish(max(60.0, recovers_s))
        audit = Audit.read(database)
        for name, times in weather.recovered_s.items():
            stage.say(
                f"{name} {len(times)} times while events arrived: caught up again after {median(times):.1f} s in the "
                f"middle, {max(times):.1f} s at most"
            )
        stage.say(f"{verdict}; {audit}; rows right at each of {stage.checks} looks; {stage.feed.resent} appends resent")
        for worker in workers:
            assert worker.process.poll() is None, worker.logged()
        assert verdict.right
        assert not audit.zombies
        assert not audit.breaks
        assert all(len(times) == OUTAGES for times in weather.recovered_s.values())
