"""`FoldProcesses`: the fold processes of one job, made, fed, asked and ended by the process that owns the job.

Each aggregate is one process's own, told by its subject without decoding. They hold nothing that is not in the log or
the database, so they are ended by SIGKILL, and losing one loses work and nothing else.
"""

from __future__ import annotations

import marshal
import os
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

from eventjet.codec.headers import VOID_PART, RawRecord
from eventjet.errors import FoldProcessLost
from eventjet.parallel.fork_server import ForkServer, see_ended
from eventjet.parallel.link import BEGUN, CUT, DONE, FAILED, RECORDS, TASK, FoldLink, Kind, LinkClosed
from eventjet.parallel.process import FoldFailed, ShareTask

_BEGIN, _BEGIN_MAX_S = 6, 600.0
"""So many times as long as anything else it may take to begin: a program has the application to import first."""
_END_S = 5.0
_LOOK_S = 0.005
_SHARES_MAX = 65_536
"""Subjects of which it is remembered whose they are."""


class FoldProcesses:
    """`count` processes for one task. `send` and `cut` from one thread, `answers` from another, `close` from any.

    Raises `FoldProcessLost` where one of them ended or does not answer; `bound_s` is how long one may take for a piece
    of work. Nothing is of use after that but `close`.
    """

    def __init__(self, server: ForkServer, count: int, *, bound_s: float) -> None:
        """Makes them, by a server that is ready; raises `FoldFailed` as well."""
        self._server = server
        self.bound_s = bound_s
        self._closed = False
        self._shares: dict[bytes, int] = {}
        self.pids: list[int] = []
        self._handles: list[int] = []
        self._statuses: dict[int, int] = {}
        self._waiting: list[deque[tuple[Kind, bytes]]] = [deque() for _ in range(count)]
        self._links: list[FoldLink] = []
        try:
            for _ in range(count):
                self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        own, its = socket.socketpair()
        self._links.append(FoldLink(own, self.bound_s))
        with its:
            pid, handle = self._server.fork(its)
        self.pids.append(pid)
        self._handles.append(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._links)

    def begin(self, task: ShareTask) -> None:
        """Have them begin, and wait until they have; raises `FoldFailed` as well.

        A program imports the application first, and may find other code than a moment ago.
        """
        for share in range(len(self._links)):
            # Its secrets go this way: neither arguments nor the environment have them.
            self._tell(share, TASK, pickle.dumps((share, task)))
        begin_s = max(self.bound_s, min(_BEGIN_MAX_S, _BEGIN * self.bound_s))
        if self._gathered(BEGUN, begin_s) is None:
            raise FoldProcessLost(f"did not begin within {begin_s:g} s")
        self._server.is_ready()

    def send(self, records: Sequence[RawRecord]) -> None:
        """Give each process its own of the next records; blocks while one is far behind."""
        own: list[list[RawRecord]] = [[] for _ in self._links]
        adders = [each.append for each in own]
        shares = self._shares
        for record in records:
            try:
                adders[shares[record[2]]](record)
            except KeyError:
                for share in self._shares_of(record[2]):
                    adders[share](record)
        for share, each in enumerate(own):
            if each:
                self._tell(share, RECORDS, marshal.dumps(each))

    def _shares_of(self, subject: bytes) -> Sequence[int]:
        """Whose a record is, by the id alone: aggregates of one id meet, since that is the key of their rows."""
        if VOID_PART in subject:
            return range(len(self._links))  # every reader has to know of it
        if len(self._shares) >= _SHARES_MAX:
            self._shares.clear()
        share = self._shares[subject] = hash(subject[subject.rfind(b".") :]) % len(self._links)
        return (share,)

    def cut(self, mark: Any, shares: Iterable[int] | None = None) -> None:
        """End a batch: of all, or of some."""
        payload = marshal.dumps(mark)
        for share in range(len(self._links)) if shares is None else shares:
            self._tell(share, CUT, payload)

    def answers(self, timeout_s: float, shares: Sequence[int] | None = None) -> list[Any] | None:
        """What the oldest batch that was not answered yet came to, process by process; None when not all are there.

        Blocks. Raises `FoldFailed` as well.
        """
        return self._gathered(DONE, timeout_s, shares)

    def check(self) -> None:
        """Raise `FoldFailed` where one of them has said so, without waiting. For whoever asks for answers as well."""
        for share in range(len(self._links)):
            while self._has_told(share, 0.0):
                pass

    def close(self) -> None:
        """End them, whatever they are doing."""
        self._closed = True
        handles, self._handles = self._handles, []
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for link in self._links:
            link.close()
        for handle in handles:
            see_ended(handle)
            os.close(handle)
        if handles:
            with suppress(FoldProcessLost):
                self._server.ended()  # its children are not left behind either

    def _tell(self, share: int, kind: Kind, payload: bytes) -> None:
        try:
            self._links[share].send(kind, payload)
        except TimeoutError:
            raise self._lost(share, f"took nothing for {self.bound_s:g} s") from None
        except LinkClosed:
            raise self._lost(share, "") from None

    def _gathered(self, kind: Kind, timeout_s: float, shares: Sequence[int] | None = None) -> list[Any] | None:
        """One message of each, in their order."""
        deadline = time.monotonic() + timeout_s
        wanted = range(len(self._links)) if shares is None else shares
        for share in wanted:
            while not self._waiting[share]:
                if not self._has_told(share, max(0.0, deadline - time.monotonic())):
                    return None
        first = [self._waiting[share].popleft() for share in wanted]
        assert all(told == kind for told, _ in first)
        if kind == DONE:
            return [marshal.loads(payload) for _, payload in first]  # noqa: S302 - of our own processes
        return [payload for _, payload in first]

    def _has_told(self, share: int, timeout_s: float) -> bool:
        """Take the next message of one, if it comes in time."""
        link = self._links[share]
        try:
            if not link.is_ready(timeout_s):
                return False
            told, payload = link.receive()
        except TimeoutError:
            raise self._lost(share, "left off within an answer") from None
        except (LinkClosed, OSError, ValueError):
            raise self._lost(share, "") from None
        if told == FAILED:
            raise FoldFailed(payload.decode())
        self._waiting[share].append((told, payload))
        return True

    def _lost(self, share: int, reason: str) -> FoldProcessLost:
        if self._closed:
            return FoldProcessLost("was ended by this process")
        pid = self.pids[share]
        return FoldProcessLost(f"(pid {pid}) {reason or _how(self._status_of(pid))}")

    def _status_of(self, pid: int) -> int | None:
        """How one has ended that has closed its socket, which it does a moment before; None where nobody knows."""
        deadline = time.monotonic() + _END_S
        with suppress(FoldProcessLost):
            while pid not in self._statuses and time.monotonic() < deadline:
                self._statuses.update(self._server.ended())
                time.sleep(_LOOK_S)
        return self._statuses.get(pid)


def _how(status: int | None) -> str:
    if status is None:
        return "is gone"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
