"""The local engine with fold processes: this one reads and divides, they fold whole shares and load them."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeAlias

from eventjet import failpoints
from eventjet.codec.headers import RawRecord
from eventjet.domain.parked import Parked
from eventjet.errors import FoldProcessLost, RebuildError, RowsRefused
from eventjet.log.earlier import EarlierRecords
from eventjet.nats.endpoint import Endpoint
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.process import FoldFailed, ShareWork
from eventjet.parallel.processes import FoldProcesses
from eventjet.projections.app_ref import AppRef
from eventjet.rebuild.folding import ChunkLoader, Foldings, fold_of
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.replay_source import read_ahead
from eventjet.rebuild.runs import Part, Target, redacted
from eventjet.runtime import uncollected

_BOUND_S = 600.0
"""How long a fold process may take for what it has been given, and to start."""
_LOAD_EVENT_S = 0.000_1
"""What its load may take beyond that for each event of the log: ten times what it does take."""
_LOOK_S = 0.2
_PARTS_STRIDE = 100_000
"""A process that loads entries in several transactions numbers them this far apart."""

ToldPart: TypeAlias = tuple[str, int, list[tuple[Any, ...]]]
"""(projection, rows, what was parked)."""


def undivided(job: Job, targets: Sequence[Target]) -> list[str]:
    """What keeps a job in one process: projections, each with the reason."""
    found: list[str] = []
    for one in targets:
        resolved = fold_of(job.app, one.projection)
        if not resolved.is_divisible:
            found.append(f"the key of {one.projection} is not the aggregate's id")
        elif not resolved.reads and not one.database.dialect.is_concurrent:
            found.append(f"{one.projection} is loaded as it is read, and SQLite has one writer")
    return found


def load_divided(job: Job, plan: Plan, targets: Sequence[Target], forks: ForkServer, count: int) -> list[Part]:
    """See `Engine.load`. Raises `RebuildError` with what a fold process could not take, or that one was lost."""
    watch = job.watch
    endpoint = job.log.endpoint.with_name("eventjet rebuild fold")
    task = LoadTask(job.reference(), endpoint, job.log.stream, tuple(targets), dict(job.catalog.voids))
    try:
        _await_ready(forks, watch)
        with (
            FoldProcesses(forks, count, bound_s=_BOUND_S) as processes,
            watch.interrupted_by(processes.close),
        ):
            with watch.phase("read", plan.events):
                processes.begin(task)
                done = _divide(job, plan, processes)
            with watch.phase("load"):
                parts = _loaded(processes, targets, watch, _BOUND_S + done * _LOAD_EVENT_S)
    except FoldFailed as error:
        raise RebuildError(str(error)) from error
    except FoldProcessLost:
        watch.check()  # which says so where they were ended because nobody waits any more
        raise
    first: set[str] = set()
    for number, part in enumerate(parts):
        if part.projection not in first:
            first.add(part.projection)
            parts[number] = replace(part, events=done)
    return parts


def _await_ready(forks: ForkServer, watch: Watch) -> None:
    deadline = time.monotonic() + _BOUND_S
    while not forks.is_ready(_LOOK_S):
        watch.check()
        if time.monotonic() > deadline:
            raise FoldProcessLost(f"did not start within {_BOUND_S:.0f} s")


def _divide(job: Job, plan: Plan, processes: FoldProcesses) -> int:
    """Hand out all the records; how many there were."""
    failpoints.reach("rebuild.engine_started")
    done = 0
    with closing(read_ahead(job.source.records(plan.first, plan.last + 1), job.watch)) as ahead:
        for records in ahead:
            processes.send(records)
            processes.check()
            failpoints.reach("rebuild.batch_read")
            done += len(records)
            job.watch.tell("read", done, plan.events)
    return done


def _loaded(processes: FoldProcesses, targets: Sequence[Target], watch: Watch, bound_s: float) -> list[Part]:
    """Have them load what they hold: all at once, or one after the other where the database has one writer.

    Each turn has the bound.
    """
    concurrent = all(one.database.dialect.is_concurrent for one in targets)
    shares = range(len(processes))
    parts: list[Part] = []
    for turn in [shares] if concurrent else [range(share, share + 1) for share in shares]:
        processes.cut(None, turn)
        deadline = time.monotonic() + bound_s
        while (answers := processes.answers(_LOOK_S, turn)) is None:
            watch.check()
            if time.monotonic() > deadline:
                raise FoldProcessLost(f"did not load its rows within {bound_s:.0f} s")
        parts += [
            Part(name, 0, rows, [Parked(*one) for one in parked]) for told in answers for name, rows, parked in told
        ]
    return parts


@dataclass(frozen=True, slots=True)
class LoadTask:
    """See `eventjet.parallel.process.ShareTask`."""

    app: AppRef
    endpoint: Endpoint
    stream: str
    targets: tuple[Target, ...]
    voids: Mapping[int, str] = field(repr=False)

    @contextmanager
    def begin(self, share: int) -> Generator[ShareWork]:
        with EarlierRecords(self.endpoint, self.stream) as earlier, uncollected():
            foldings = Foldings(self.app.load(), self.targets, self.voids, earlier)
            yield _Loading(ChunkLoader(foldings, self.targets, Watch(), share * _PARTS_STRIDE), self.app)


class _Loading:
    """See `eventjet.parallel.process.ShareWork`."""

    def __init__(self, loads: ChunkLoader, app: AppRef) -> None:
        self._loads = loads
        self._app = app

    def take(self, records: list[RawRecord]) -> None:
        self._loads.take(records)

    def cut(self, mark: None) -> list[ToldPart]:
        del mark
        return [
            (part.projection, part.rows, [astuple(one) for one in part.parked]) for part in self._loads.finish(events=0)
        ]

    def reason_of(self, error: Exception) -> str:
        return str(redacted(error, self._app.load()) if isinstance(error, RowsRefused) else error)
