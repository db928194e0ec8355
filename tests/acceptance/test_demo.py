"""The demo does what it promises at a small size, and leaves nothing behind whenever it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.acceptance.conftest import Program
from tests.acceptance.traces import Traces, traces

SMALL = ("demo", "--accounts", "40", "--commands", "200", "--imported", "2000", "--engine", "local")
LONG = ("demo", "--accounts", "40", "--commands", "1000", "--imported", "8000")
_END_S = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Keep = Callable[[subprocess.Popen[str]], None]


@pytest.fixture
def leftovers() -> Iterator[Traces]:
    with traces() as leftovers:
        yield leftovers


def test_the_demo_finds_the_altered_row_and_no_other(empty: Program, leftovers: Traces) -> None:
    ended = empty(*SMALL, TMPDIR=str(leftovers.folder))
    assert ended.status == 0, ended.err
    lines = [line for line in ended.out.splitlines() if re.match(r"\d+ difference", line)]
    assert [line.split(",")[0].split(" in ")[0] for line in lines] == [
        "0 differences after the rebuild (local)",
        "1 difference after old-00000 was altered by hand",
        "0 differences after the next rebuild (local)",
    ]
    assert lines[1].endswith(": old-00000")
    assert (leftovers.processes(), leftovers.files()) == ([], [])


PHASES = ("nats-server", "opened", "eventjet.cli worker", "eventjet.cli rebuild")


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupted_demo_leaves_no_process_and_no_folder(
    empty: Program, leftovers: Traces, phase: str, ended_processes: Keep
) -> None:
    process = empty.start(*LONG, "--engine", "local", TMPDIR=str(leftovers.folder))
    ended_processes(process)
    if phase != "opened":
        leftovers.await_process(phase, 60)
    else:
        assert process.stdout is not None
        assert any("NATS and PostgreSQL run" in line for line in process.stdout)
        leftovers.await_process("eventjet.cli init", 60)
        leftovers.await_no_process("eventjet.cli init", 60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert (leftovers.processes(), leftovers.files()) == ([], [])


def test_a_terminated_demo_leaves_nothing_either(empty: Program, leftovers: Traces, ended_processes: Keep) -> None:
    process = empty.start(*SMALL, TMPDIR=str(leftovers.folder))
    ended_processes(process)
    leftovers.await_process("eventjet.cli worker", 60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 130, errors
    assert (leftovers.processes(), leftovers.files()) == ([], [])


def test_impatience_does_not_cut_the_clean_up_short(empty: Program, leftovers: Traces, ended_processes: Keep) -> None:
    process = empty.start(*SMALL, TMPDIR=str(leftovers.folder))
    ended_processes(process)
    leftovers.await_process("eventjet.cli worker", 60)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 130, errors
    assert (leftovers.processes(), leftovers.files()) == ([], [])


def test_even_a_killed_demo_leaves_nothing_for_long(empty: Program, leftovers: Traces, ended_processes: Keep) -> None:
    process = empty.start(*SMALL, TMPDIR=str(leftovers.folder))
    ended_processes(process)
    leftovers.await_process("eventjet.cli worker", 60)
    process.kill()
    process.communicate(timeout=_END_S)
    leftovers.await_nothing(_END_S)


def test_a_demo_interrupted_while_spark_works_leaves_no_jvm(
    empty: Program, leftovers: Traces, ended_processes: Keep
) -> None:
    process = empty.start(*LONG, TMPDIR=str(leftovers.folder))
    ended_processes(process)
    leftovers.await_process("java", 120)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 130, errors
    assert (leftovers.processes(), leftovers.files()) == ([], [])
