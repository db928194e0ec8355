"""Fold processes of `echoing` tasks, and what they answer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from tests.unit.echoing import Loaded

BOUND_S = 60.0
"""Far above what any answer takes."""


@contextmanager
def started(count: int = 2, app: Loaded | None = None, bound_s: float = BOUND_S) -> Generator[FoldProcesses]:
    """By a server that is a program, since the process that runs the tests has threads."""
    with ForkServer.started(app or Loaded()) as server:
        assert server.is_ready(BOUND_S)
        with FoldProcesses(server, count, bound_s=bound_s) as processes:
            yield processes


def answered(processes: FoldProcesses) -> list[Any]:
    found = processes.answers(BOUND_S)
    assert found is not None
    return found
