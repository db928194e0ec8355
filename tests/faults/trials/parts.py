"""The parts of `make faults` that pytest runs: workers, rebuilds, archives and imports that are killed and cut off.

Their choices have seeds of their own; the amount of work is set by `EVENTJET_TEST_*`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.faults.trials.trial import Trial, scenario

ROOT = Path(__file__).parents[3]
ELSEWHERE = (
    "tests/integration/test_worker_takeover.py",
    "tests/integration/test_unknown_outcomes.py",
    "tests/integration/test_hostile_ids.py",
    "tests/integration/test_archive_killed.py",
    "tests/integration/test_archive_law.py",
    "tests/integration/test_import_kills.py",
    "tests/integration/test_lake_killed.py",
    "tests/integration/test_lake_read_models.py",
    "tests/integration/test_uploads_killed.py",
    "tests/acceptance/test_restore.py",
    "tests/acceptance/test_bank_on_three_engines.py",
    "tests/integration/test_spark_rebuild.py",
    "tests/integration/test_cluster_connect.py",
    "tests/integration/test_cluster_standalone.py",
    "tests/integration/test_spark_frames.py",
    "tests/integration/test_spark_source.py",
    "tests/integration/test_snapshots_build.py",
)
PART_S = 4 * 3600.0
TEST_S = 2 * 3600.0
"""Timeout of each test, for one that hangs: beside other parts every test takes several times as long."""
FIGURE = re.compile(r"\d")
"""Lines that tests print are figures."""


def _listed(path: str) -> None:
    def part(trial: Trial) -> None:
        command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", path]
        environ = {**os.environ, "EVENTJET_TEST_TIMEOUT_S": f"{TEST_S}"}
        with (trial.folder / "said").open("w+", encoding="utf-8") as output:
            # Into a file: a process that a part leaves running would keep a pipe open, and this would wait for it.
            running = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = running.wait(PART_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
            output.seek(0)
            lines = [line.strip().lstrip(".") for line in output]
        assert status == 0, "\n".join(lines[-80:])
        for line in lines:
            if FIGURE.search(line):
                trial.note(line)

    part.__doc__ = f"`pytest {path}`"
    scenario(Path(path).stem)(part)


for _path in sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/faults/test_*.py")):
    _listed(_path)
for _path in ELSEWHERE:
    _listed(_path)
