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
    "rebuild.planned",
    "rebuild.claimed",
    "rebuild.announced",
    "rebuild.shadow_made",
    "rebuild.engine_started",
    "rebuild.batch_read",
    "rebuild.part_begun",
    "rebuild.rows_copied",
    "rebuild.part_loaded",
    "rebuild.loaded",
    "rebuild.keys_made",
    "rebuild.indexed",
    "rebuild.caught_up",
    "rebuild.before_swap",
    "rebuild.inside_swap",
    "rebuild.after_swap",
    "rebuild.dropped",
    "verify.copied",
    "verify.loaded",
    "verify.compared",
    "task.begun",
    "task.folded",
    "archive.written",
    "archive.read_back",
    "archive.sealed",
    "restore.batch_sent",
    "restore.batch_stored",
)
"""In the order in which they are reached: by a worker's term, by a revision that takes over from another one, by a
rebuild, by a verification, by a task of either on Spark, which loads its parts itself, by the making of an archive,
and by a restore."""
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
