"""Clocks that jump, and steady load."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from tests.faults.processes import await_it
from tests.faults.trials.trial import Trial, scenario
from tests.forked import ForkedWorker
from tests.tables import execute

TAKES_OVER_S = 300.0
"""How long the read models may make no progress. On an idle machine a takeover takes six seconds."""
GROWTH_MAX = 1.3
"""How much more memory a process may use than after a third of the time, as a factor."""
SPARE_MB = 16.0
JUMPS_S = (3_600, -3_600, 86_400, 30, -86_400)


@scenario("clock-jumps")
def clock_jumps(trial: Trial) -> None:
    """The clock of the read models' PostgreSQL jumps; then the worker dies, and the one that stands by takes over."""
    server = trial.stack.enter_context(NatsServer())
    postgres = trial.stack.enter_context(PostgresServer(durable=False))
    database = postgres.create_database(f"clocks_{uuid4().hex[:8]}")
    name = database.rpartition("/")[2].partition("?")[0]
    execute(
        database,
        "create schema shifted",
        "create table shifted.jump (seconds float8 not null)",
        "insert into shifted.jump values (0)",
        "create function shifted.clock_timestamp() returns timestamptz language sql volatile as "
        "'select pg_catalog.clock_timestamp() + make_interval(secs => (select seconds from shifted.jump))'",
        f'alter database "{name}" set search_path = shifted, pg_catalog, public',
    )
    with trial.running([server.url], database, pause_s=0.0) as run:
        workers = [run.worker]
        for number in range(trial.options.rounds):
            workers.append(run.another_worker())
            trial.wait()
            jump = JUMPS_S[number % len(JUMPS_S)]
            execute(database, f"update shifted.jump set seconds = seconds + {jump}")
            # Long enough for the lease to be renewed by the new clock, or not to be.
            trial.wait(number % 3)
            workers.pop(0).process.kill()
            before = run.log_position()
            took_s = await_it(lambda before=before: run.is_at(before), lambda: "a takeover", TAKES_OVER_S, run.reached)
            trial.note(f"{jump:+,} s: taken over after {took_s:.1f} s")


@scenario("steady-load")
def steady_load(trial: Trial) -> None:
    """Commands for ten minutes (`MINUTES`); what a client, a worker and the server hold is read each minute."""
    server = trial.stack.enter_context(NatsServer())
    with trial.running([server.url], pause_s=0.05, entities=2_000, writers=4) as run, ExitStack() as stack:
        client = stack.enter_context(ForkedWorker("tests.faults.trials.client", [server.url, run.ledger.name])).ready()
        pids = {"client": client.process.pid, "worker": run.worker.pid, "server": server.pid}
        readings: dict[str, list[float]] = {name: [] for name in pids}
        every_s = min(60.0, trial.options.minutes * 60 / 6)
        ends = time.monotonic() + trial.options.minutes * 60
        while time.monotonic() < ends:
            time.sleep(every_s)
            for name, pid in pids.items():
                readings[name].append(resident_mb(pid))
    for name, sizes in readings.items():
        first, last = sizes[len(sizes) // 3], sizes[-1]
        trial.note(f"{name}: {', '.join(f'{size:.0f}' for size in sizes)} MB, one reading each {every_s:.0f} s")
        # The server's own index of subjects grows with the log.
        assert name == "server" or last <= first * GROWTH_MAX + SPARE_MB, f"the {name} holds more and more: {sizes}"


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
