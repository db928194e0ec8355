"""Jobs: the rebuilds and verifications that this console runs, with progress and results, in memory alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Literal, TypeAlias

from eventjet.console.sources import Sources
from eventjet.errors import EventjetError, UsageError
from eventjet.operations.reports import difference_text, differing_columns, key_text, rebuild_lines
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import EngineOptions, Progress, VerifyReport, rebuild, verify
from eventjet.rebuild.job import options_of
from eventjet.rebuild.plan import EngineChoice
from eventjet.text import counted, spent

Kind: TypeAlias = Literal["rebuild", "verify"]

RUNNING_MAX = 2
"""The most jobs at once, since each may take all cores of this machine."""
KEPT_MAX = 20
"""The most ended jobs whose progress and results are still shown."""
_NOTES_MAX = 20


@dataclass(frozen=True, slots=True)
class JobPhase:
    """The progress of one phase, on one projection or on several together."""

    of: str
    """The names of the projections."""
    phase: str
    done: int
    total: int
    """0 while the total is not known."""
    seconds: float
    """Duration of the phase: from its start to that of the next phase, to the end of the job, or until now."""
    is_over: bool


@dataclass(frozen=True, slots=True)
class DifferingRow:
    """A row of a read model that differs from the row that the log gives, without private values."""

    projection: str
    key: str
    as_json: str
    """The key as JSON, as the page of the row takes it; empty for a table of a SQL projection."""
    said: str
    columns: Sequence[tuple[str, Any, Any]]
    """(name, live value, expected value) of each column that differs."""
    since: str
    position: int | None
    """The position of the first event that the row does not show."""


@dataclass(slots=True)
class BulkJob:
    """One rebuild or verification, with its progress and its result."""

    id: str
    """The id of the action that started the job."""
    kind: Kind
    names: tuple[str, ...]
    engine: EngineChoice
    from_archive: str
    actor: str
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    fault: str = ""
    """Why the job failed."""
    is_ending: bool = False
    """Whether the job was cancelled and is clearing up."""
    notes: tuple[str, ...] = ()
    results: list[str] = field(default_factory=list[str])
    """Lines that say how the job ended."""
    differing: list[DifferingRow] = field(default_factory=list[DifferingRow])
    _phases: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])
    """(done, total, time of the start) by (names of projections, phase)."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _of: str = ""
    _ended: float = 0.0

    def report(self, step: Progress) -> None:
        """Record progress or a note; may be called from any thread."""
        now = time.monotonic()
        with self._lock:
            if step.note:
                self.notes = (*self.notes, step.note)[-_NOTES_MAX:]
                return
            progress = self._phases.setdefault((self._of, step.phase), [0, 0, now])
            progress[:2] = step.done, step.total or progress[1]

    def begin_projection(self, name: str) -> None:
        """Assign further progress to the projection of this name."""
        self._of = name

    def steps(self) -> list[JobPhase]:
        """Return all phases so far, in the order of their start."""
        with self._lock:
            phases = [(key, tuple(values)) for key, values in self._phases.items()]
        # A phase is over when the next one begins.
        ends = [began for _, (_, _, began) in phases[1:]] + [self._ended or time.monotonic()]
        return [
            JobPhase(
                of, phase, int(done), int(total), max(0.0, until - began), until is not ends[-1] or not self.is_running
            )
            for ((of, phase), (done, total, began)), until in zip(phases, ends, strict=True)
        ]

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def end(self, state: Literal["done", "failed", "cancelled"], fault: str = "") -> None:
        """Set the final state of the job."""
        self.state, self.fault, self.is_ending = state, fault, False
        self._ended = time.monotonic()


class Jobs:
    """The jobs of one console."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._jobs: dict[str, BulkJob] = {}

    def all(self) -> list[BulkJob]:
        """Return the running jobs and the last ended ones, newest first."""
        return sorted(self._jobs.values(), key=lambda job: job.at, reverse=True)

    def get(self, job_id: str) -> BulkJob | None:
        return self._jobs.get(job_id)

    async def run(self, job: BulkJob) -> str:
        """Run a job and return its result as text.

        Raises `UsageError` when too many jobs run or another works on the same projection, and what the work raises.
        """
        self._check(job)
        self._jobs[job.id] = job
        for old in islice([listed_job for listed_job in self.all() if not listed_job.is_running], KEPT_MAX, None):
            del self._jobs[old.id]
        try:
            await (self._rebuilt(job) if job.kind == "rebuild" else self._verified(job))
        except asyncio.CancelledError:
            job.end("cancelled")
            raise
        except BaseException as error:
            job.end("failed", str(error) if isinstance(error, EventjetError) else type(error).__name__)
            raise
        job.end("done")
        return "\n".join(job.results)

    def _check(self, job: BulkJob) -> None:
        running = [other_job for other_job in self._jobs.values() if other_job.is_running]
        for other_job in running:
            shared = set(other_job.names) & set(job.names)
            if shared:
                raise UsageError(
                    f"A {_NOUN[other_job.kind]} of {', '.join(sorted(shared))} runs already. Wait, or cancel it."
                )
        if len(running) >= RUNNING_MAX:
            raise UsageError(f"{RUNNING_MAX} jobs run in this console already. Wait for one, or cancel it.")

    async def _rebuilt(self, job: BulkJob) -> None:
        job.begin_projection(", ".join(job.names))
        app, settings = self._sources.app, self._sources.settings
        report = await rebuild(app, job.names, settings, **_how(job))
        job.results = list(rebuild_lines(report))

    async def _verified(self, job: BulkJob) -> None:
        app, settings = self._sources.app, self._sources.settings
        for name in job.names:
            job.begin_projection(name)
            report = await verify(app, name, settings, **_how(job))
            summary = f"{name} at position {report.position:,}: {counted(report.differences, 'difference')}"
            job.results.append(f"{summary} in {counted(report.rows, 'row')}; {spent(report.seconds)}")
            job.differing += _differing(report, app.projections[name])


_NOUN: Mapping[Kind, str] = {"rebuild": "rebuild", "verify": "verification"}


def _how(job: BulkJob) -> dict[str, Any]:
    engine = options_of(EngineOptions(job.engine))
    return {"engine": engine, "from_archive": job.from_archive or None, "progress": job.report}


def _differing(report: VerifyReport, resolved: AnyResolved) -> list[DifferingRow]:
    private, is_fold = resolved.is_private, isinstance(resolved, ResolvedProjection)
    return [
        DifferingRow(
            projection=report.projection,
            key=key_text(difference.key),
            as_json=json.dumps(list(difference.key), default=str) if is_fold else "",
            said=difference_text(difference, private=private)
            if difference.live is None or difference.expected is None
            else "",
            columns=differing_columns(difference, private=private)
            if difference.live is not None and difference.expected is not None
            else (),
            since=difference.since,
            position=difference.position,
        )
        for difference in report.examples
    ]
