"""`read_ahead`: batches read in a thread of their own, a few ahead: the server works while this process folds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing

from eventjet.codec.envelope import RawRecord
from eventjet.rebuild.progress import Watch

_AHEAD = 8
_POLL_S = 0.2
_LEAVE_S = 0.5
"""How long a reader that waits for a silent server is waited for; it ends by itself when its patience does."""


def read_ahead(batches: Generator[list[RawRecord]], watch: Watch) -> Generator[list[RawRecord]]:
    """The same batches; raises `Stopped` soon after they are not wanted any more, even while nothing comes."""
    ready: queue.Queue[list[RawRecord] | BaseException | None] = queue.Queue(_AHEAD)
    wanted = threading.Event()
    wanted.set()

    def put(item: list[RawRecord] | BaseException | None) -> None:
        while wanted.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def read() -> None:
        end: BaseException | None = None
        try:
            with closing(batches):
                for batch in batches:
                    put(batch)
                    if not wanted.is_set():
                        break
        except BaseException as error:  # noqa: BLE001 - it is raised again where the batches are awaited
            end = error
        put(end)

    reader = threading.Thread(target=read, name="eventjet-read-ahead", daemon=True)
    reader.start()
    try:
        while (item := _next(ready, watch)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        wanted.clear()
        reader.join(_LEAVE_S)


def _next(
    ready: queue.Queue[list[RawRecord] | BaseException | None], watch: Watch
) -> list[RawRecord] | BaseException | None:
    while True:
        watch.check()
        try:
            return ready.get(timeout=_POLL_S)
        except queue.Empty:
            continue
