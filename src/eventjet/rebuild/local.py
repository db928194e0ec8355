"""The local engine: read, decode, fold and load in this process, without a JVM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import count

from eventjet.codec.envelope import RawRecord
from eventjet.rebuild.folding import Folding, Foldings, uncollected
from eventjet.rebuild.load import Part, Target, load_part
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.progress import Watch
from eventjet.spark.ship import Wired
from eventjet.wire import Endpoint, read_range

BATCH = 2_000
ENTRIES_HELD_MAX = 50_000
"""Rows of entries that wait for the next load."""

_AHEAD = 8
_POLL_S = 0.5


def load_locally(plan: Plan, app: Wired, endpoint: Endpoint, targets: Sequence[Target], watch: Watch) -> list[Part]:
    """Carry out a plan; returns what every part of every projection holds."""
    made = _Loads(app, targets)
    with watch.phase("read", plan.events), uncollected():
        done = 0
        batches = read_range(endpoint, plan.stream, plan.first, plan.last + 1, batch=BATCH)
        with closing(_read_ahead(batches)) as ahead:
            for records in ahead:
                made.take(records)
                done += len(records)
                watch.tell("read", done, plan.events)
    with watch.phase("load"):
        return made.finish(watch)


class _Loads:
    """The foldings of one plan with the parts they were loaded in."""

    def __init__(self, app: Wired, targets: Sequence[Target]) -> None:
        self._targets = targets
        names = [target.projection for target in targets]
        self._foldings = Foldings(app, names, targets[0].database.dialect, [target.known for target in targets])
        self._numbers = [count() for _ in targets]
        self._events = 0
        self._parts: list[Part] = []

    def take(self, records: list[RawRecord]) -> None:
        self._events += len(records)
        self._foldings.take(records)
        for index, folding in enumerate(self._foldings.each):
            if not folding.bound.reads and len(folding) >= ENTRIES_HELD_MAX:
                self._load(index, folding, events=0)

    def finish(self, watch: Watch) -> list[Part]:
        """Load what is held; the last part of each projection accounts for the events."""
        for index, folding in enumerate(self._foldings.each):
            watch.tell("load", index, len(self._targets))
            self._load(index, folding, events=self._events)
        return self._parts

    def _load(self, index: int, folding: Folding, events: int) -> None:
        target = self._targets[index]
        number = next(self._numbers[index])
        rows = load_part(target, number, folding.rows() if folding.bound.reads else folding.drain())
        self._parts.append(Part(target.projection, number, events, rows, folding.parked))


def _read_ahead(batches: Iterator[list[RawRecord]]) -> Generator[list[RawRecord]]:
    """The same batches, read in a thread of their own, a few ahead: the server works while this process folds."""
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
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        wanted.clear()
        reader.join()
