"""`Among`: the fold processes that a worker was given, and which of its projections has them."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from eventjet.errors import UsageError
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from eventjet.projections.app_ref import Application, AppRef

TURN_S = 10.0
"""How long a projection may have them while another one waits: many times what the change costs."""
BOUND_S = 20.0
"""How long a fold process may take for a batch: many times what the pace of a worker lets it take."""


class Among:
    """Of one worker, for use within its loop. One projection has them at a time, and they take turns."""

    def __init__(self, count: int, app: AppRef, server: ForkServer) -> None:
        self.count = count
        self.app = app
        self._server = server
        self._user: str | None = None
        self._since: float | None = None
        """When what they made was first committed: what they take to begin, or never do, is no turn."""
        self._queue: dict[str, None] = {}
        """Durables of projections that wait, the first one first."""

    @classmethod
    @contextmanager
    def given(cls, app: Application, count: int) -> Generator[Among | None]:
        """For a worker that has so many; None where that is itself alone. Raises `UsageError`.

        To be entered before anything has started a thread.
        """
        if count < 1:
            raise UsageError(f"{count} processes cannot fold anything. Give 1 or more.")
        if count == 1:
            yield None
            return
        reference = AppRef.of(app)
        with ForkServer.of(reference) as server:
            yield cls(count, reference, server)

    def take(self, durable: str) -> bool:
        """Whether it has them from here on; else it waits for its turn, until it `leaves`.

        Raises `FoldFailed` and `FoldProcessLost` where there will be none.
        """
        self._queue.setdefault(durable)
        if self._user is not None or next(iter(self._queue)) != durable or not self._server.is_ready():
            return False
        del self._queue[durable]
        self._user, self._since = durable, None
        return True

    def committed(self) -> None:
        """What they made for whoever has them was committed."""
        if self._since is None:
            self._since = time.monotonic()

    def leave(self, durable: str) -> None:
        """It neither has them nor waits any more."""
        self._queue.pop(durable, None)
        if self._user == durable:
            self._user = None

    def is_turn_over(self) -> bool:
        """Whether whoever has them is to let another one have them."""
        return bool(self._queue) and self._since is not None and time.monotonic() - self._since > TURN_S

    def processes(self) -> FoldProcesses:
        """For whoever has them."""
        return FoldProcesses(self._server, self.count, bound_s=BOUND_S)
