"""What forks fold processes: its start and its end, and what they have of their parent."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eventjet.errors import FoldProcessLost
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.process import FoldFailed
from eventjet.parallel.processes import FoldProcesses
from tests.fold_processes import fork_servers
from tests.forked import ROOT
from tests.unit.echoing import Echo, Loaded
from tests.unit.folding import BOUND_S, answered, started


def test_the_server_may_be_ended_before_it_has_loaded(mark: str) -> None:
    with ForkServer.started(Loaded(hangs=True)) as server:
        assert not server.is_ready()


@pytest.mark.parametrize("moment", ["before it has loaded", "before it forks", "once it has forked"])
def test_a_server_that_is_killed_is_found_lost(mark: str, moment: str) -> None:
    def ask() -> None:
        processes.cut("lost")
        answered(processes)

    with ForkServer.started(Loaded(hangs=moment == "before it has loaded")) as server:
        if moment == "before it has loaded":
            assert not server.is_ready()
            os.kill(served_by(mark), signal.SIGKILL)
            with pytest.raises(FoldProcessLost, match="what forks them is gone"):
                server.is_ready(BOUND_S)
            return
        assert server.is_ready(BOUND_S)
        if moment == "before it forks":
            os.kill(served_by(mark), signal.SIGKILL)
            with pytest.raises(FoldProcessLost, match="what forks them is gone"):
                FoldProcesses(server, 2, bound_s=BOUND_S)
            with pytest.raises(FoldProcessLost, match="what forks them is gone"):
                server.is_ready()
            return
        with FoldProcesses(server, 2, bound_s=BOUND_S) as processes:
            processes.begin(Echo())  # else one of them still has its server's name
            os.kill(served_by(mark), signal.SIGKILL)
            processes.cut("still there")
            assert [told[1] for told in answered(processes)] == ["still there"] * 2
            os.kill(processes.pids[1], signal.SIGKILL)
            with pytest.raises(FoldProcessLost, match=r"pid \d+\) is gone"):
                ask()


def test_a_server_that_answers_too_late_is_lost_for_good(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.parallel.fork_server._BOUND_S", 1.0)
    with ForkServer.started(Loaded()) as server:
        assert server.is_ready(BOUND_S)
        pid = served_by(mark)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(FoldProcessLost, match="does not answer"):
            FoldProcesses(server, 1, bound_s=BOUND_S)
        os.kill(pid, signal.SIGCONT)
        assert select.select([server._control], [], [], BOUND_S)[0]  # it has answered by now
        with pytest.raises(FoldProcessLost, match="does not answer"):
            server.ended()


def test_why_a_server_never_will_be_ready_is_told_each_time(mark: str) -> None:
    with ForkServer.started(Loaded(fails=True)) as server:
        for _ in range(2):
            with pytest.raises(FoldFailed, match="no app"):
                server.is_ready(BOUND_S)


def test_programs_that_may_have_imported_other_code_do_not_begin(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"deployed_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("OLD = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    with started(app=Loaded(threads=True)) as processes:
        (tmp_path / f"{name}.py").write_text("OLD = False\n")
        with pytest.raises(FoldFailed, match=rf"{name}.py is another file than"):
            processes.begin(Echo())


def served_by(mark: str) -> int:
    """The process id of the server, which may have just been started."""
    deadline = time.monotonic() + BOUND_S
    while not (found := fork_servers(mark)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pid,) = found
    return pid


def test_what_is_forked_has_the_code_of_its_parent_and_ends_nothing_of_it(mark: str) -> None:
    done = run(
        """
import atexit, sys, threading
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from tests.unit.echoing import Echo, Loaded
atexit.register(lambda: print("ended once"))
print("buffered once", end=" ")
with ForkServer.of(Loaded()) as server:
    assert server._program is None and server.is_ready(60.0)
    # What is there by now was not there when it was forked, and threads do no harm any more.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    with FoldProcesses(server, 3, bound_s=60.0) as processes:
        processes.begin(Echo())
        processes.cut(1)
        assert len(processes.answers(60.0)) == 3
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("buffered once ended once\n", "", 0)


def test_what_its_owner_closes_is_closed_while_it_lives(mark: str) -> None:
    done = run(
        """
import socket
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from tests.unit.echoing import Echo, Loaded
with socket.create_server(("127.0.0.1", 0)) as listening:
    theirs = socket.create_connection(listening.getsockname(), 60.0)
    ours, _ = listening.accept()
with ForkServer.of(Loaded()) as server:
    assert server._program is None and server.is_ready(60.0)
    with FoldProcesses(server, 2, bound_s=60.0) as processes:
        processes.begin(Echo())
        ours.close()
        assert theirs.recv(1) == b""
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


UNGUARDED = """
import threading
from eventjet import App
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.process import FoldFailed
from eventjet.projections.app_ref import AppRef

app = App("twice", aggregates=[])
threading.Thread(target=threading.Event().wait, daemon=True).start()
with ForkServer.of(AppRef.of(app)) as server:
    try:
        server.is_ready(60.0)
    except FoldFailed as error:
        print(error)
"""


def test_a_program_that_would_work_twice_is_told_so(mark: str, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(UNGUARDED)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "twice.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert "imported by another process" in done.stdout
    assert 'if __name__ == "__main__":' in done.stdout


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


FIRST = """
import ctypes, os
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from tests.unit.echoing import Echo, Loaded
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: as the first process of a container
with ForkServer.of(Loaded()) as server:
    assert server.is_ready(60.0)
    for _ in range(2):
        with FoldProcesses(server, 4, bound_s=60.0) as processes:
            processes.begin(Echo())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none")
"""


def test_where_it_is_the_first_process_of_a_container_no_zombie_is_left(mark: str) -> None:
    done = run(FIRST)
    assert (done.stdout, done.returncode) == ("none\n", 0), done.stderr


BESIDE_THREADS = """
import sys, threading
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from tests.unit.echoing import Echo, Loaded
sys.path.insert(0, sys.argv[1])
threading.Thread(target=threading.Event().wait, daemon=True).start()
with ForkServer.of(Loaded(threads=True)) as server:
    assert server.is_ready(60.0)
    with FoldProcesses(server, 2, bound_s=60.0) as processes:
        processes.begin(Echo())
"""


def test_a_module_named_like_one_of_pythons_stops_no_program(mark: str, tmp_path: Path) -> None:
    for name in ("bisect", "pickle", "signal", "socket", "subprocess", "threading"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('this is not the {name} of Python')")
    done = run(BESIDE_THREADS, str(tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
