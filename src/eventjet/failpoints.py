"""Named places where a test can kill or stop this process or make it fail. They do nothing unless one is armed.

`EVENTJET_FAILPOINT=name:action[:count]` arms a failpoint: when it is reached for the `count`-th time (default 1) the
process gets SIGKILL (`kill`), SIGSTOP (`stop`) or SIGINT (`interrupt`), `FailpointError` is raised (`raise`), or
nothing happens (`tell`). If `EVENTJET_FAILPOINT_LOG` names a file, it is created just before, which shows the test that
the failpoint was reached. Processes that share the file, such as those of a Spark job, share the failpoint: it takes
effect only in the first process that reaches it.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from eventjet.errors import UsageError

_STEPS = {
    "worker": "lease_taken durable_deleted durable_created log_checked batch_taken batch_folded before_commit "
    "rows_written after_commit lease_renewed before_settle after_settle before_release",
    "cursor": "taken before_write written",
    "step": "decided stored",
    "timer": "before_set set before_clear",
    "due": "before stored",
    "reaction": "before stored",
    "publication": "before stored",
    "takeover": "moved committed",
    "rebuild": "planned claimed announced shadow_made engine_started batch_read part_begun rows_copied part_loaded "
    "loaded keys_made indexed caught_up before_swap inside_swap after_swap dropped",
    "verify": "copied loaded compared",
    "task": "begun folded",
    "archive": "written read_back sealed",
    "restore": "batch_sent batch_stored",
    "lake": "created read committed",
    "objects": "chunk_stored put sweep",
    "promote": "ready sealed stream promoted checkpoints",
}
"""Each in the order in which it is reached: by the lease session of a projection's worker, by that of a reactor or a
process, by a revision that takes over from another revision, by a rebuild, by a verification, by a Spark task of
either, which loads its parts itself, by the writing of an archive, by a restore, by the sync of a lake, by the
storing of a large body or a sweep of those that nobody needs, and by the promotion of a mirror."""
NAMES = tuple(f"{group}.{step}" for group, steps in _STEPS.items() for step in steps.split())
ACTIONS = ("kill", "stop", "interrupt", "raise", "tell")

_SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "interrupt": "SIGINT"}
"""Names of signals, because Windows lacks two of them."""


class FailpointError(Exception):
    """The error that a failpoint with the action `raise` raises."""


class _Armed:
    """The failpoint that is armed in this process."""

    def __init__(self, spec: str) -> None:
        self.name, _, rest = spec.partition(":")
        self.action, _, count = rest.partition(":")
        if self.name not in NAMES or self.action not in ACTIONS or not (count or "1").isdigit():
            raise UsageError(f"EVENTJET_FAILPOINT={spec!r} is not name:action[:count]. Names: {', '.join(NAMES)}.")
        self._remaining = int(count or "1")
        self._lock = threading.Lock()

    def reach(self) -> None:
        with self._lock:
            self._remaining -= 1
            if self._remaining:
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
            os.kill(os.getpid(), getattr(signal, _SIGNALS[self.action]))


def reach(name: str) -> None:
    """Mark the place of a failpoint in the code; its action takes place here if it is armed."""
    if _armed is not None and _armed.name == name:
        _armed.reach()


_spec = os.environ.get("EVENTJET_FAILPOINT")
_armed = _Armed(_spec) if _spec else None
