"""No embedded server outlives its program, and none ends before its program does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

SERVERS = {
    "nats": "from eventjet.dev import NatsServer; servers = [NatsServer()]",
    "both": "from eventjet.dev import NatsServer, PostgresServer; "
    "servers = [NatsServer(), PostgresServer(durable=False)]",
}
START = "[one.start() for one in servers]"
TELL = "print(*(f'{one.pid}:{one.directory}' for one in servers), flush=True)"
WAIT = "import time; time.sleep(120)"


def run(*lines: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def servers_of(program: subprocess.Popen[str]) -> list[tuple[int, Path]]:
    """Return pid and folder of each server, as the program prints them."""
    assert program.stdout is not None
    pairs = [part.partition(":") for part in program.stdout.readline().split()]
    assert pairs
    return [(int(pid), Path(folder)) for pid, _, folder in pairs]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it ends between opening and reading.
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def finish(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate(timeout=30)


def test_a_killed_program_leaves_neither_server_nor_folder() -> None:
    program = run(SERVERS["both"], START, TELL, WAIT)
    servers = servers_of(program)
    assert all(is_alive(pid) for pid, _ in servers)
    finish(program)
    assert eventually(lambda: not any(is_alive(pid) or folder.exists() for pid, folder in servers))


def test_a_program_killed_while_its_server_is_paused_leaves_nothing() -> None:
    program = run(SERVERS["nats"], START, "servers[0].pause()", TELL, WAIT)
    servers = servers_of(program)
    finish(program)
    assert eventually(lambda: not any(is_alive(pid) or folder.exists() for pid, folder in servers))


def test_a_forked_child_does_not_keep_the_server_of_a_killed_program_alive() -> None:
    fork = "import os; child = os.fork()\nif not child:\n    import time; time.sleep(60); os._exit(0)"
    program = run(SERVERS["nats"], START, fork, TELL, "print(child, flush=True)", WAIT)
    [(pid, _)] = servers_of(program)
    assert program.stdout is not None
    child = int(program.stdout.readline())
    program.kill()
    program.wait(30)
    try:
        assert is_alive(child)
        assert eventually(lambda: not is_alive(pid))
    finally:
        os.kill(child, signal.SIGKILL)
        program.communicate(timeout=30)


def test_a_program_that_does_not_close_its_server_leaves_nothing() -> None:
    program = run(SERVERS["both"], START, TELL)
    servers = servers_of(program)
    program.communicate(timeout=30)
    assert eventually(lambda: not any(is_alive(pid) or folder.exists() for pid, folder in servers))


def test_a_server_outlives_the_thread_that_started_it() -> None:
    thread = "import threading; t = threading.Thread(target=servers[0].start); t.start(); t.join()"
    program = run(SERVERS["nats"], thread, TELL, WAIT)
    [(pid, _)] = servers_of(program)
    # This is longer than the supervisor's interval between checks of its program.
    assert not eventually(lambda: not is_alive(pid), timeout_s=1.0)
    finish(program)
    assert eventually(lambda: not is_alive(pid))


def test_ctrl_c_reaches_the_program_and_not_its_server() -> None:
    body = f"try:\n    {TELL}\n    time.sleep(120)\nexcept KeyboardInterrupt:"
    answer = "    print(servers[0].running, flush=True)"
    program = run("import time", SERVERS["nats"], START, body, answer, "[one.close() for one in servers]")
    [(pid, folder)] = servers_of(program)
    os.killpg(program.pid, signal.SIGINT)
    output, _ = program.communicate(timeout=30)
    assert output.strip() == "True"
    assert program.returncode == 0
    assert not is_alive(pid)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_server_dies_with_its_supervisor() -> None:
    program = run(SERVERS["both"], START, TELL, WAIT)
    servers = servers_of(program)
    for pid, _ in servers:
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert eventually(lambda: not any(is_alive(pid) for pid, _ in servers))
    finish(program)
    for _, folder in servers:
        shutil.rmtree(folder)
