"""`eventjet worker --processes 2` as an operator runs it: it divides what is far behind, and ends cleanly."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventjet.nats.endpoint import Endpoint
from tests import logs
from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Keep
from tests.fold_processes import MARK, all_ended, folded_by, fork_servers

_END_S = 60.0
MANY = 120_000
"""Nearly twice of what is far behind, so that enough are left once the processes have loaded."""
SLOW = """    if sys.argv[0] != "-c":  # the worker itself, which is not to arrive alone
        time.sleep(0.0002)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_a_worker_divides_what_is_far_behind_and_ends_with_its_processes(
    bank: Program, ended_processes: Keep, how: str
) -> None:
    slow_alone(bank)
    assert bank("init").status == 0
    stream, endpoint = app_name(bank), Endpoint((bank.environ["EVENTJET_SERVERS"],))
    deposits = [(f"account.a-{n % 500}", logs.block(), b'{"amount":"1"}') for n in range(MANY)]
    logs.append(endpoint, stream, deposits)
    more = {MARK: stream}
    arguments = ["worker", "--processes", "2"]
    if how == "Ctrl-C":
        arguments, more["EVENTJET_PROCESSES"] = ["worker"], "2"
    worker = bank.start(*arguments, **more)
    ended_processes(worker)
    assert worker.stderr is not None
    said: Iterator[str] = iter(worker.stderr.readline, "")
    assert any("2 processes fold what comes after position" in line for line in said)
    assert folded_by(stream, 2)
    (server,) = fork_servers(stream)
    # A fork of the worker, which had started no thread by then.
    assert Path(f"/proc/{server}/cmdline").read_bytes() == Path(f"/proc/{worker.pid}/cmdline").read_bytes()
    if how == "Ctrl-C":
        os.killpg(worker.pid, signal.SIGINT)  # as a terminal does
    else:
        worker.send_signal(signal.SIGTERM)
    _, rest = worker.communicate(timeout=_END_S)
    assert worker.returncode == 0, rest
    assert "Traceback" not in rest
    assert all_ended(stream)


def slow_alone(bank: Program) -> None:
    file = bank.folder / "bank.py"
    before, first, rest = file.read_text(encoding="utf-8").partition("@projection(")
    head, body, rest = rest.partition(":\n")
    imports = "import sys\nimport time\n"
    future, line, before = before.partition("from __future__ import annotations\n")
    file.write_text(future + line + imports + before + first + head + body + SLOW + rest, encoding="utf-8")


def app_name(bank: Program) -> str:
    source = (bank.folder / "bank.py").read_text(encoding="utf-8")
    return source.partition('App("')[2].partition('"')[0]
