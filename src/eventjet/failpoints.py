"""Named places where a test can have this process killed, stopped or made to fail. Inert unless it asks for it.

`EVENTJET_FAILPOINT=name:action[:count]` arms one of them: at the `count`-th time it is reached (default 1) the process
gets SIGKILL (`kill`), SIGSTOP (`stop`) or SIGINT (`interrupt`), `FailpointError` is raised (`raise`), or nothing
happens (`tell`). With `EVENTJET_FAILPOINT_LOG` that file is made just before, so that whoever armed it knows that it
was reached. Processes that share the file, as all those of a Spark job do, share the failpoint: it has its effect in
the first of them.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from eventjet.errors import UsageError

_REACHED = {
    "worker": "lease_taken durable_deleted durable_created log_checked batch_taken batch_folded before_commit "
    "rows_written after_commit lease_renewed before_settle after_settle before_release",
    "cursor": "taken before_write written",
    "step": "decided stored",
    "timer": "before_set set before_clear",
    "due": "before stored",
    "reaction": "before stored",
    "publication": "before told",
    "takeover": "moved committed",
    "rebuild": "planned claimed announced shadow_made engine_started batch_read part_begun rows_copied part_loaded "
    "loaded keys_made indexed caught_up before_swap inside_swap after_swap dropped",
    "verify": "copied loaded compared",
    "task": "begun folded",
    "archive": "written read_back sealed",
    "restore": "batch_sent batch_stored",
}
"""In the order in which a worker's term reaches them, that of a reactor or a process, a revision that takes over
from another one, a rebuild, a verification, a task of either on Spark, which loads its parts itself, the making of an
archive, and a restore."""
NAMES = tuple(f"{where}.{step}" for where, steps in _REACHED.items() for step in steps.split())
ACTIONS = ("kill", "stop", "interrupt", "raise", "tell")

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


class FailpointError(Exception):
    """Raised where a failpoint was armed with `raise`."""


class _Armed:
    """One failpoint of this process."""

    def __init__(self, spec: str) -> None:
        self.name, _, rest = spec.partition(":")
        self.action, _, count = rest.partition(":")
        if self.name not in NAMES or self.action not in ACTIONS or not (count or "1").isdigit():
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
            try:
                with Path(log).open("x", encoding="utf-8") as file:
                    file.write(f"{self.name}:{self.action}\n")
            except FileExistsError:
                return
        if self.action == "raise":
            raise FailpointError(self.name)
        if self.action != "tell":
            os.kill(os.getpid(), _SIGNALS[self.action])


def reach(name: str) -> None:
    """The failpoint of this name is here."""
    if _armed is not None and _armed.name == name:
        _armed.reach()


_spec = os.environ.get("EVENTJET_FAILPOINT")
_armed = _Armed(_spec) if _spec else None
