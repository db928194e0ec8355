"""No embedded server outlives the program that started it, and none dies before the program is done with it."""

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


def told(program: subprocess.Popen[str]) -> list[tuple[int, Path]]:
    """What the program tells of its servers: pids and folders."""
    assert program.stdout is not None
    pairs = [part.partition(":") for part in program.stdout.readline().split()]
    assert pairs
    return [(int(pid), Path(folder)) for pid, _, folder in pairs]


def alive(pid: int) -> bool:
    """A zombie is not: nothing of it runs any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # The second when it goes between opening and reading.
        return False


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def finish(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate(timeout=30)


def test_a_killed_program_leaves_neither_server_nor_folder() -> None:
    program = run(SERVERS["both"], START, TELL, WAIT)
    servers = told(program)
    assert all(alive(pid) for pid, _ in servers)
    finish(program)
    assert eventually(lambda: not any(alive(pid) or folder.exists() for pid, folder in servers))


def test_a_program_killed_while_its_server_is_paused_leaves_nothing() -> None:
    program = run(SERVERS["nats"], START, "servers[0].pause()", TELL, WAIT)
    servers = told(program)
    finish(program)
    assert eventually(lambda: not any(alive(pid) or folder.exists() for pid, folder in servers))


def test_a_forked_child_does_not_keep_the_server_of_a_killed_program_alive() -> None:
    fork = "import os; child = os.fork()\nif not child:\n    import time; time.sleep(60); os._exit(0)"
    program = run(SERVERS["nats"], START, fork, TELL, "print(child, flush=True)", WAIT)
    [(pid, _)] = told(program)
    assert program.stdout is not None
    child = int(program.stdout.readline())
    program.kill()
    program.wait(30)
    try:
        assert alive(child)
        assert eventually(lambda: not alive(pid))
    finally:
        os.kill(child, signal.SIGKILL)
        program.communicate(timeout=30)


def test_a_program_that_forgets_to_close_leaves_nothing() -> None:
    program = run(SERVERS["both"], START, TELL)
    servers = told(program)
    program.communicate(timeout=30)
    assert eventually(lambda: not any(alive(pid) or folder.exists() for pid, folder in servers))


def test_a_server_outlives_the_thread_that_started_it() -> None:
    thread = "import threading; t = threading.Thread(target=servers[0].start); t.start(); t.join()"
    program = run(SERVERS["nats"], thread, TELL, WAIT)
    [(pid, _)] = told(program)
    # Longer than the supervisor takes to look whether its program is still there.
    assert not eventually(lambda: not alive(pid), timeout_s=1.0)
    finish(program)
    assert eventually(lambda: not alive(pid))


def test_ctrl_c_reaches_the_program_and_not_its_server() -> None:
    body = f"try:\n    {TELL}\n    time.sleep(120)\nexcept KeyboardInterrupt:"
    answer = "    print(servers[0].running, flush=True)"
    program = run("import time", SERVERS["nats"], START, body, answer, "[one.close() for one in servers]")
    [(pid, folder)] = told(program)
    os.killpg(program.pid, signal.SIGINT)
    output, _ = program.communicate(timeout=30)
    assert output.strip() == "True"
    assert program.returncode == 0
    assert not alive(pid)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_server_dies_with_its_supervisor() -> None:
    program = run(SERVERS["both"], START, TELL, WAIT)
    servers = told(program)
    for pid, _ in servers:
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid, _ in servers))
    finish(program)
    for _, folder in servers:
        shutil.rmtree(folder)
