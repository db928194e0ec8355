"""Ctrl-C at every step of a rebuild, on both engines: it ends within about a second, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

from eventjet import failpoints
from eventjet.dev.nats import NatsServer
from eventjet.sql.database import Database
from tests.faults.processes import await_it
from tests.faults.rebuilding import RebuildProcess, Stage, stage
from tests.integration.rebuild_log import remains

EVERY = bool(os.environ.get("EVENTJET_TEST_REBUILD_KILLS"))
"""Whether every place is tried on each database, and not some on each."""
PLACES = tuple(name for name in failpoints.NAMES if name.startswith(("rebuild.", "verify.")))
INTERRUPTED = 130
SOON_S = 1.0
"""The bound in processor time: on a busy machine the clock says little."""
LATE_S = 60.0
SPARK_STARTS_S = 240.0


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used; 0 when it is gone."""
    try:
        spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


def interrupted(run: RebuildProcess, scene: Stage) -> tuple[float, float]:
    """Check how it ended; return the seconds since its failpoint, and those of them on a processor."""
    await_it(run.fired.exists, run.logged)
    began, first = run.fired.stat().st_mtime, cpu_s(run.process.pid)
    last = first
    while run.process.poll() is None and time.time() - began < LATE_S:
        with suppress(OSError, IndexError):
            last = max(last, cpu_s(run.process.pid))
        time.sleep(0.005)
    took_s = time.time() - began
    assert run.ended(0.1) == INTERRUPTED, run.logged()
    assert "Interrupted." in run.logged()
    assert "Traceback" not in run.logged()
    await_it(lambda: run.others() == {}, lambda: f"{run.others()}")
    assert remains(Database(scene.ledger.settings.database)) == []
    return took_s, last - first


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ctrl_c_ends_a_run_at_any_step_within_a_second(
    eventjet_nats: NatsServer, database: str, tmp_path: Path
) -> None:
    took: dict[str, tuple[float, float]] = {}
    with stage(eventjet_nats.url, database, tmp_path) as scene:
        places = [name for name in PLACES if not (scene.is_sqlite and name == "rebuild.keys_made")]
        for name in places if EVERY else places[1 + 2 * scene.is_sqlite :: 4]:
            command = "verify" if name.startswith("verify.") else "rebuild"
            with RebuildProcess(scene, at=name, action="interrupt", command=command) as run:
                took[name] = interrupted(run, scene)
        await scene.settle()
        slowest = max(took, key=lambda name: took[name])
        middle_s, busy_s = (median(column) for column in zip(*took.values(), strict=True))
        scene.summary.append(
            f"Ctrl-C (SIGINT) at {len(took)} places: over after {middle_s:.2f} s in the middle, {busy_s:.2f} s of them "
            f"on a processor; {took[slowest][0]:.2f} s at most (at {slowest})"
        )
    assert busy_s < SOON_S


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ctrl_c_does_not_wait_for_a_silent_server(eventjet_database: str, tmp_path: Path) -> None:
    with (
        NatsServer(sync_interval="1m") as nats,
        stage(nats.url, eventjet_database, tmp_path, rate=1.0) as scene,
    ):
        with RebuildProcess(scene, at="rebuild.batch_read", action="stop") as run:
            run.await_stop()
            nats.pause()
            os.kill(run.process.pid, signal.SIGCONT)
            with pytest.raises(AssertionError, match="did not end"):
                run.ended(1.0)
            run.process.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert run.ended(LATE_S) == INTERRUPTED, run.logged()
            took_s = time.monotonic() - began
            nats.resume()
        scene.summary.append(f"Ctrl-C while NATS was silent (SIGSTOP): over after {took_s:.2f} s")
        await scene.settle()
    assert took_s < 25.0  # reads have patience for 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("place", ["java"] + EVERY * ["rebuild.part_begun", "task.begun"])
async def test_a_signal_ends_spark_too(
    place: str,
    number: signal.Signals,
    eventjet_nats: NatsServer,
    eventjet_database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with stage(eventjet_nats.url, eventjet_database, tmp_path) as scene:
        armed = {} if place == "java" else {"at": place, "action": "tell"}
        with RebuildProcess(scene, "--master", "local[2]", **armed) as run:
            await_it(lambda: bool(run.others()) if place == "java" else run.fired.exists(), run.logged, SPARK_STARTS_S)
            run.process.send_signal(number)
            began = time.monotonic()
            assert run.ended(LATE_S) == INTERRUPTED, run.logged()
            took_s = time.monotonic() - began
            assert "Traceback" not in run.logged()
            assert list(temporary.iterdir()) == []
            await_it(lambda: run.others() == {}, lambda: str(run.others()), 300.0)
        assert remains(Database(scene.ledger.settings.database)) == []
        scene.summary.append(f"Spark, {number.name} at {place}: over after {took_s:.2f} s")
        await scene.settle()
