"""A fold process: takes raw records, folds its share of them, and answers at the end of each batch.

`ForkServer` makes them: by a fork, or, where the application has started threads, as a program of its own. What one
works on comes over the socket that it is given. It ends when that is closed, and at once when the process that it works
for is gone, whatever it is doing then.
"""

from __future__ import annotations

import marshal
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from eventjet import failpoints
from eventjet.codec.headers import RawRecord
from eventjet.parallel.link import BEGUN, CUT, DONE, FAILED, RECORDS, FoldLink, LinkClosed
from eventjet.runtime import settle_process
from eventjet.text import cut

_ORPHANED = 1


class FoldFailed(Exception):
    """A fold process says why it cannot go on: over an event, a row, its connection, or what it was to import."""


class Loadable(Protocol):
    """A value that can be pickled, which imports what the task will need."""

    def load(self) -> object: ...


class ShareWork(Protocol):
    """What one fold process does with its share."""

    def take(self, records: list[RawRecord], /) -> None:
        """The next records of its own, in the order of the log."""
        ...

    def cut(self, mark: Any, /) -> Any:
        """What the batch that ends here came to. Mark and answer are of what `marshal` knows."""
        ...

    def reason_of(self, error: Exception, /) -> str:
        """Why it cannot go on, in a line that may be shown."""
        ...


class ShareTask(Protocol):
    """A value that can be pickled, of which a fold process makes its work."""

    def begin(self, share: int, /) -> AbstractContextManager[ShareWork]:
        """For the process of this number, from 0."""
        ...


def main() -> None:
    """The program, given its socket, its lifeline, and on standard input what it is to import."""
    spared()
    link, lifeline = FoldLink(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])
    app = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - of the process that made this one
    with suppress(LinkClosed):
        try:
            app.load()
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for the answer is told
            _fail(link, line_of(error))
        _fold(link, lifeline)


def fold(its: socket.socket, lifeline: int) -> None:
    """Serve this end of a socket until the other one is closed, in a process that has imported the application."""
    with suppress(LinkClosed):
        _fold(FoldLink(its), lifeline)


def spared() -> None:
    """Whoever made this process hears these signals as well, and ends it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def named(name: str) -> None:
    """What `ps` and `top` call this process: 15 characters at most."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def line_of(error: Exception) -> bytes:
    return _line(str(error))


def _fold(link: FoldLink, lifeline: int) -> None:
    named("eventjet fold")
    threading.Thread(target=_end_with_owner, args=[lifeline], name="eventjet lifeline", daemon=True).start()
    _serve(link)


def _end_with_owner(lifeline: int) -> None:
    """It is a pipe that nobody writes to: it ends when its other end is gone."""
    while os.read(lifeline, 1):
        pass
    os._exit(_ORPHANED)


def _serve(link: FoldLink) -> None:
    _, pickled = link.receive()
    reason_of = str
    try:
        share, task = pickle.loads(pickled)  # noqa: S301 - see above
        with task.begin(share) as work:
            reason_of = work.reason_of
            settle_process()
            failpoints.reach("fold.begun")
            link.send(BEGUN)
            _work(link, work)
    except LinkClosed:
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        _fail(link, _line(reason_of(error)))


def _fail(link: FoldLink, reason: bytes) -> NoReturn:
    """Say why it cannot go on; whoever is still sending reads that later: ended now, this process would seem lost."""
    link.send(FAILED, reason)
    while True:
        link.receive()


def _work(link: FoldLink, work: ShareWork) -> None:
    while True:
        kind, payload = link.receive()
        if kind == RECORDS:
            work.take(marshal.loads(payload))  # noqa: S302 - see above
            failpoints.reach("fold.taken")
        elif kind == CUT:
            answer = marshal.dumps(work.cut(marshal.loads(payload)))  # noqa: S302 - see above
            failpoints.reach("fold.folded")
            link.send(DONE, answer)
            failpoints.reach("fold.answered")


def _line(reason: str) -> bytes:
    return cut(reason).encode("utf-8", "backslashreplace")
