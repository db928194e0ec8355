"""NATS, PostgreSQL or one of its backends is killed under a rebuild. The live table is always whole."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.sql.database import Database
from tests.faults.rebuilding import RebuildProcess, Stage, stage

KILLS = int(os.environ.get("EVENTJET_TEST_REBUILD_KILLS", "0"))
"""The number for each server and backend; by default at one place each."""
READING = ("rebuild.batch_read", "rebuild.engine_started", "rebuild.loaded", "rebuild.indexed", "rebuild.before_swap")
LOADING = ("rebuild.rows_copied", "rebuild.inside_swap", "rebuild.part_begun", "rebuild.loaded", "rebuild.keys_made")
IN_A_SESSION = tuple(name for name in LOADING if name != "rebuild.loaded")
"""The places of `LOADING` at which the run has a session with the database."""
STATUSES = (0, 1, 3)
"""Done; could not be finished; a component was away."""


@contextmanager
def own_stage(kind: str, folder: Path) -> Generator[tuple[Stage, NatsServer, PostgresServer | None]]:
    """Make a stage on servers of its own, since they are killed."""
    with ExitStack() as stack:
        nats = stack.enter_context(NatsServer(sync_interval="1m"))
        postgres = stack.enter_context(PostgresServer()) if kind == "postgresql" else None
        database = f"sqlite:///{folder}/read.db" if postgres is None else postgres.url
        yield stack.enter_context(stage(nats.url, database, folder)), nats, postgres


def some(names: tuple[str, ...], first: int = 1) -> list[str]:
    """Return the places to be at when it happens."""
    return [names[number % len(names)] for number in range(KILLS)] if KILLS else list(names[:first])


def goes_on(run: RebuildProcess) -> int:
    """Let what was stopped go on; return its status, with an error of one paragraph at most."""
    for pid in run.stopped():
        os.kill(pid, signal.SIGCONT)
    status = run.ended()
    log = run.logged()
    assert status in STATUSES, log
    assert "Traceback" not in log, log
    return status


def summed(name: str, ends: Counter[int]) -> str:
    return f"{name} {ends.total()} times under a rebuild: {ends[0]} finished, {ends.total() - ends[0]} said why not"


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
async def test_a_rebuild_outlives_a_killed_nats_server_or_leaves_the_live_table_whole(
    kind: str, tmp_path: Path
) -> None:
    ends: Counter[int] = Counter()
    with own_stage(kind, tmp_path) as (scene, nats, _):
        for name in some(READING, first=1 + (kind == "postgresql")):
            with RebuildProcess(scene, at=name, action="stop") as run:
                run.await_stop()
                nats.kill()
                nats.start()
                ends[goes_on(run)] += 1
            await scene.settle()
        scene.summary.append(summed("NATS killed (SIGKILL) and started again", ends))
    assert ends[0] > 0


@pytest.mark.slow
@pytest.mark.timeout(600 + 120 * KILLS)
async def test_killed_postgresql_and_killed_backends_end_a_rebuild_and_nothing_else(tmp_path: Path) -> None:
    ends: dict[str, Counter[int]] = {"terminated": Counter(), "killed": Counter(), "server": Counter()}
    with own_stage("postgresql", tmp_path) as (scene, _, postgres):
        assert postgres is not None
        for how, statuses in ends.items():
            for name in some(LOADING if how == "server" else IN_A_SESSION):
                with RebuildProcess(scene, at=name, action="stop") as run:
                    run.await_stop()
                    if how == "server":
                        postgres.kill()
                        postgres.start()
                    else:
                        end_backends(scene, kill=how == "killed")
                    statuses[goes_on(run)] += 1
                scene.database_is_up()
                await scene.settle()
        scene.summary += [
            summed("backends of the run ended (pg_terminate_backend)", ends["terminated"]),
            summed("a backend of the run killed (SIGKILL)", ends["killed"]),
            summed("PostgreSQL killed (SIGKILL) and started again", ends["server"]),
        ]
    assert all(seen.total() == (KILLS or 1) for seen in ends.values())


def end_backends(scene: Stage, *, kill: bool) -> None:
    """End the sessions of the run."""
    query = "select pid from pg_stat_activity where application_name ~ '^eventjet rebuild( [0-9a-f]{16})?$' order by 1"
    with Database(scene.ledger.settings.database).sync_engine("fault tests").begin() as connection:
        pids = list(connection.scalars(text(query)))
        assert pids, "no session of the run"
        if not kill:
            for pid in pids:
                connection.execute(text("select pg_terminate_backend(:pid)"), {"pid": pid})
    if kill:
        # The server then ends all its sessions and recovers, as after a crash.
        os.kill(pids[0], signal.SIGKILL)
