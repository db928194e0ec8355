"""A fold process: takes raw records, folds its share of them, and answers at the end of each batch.

It is a program of its own, `python -c "from eventjet.parallel.process import main; main()" FD …`, made by
`FoldProcesses` and useless to anybody else: what it works on comes over the sockets that it inherits. The first of them
is its own. For each of the others it forks a process once the application is imported, which spares them that, and
much memory. They end when their sockets are closed, and at once when the process that made them is gone, whatever they
are doing then.
"""

from __future__ import annotations

import gc
import marshal
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from eventjet import failpoints
from eventjet.codec.envelope import RawRecord
from eventjet.collecting import settle_process
from eventjet.parallel.link import APP, BEGUN, CUT, DONE, FAILED, LOADED, RECORDS, FoldLink, LinkClosed
from eventjet.shown import cut

PROGRAM = "from eventjet.parallel.process import main; main()"
_ORPHANED = 1


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
    """The program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Whoever made this process hears them as well, and ends it.
        signal.signal(number, signal.SIG_IGN)
    own = socket.socket(fileno=int(sys.argv[1]))
    others = [int(number) for number in sys.argv[2:]]
    link = FoldLink(own)
    with suppress(LinkClosed):
        kind, pickled = link.receive()
        assert kind == APP
        try:
            # Of the process that made this one: nobody else has the other end.
            _, app = pickle.loads(pickled)  # noqa: S301
            app.load()
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for the answer is told
            link.send(FAILED, _line(str(error)))
            return
        gc.freeze()
        for number, other in enumerate(others, 1):
            if _is_forked(other):
                own.close()  # no more than that: the process it belongs to goes on with it
                for later in others[number:]:
                    os.close(later)
                link = FoldLink(socket.socket(fileno=other))
                link.receive()  # what to import, which is imported
                break
            os.close(other)
        threading.Thread(target=_end_with_parent, name="eventjet lifeline", daemon=True).start()
        link.send(LOADED, str(os.getpid()).encode())
        _serve(link)


def _is_forked(other: int) -> bool:
    """Whether this is the new process, forked for that socket.

    Where the application has started threads, which makes a fork unsafe, another program is started for it.
    """
    if len(list(Path("/proc/self/task").iterdir())) == 1:
        return os.fork() == 0
    subprocess.Popen([sys.executable, "-c", PROGRAM, str(other)], pass_fds=[other])
    return False


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when its other end is gone."""
    while os.read(0, 1):
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
    except Exception as error:  # noqa: BLE001 - see above
        link.send(FAILED, _line(reason_of(error)))
        while True:
            # Whoever is still sending reads the answer later: ended now, this process would seem to be lost.
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
