"""Named places where a test can have this process killed, stopped or made to fail. Inert unless it asks for it.

`EVENTJET_FAILPOINT=name:action[:count]` arms one of them: at the `count`-th time it is reached (default 1) the process
gets SIGKILL (`kill`), SIGSTOP (`stop`), or `FailpointError` is raised (`raise`). With `EVENTJET_FAILPOINT_LOG` the name
is appended to that file just before, so that whoever armed it knows that it was reached.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from eventjet.errors import UsageError

NAMES = (
    "worker.lease_taken",
    "worker.durable_deleted",
    "worker.durable_created",
    "worker.log_checked",
    "worker.batch_taken",
    "worker.batch_folded",
    "worker.before_commit",
    "worker.rows_written",
    "worker.after_commit",
    "worker.lease_renewed",
    "worker.before_settle",
    "worker.after_settle",
    "worker.before_release",
    "takeover.moved",
    "takeover.committed",
)
"""In the order in which a term reaches them; the last two in a revision that takes over from another one."""


class FailpointError(Exception):
    """Raised where a failpoint was armed with `raise`."""


class _Armed:
    """One failpoint of this process."""

    def __init__(self, spec: str) -> None:
        self.name, _, rest = spec.partition(":")
        self.action, _, count = rest.partition(":")
        if self.name not in NAMES or self.action not in ("kill", "stop", "raise") or not (count or "1").isdigit():
            raise UsageError(f"EVENTJET_FAILPOINT={spec!r} is not name:action[:count]. Names: {', '.join(NAMES)}.")
        self._left = int(count or "1")
        self._lock = threading.Lock()

    def reach(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        log = os.environ.get("EVENTJET_FAILPOINT_LOG")
        if log:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{self.name}:{self.action}\n")
        if self.action == "raise":
            raise FailpointError(self.name)
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def reach(name: str) -> None:
    """The failpoint of this name is here."""
    if _armed is not None and _armed.name == name:
        _armed.reach()


_spec = os.environ.get("EVENTJET_FAILPOINT")
_armed = _Armed(_spec) if _spec else None
