"""Jobs: the rebuilds and verifications that this console runs, with progress and results, in memory alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias

from eventjet.app import App
from eventjet.errors import EventjetError, UsageError
from eventjet.operations.reports import difference_text, differing_columns, key_text, rebuild_lines
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved
from eventjet.rebuild import EngineOptions, Progress, VerifyReport, rebuild, verify
from eventjet.rebuild.plan import EngineChoice
from eventjet.settings import Settings
from eventjet.text import counted, spent

Kind: TypeAlias = Literal["rebuild", "verify"]

RUNNING_MAX = 2
"""The most jobs at once, since each may take all cores of this machine."""
ENDED_MAX = 20
"""The most ended jobs whose progress and results are still shown."""
_NOTES_MAX = 20
_NOUNS = {"rebuild": "rebuild", "verify": "verification"}


@dataclass(slots=True)
class _Phase:
    """The progress of one phase of a job."""

    names: str
    """The projections that the phase is about."""
    phase: str
    began: float
    """When it began, by the monotonic clock."""
    done: int = 0
    total: int = 0
    """0 while it is not known."""


@dataclass(slots=True)
class Job:
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
    differing: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Rows that differ from those that the log gives, without private values."""
    _phases: dict[tuple[str, str], _Phase] = field(default_factory=dict[tuple[str, str], _Phase])
    """The phases so far, by names of projections and phase."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def report(self, names: str, step: Progress) -> None:
        """Record progress on these projections, or a note; may be called from any thread."""
        now = time.monotonic()
        with self._lock:
            if step.note:
                self.notes = (*self.notes, step.note)[-_NOTES_MAX:]
                return
            phase = self._phases.setdefault((names, step.phase), _Phase(names, step.phase, now))
            phase.done, phase.total = step.done, step.total or phase.total

    def phases(self) -> list[dict[str, Any]]:
        """Return all phases so far, in the order of their start; a total of 0 is not known."""
        with self._lock:
            phases = [replace(phase) for phase in self._phases.values()]
        if not phases:
            return []
        # A phase is over when the next one begins; the last one, when the job has ended.
        ends = [*(phase.began for phase in phases[1:]), None if self.is_running else self._ended]
        return [
            {
                "names": phase.names,
                "phase": phase.phase,
                "done": phase.done,
                "total": phase.total,
                "seconds": max(0.0, (time.monotonic() if end is None else end) - phase.began),
                "is_over": end is not None,
            }
            for phase, end in zip(phases, ends, strict=True)
        ]

    def end(self, state: Literal["done", "failed", "cancelled"], fault: str = "") -> None:
        """Set the final state of the job."""
        self.state, self.fault, self.is_ending = state, fault, False
        self._ended = time.monotonic()


class Jobs:
    """The jobs of one console."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._jobs: dict[str, Job] = {}

    def all(self) -> list[Job]:
        """Return the running jobs and the last ended ones, newest first."""
        return sorted(self._jobs.values(), key=lambda job: job.at, reverse=True)

    def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    async def run(self, job: Job) -> str:
        """Run a job and return its result as text; raises `UsageError` for too many, or two on one projection."""
        running = [other for other in self._jobs.values() if other.is_running]
        for other in running:
            shared = set(other.names) & set(job.names)
            if shared:
                noun = _NOUNS[other.kind]
                raise UsageError(f"A {noun} of {', '.join(sorted(shared))} runs already. Wait, or cancel it.")
        if len(running) >= RUNNING_MAX:
            raise UsageError(f"{RUNNING_MAX} jobs run in this console already. Wait for one, or cancel it.")
        self._jobs[job.id] = job
        for old in islice([listed_job for listed_job in self.all() if not listed_job.is_running], ENDED_MAX, None):
            del self._jobs[old.id]
        try:
            await self._work(job)
        except asyncio.CancelledError:
            job.end("cancelled")
            raise
        except BaseException as error:
            job.end("failed", str(error) if isinstance(error, EventjetError) else type(error).__name__)
            raise
        job.end("done")
        return "\n".join(job.results)

    async def _work(self, job: Job) -> None:
        app, settings, engine, archive = self._app, self._settings, EngineOptions(job.engine), job.from_archive or None
        if job.kind == "rebuild":
            progress = partial(job.report, ", ".join(job.names))
            report = await rebuild(app, job.names, settings, engine=engine, from_archive=archive, progress=progress)
            job.results = list(rebuild_lines(report))
            return
        for name in job.names:
            progress = partial(job.report, name)
            report = await verify(app, name, settings, engine=engine, from_archive=archive, progress=progress)
            summary = f"{name} at position {report.position:,}: {counted(report.differences, 'difference')}"
            job.results.append(f"{summary} in {counted(report.rows, 'row')}; {spent(report.seconds)}")
            job.differing += _differing(report, self._app.projections[name])


def _differing(report: VerifyReport, resolved: AnyResolved) -> list[dict[str, Any]]:
    private, is_fold = resolved.is_private, isinstance(resolved, ResolvedProjection)
    rows: list[dict[str, Any]] = []
    for difference in report.examples:
        has_both = difference.live is not None and difference.expected is not None
        rows.append(
            {
                "projection": report.projection,
                "key": key_text(difference.key),
                # The page of a row takes its key as JSON; rows of a SQL projection have no page.
                "key_json": json.dumps(list(difference.key), default=str) if is_fold else "",
                "text": "" if has_both else difference_text(difference, private=private),
                "columns": differing_columns(difference, private=private) if has_both else (),
                "since": difference.since,
                "position": difference.position,
            }
        )
    return rows
