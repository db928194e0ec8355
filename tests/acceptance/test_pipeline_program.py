"""`eventjet pipeline` with a script in place of Spark's program: how it ends, and what it says of an error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.acceptance.conftest import clean_environ

pytestmark = pytest.mark.timeout(1_500)

ENDS_S = 200.0
LATE = "Caused by: java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back"
OWN = "eventjet.errors.store.HistoryBroken: The history of shop is broken."
PORT = "java.net.BindException: Failed to bind to address 0.0.0.0/0.0.0.0:15002: Service starting retries failed"
NAME = "NameError: name app is not defined"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a pipeline and its tables."""
    (tmp_path / "pipeline").mkdir()
    storage = (tmp_path / "pipeline/storage").as_uri()
    (tmp_path / "pipeline/spark-pipeline.yml").write_text(f"name: shop\nstorage: {storage}\n")
    return tmp_path


def environ(project: Path, script: str) -> dict[str, str]:
    """Return an environment in which Spark's program is this script."""
    program = project / "spark/bin/spark-pipelines"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return {**clean_environ(), "SPARK_HOME": str(project / "spark")}


def run(project: Path, script: str) -> tuple[int, str]:
    """Return the exit status, and standard error in one line."""
    ended = forked.run(
        "eventjet.cli", ("pipeline",), folder=project, environ=environ(project, script), timeout_s=ENDS_S
    )
    return ended.returncode, " ".join(ended.stderr.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_that_spark_has_started(project: Path, number: signal.Signals) -> None:
    # Its output ends when the last process that writes to it has ended.
    command, script = (
        [sys.executable, "-m", "eventjet.cli", "pipeline"],
        'trap "" INT HUP; echo begun; sleep 1000 & wait',
    )
    # A program that ignores a signal, as `nohup` does, passes that on to the programs it starts.
    handled = signal.signal(number, signal.default_int_handler)
    with subprocess.Popen(
        command,
        cwd=project,
        env=environ(project, script),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        signal.signal(number, handled)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=ENDS_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, errors.startswith("Interrupted. The next run goes on")) == (130, True)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([LATE], "which no setting changes"),
        ([OWN, LATE], "The history of shop is broken."),
        ([NAME, OWN], "The history of shop is broken."),
        ([PORT, NAME], "Another pipeline runs on this machine"),
        (["Traceback (most recent call last):", NAME, "  at java.base/Thread.run"], "name app is not defined"),
    ],
)
def test_the_reason_of_an_error_is_its_last_words(project: Path, lines: list[str], says: str) -> None:
    script = "; ".join(f"echo '{line}'" for line in lines)
    status, message = run(project, f"{script}; exit 1")
    assert (status, message.startswith("eventjet: The pipeline has not finished. "), says in message) == (1, True, True)


@pytest.mark.parametrize("corrected", [(), ("spark-pipeline.yml",)])
def test_a_copy_that_names_the_tables_of_the_first_project_is_refused(
    project: Path, corrected: tuple[str, ...]
) -> None:
    settings = project / "pipeline/conf/spark-defaults.conf"
    settings.parent.mkdir()
    settings.write_text(f"spark.sql.warehouse.dir {(project / 'pipeline/warehouse').as_uri()}\n")
    assert run(project, "exit 0") == (0, "")
    copied = project / "copied"
    shutil.copytree(project / "pipeline", copied / "pipeline")
    for name in corrected:
        file = copied / "pipeline" / name
        file.write_text(file.read_text().replace(str(project), str(copied)))
    status, message = run(copied, "touch has_run")
    assert (status, f"names tables in {project}/pipeline" in message) == (2, True)
    assert "conf/spark-defaults.conf" in message
    assert not (copied / "has_run").exists()


def test_a_run_in_the_pipelines_own_folder_is_pointed_to_the_one_above(project: Path) -> None:
    ended = forked.run(
        "eventjet.cli", ("pipeline",), folder=project / "pipeline", environ=clean_environ(), timeout_s=ENDS_S
    )
    assert (ended.returncode, "the one above" in " ".join(ended.stderr.split())) == (2, True)
