"""Provide the tasks of one job on Spark with application and secrets, and report the job's progress."""

from __future__ import annotations

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from eventjet.errors import RebuildError, UsageError
from eventjet.projections.app_ref import AppRef, top_level
from eventjet.rebuild.job import Job
from eventjet.rebuild.progress import Phase, Stopped, Watch
from eventjet.spark.session import Started, first_line, is_remote, scratch_folder
from eventjet.spark.source import connection_options

SHIPPED_BYTES_MAX = 50_000_000
"""The maximum size of a shipped package; a larger package contains data and belongs in the executors' image."""

_DESCRIPTION = "spark.job.description"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_POLL_S = 0.25
_EVENTJET_ERROR = re.compile(r"^eventjet\.[\w.]+: (?P<message>.+)$", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^(?P<message>[A-Za-z_][\w.]*(?:Error|Exception|Failure)\b.*)$", re.MULTILINE)
_CAUSE = re.compile(r"^[ \t]*Caused by: (?P<message>\S.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Provisions:
    """The application, and the access to log and database, for the tasks of one job."""

    job: Job
    started: Started
    options: Mapping[str, str]
    """The options of the source `jetstream`, without positions."""
    secrets: Path
    """The folder of the sealed files that are sent to the session's tasks."""

    def app(self, *, ship: bool) -> AppRef:
        """Return the reference by which tasks import the application; with `ship`, send its package first if needed."""
        reference = self.job.reference()
        return shipped(self.started, reference, self.secrets.parent) if ship else reference


@contextmanager
def provisions(job: Job, started: Started) -> Generator[Provisions]:
    """Yield the provisions of a job; their files are removed from this machine after the `with` block."""
    with scratch_folder() as scratch:
        secrets = scratch / "secrets"
        secrets.mkdir()
        options = {**connection_options(job.settings, secrets), "stream": job.log.stream}
        yield Provisions(job, started, options, secrets)


def shipped(started: Started, app: AppRef, scratch: Path) -> AppRef:
    """Send an application's package to the session's tasks if needed, and return the reference to use in the tasks.

    Tasks on this machine read the application's folder. Tasks on other machines get the top-level package (or module),
    unless it is installed here; then it must be installed there, too.
    """
    if started.local:
        return app
    top = top_level(app.module)
    if top is None:
        return app
    packed = pack(top)
    archive = scratch / f"{top.stem}-{hashlib.sha256(packed).hexdigest()[:12]}.zip"
    archive.write_bytes(packed)
    spark: Any = started.spark
    spark.addArtifacts(str(archive), pyfile=True)
    return replace(app, path=())


def send_files(folder: Path, started: Started) -> None:
    """Send the files of a folder to the tasks of a cluster, through neither plan nor log, until the session ends."""
    spark: Any = started.spark
    for file in sorted(folder.iterdir()) if not started.local else ():
        spark.addArtifacts(str(file), file=True)


def pack(top: Path) -> bytes:
    """Return a module or package as a zip file from which Python can import; equal content gives equal bytes."""
    buffer = io.BytesIO()
    total = 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _contents(top):
            name = path.relative_to(top.parent).as_posix()
            if path.is_dir():
                # In a zip, Python finds packages without `__init__.py` by the entry of their folder.
                archive.writestr(zipfile.ZipInfo(f"{name}/", _EPOCH), b"")
                continue
            data = path.read_bytes()
            total += len(data)
            if total > SHIPPED_BYTES_MAX:
                raise UsageError(
                    f"{top} holds more than {SHIPPED_BYTES_MAX // 1_000_000} MB, too much to send along with a task. "
                    "Install it where the tasks run and pass --no-ship."
                )
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return buffer.getvalue()


def _contents(top: Path) -> Iterator[Path]:
    yield top
    if top.is_dir():
        for path in sorted(top.rglob("*")):
            parts = path.relative_to(top).parts
            if not any(part == "__pycache__" or part.startswith(".") for part in parts):
                yield path


@contextmanager
def named(spark: Any, name: str) -> Generator[str]:
    """Name the jobs of this thread in Spark's own pages, and yield the tag by which only they are interrupted."""
    # Spark takes no comma in a tag, which the pages of Spark Connect show instead of a description.
    tag = f"{name.replace(',', '')} ({token_hex(3)})"
    context = None if is_remote(spark) else spark.sparkContext
    previous = None if context is None else context.getLocalProperty(_DESCRIPTION)
    spark.addTag(tag)
    if context is not None:
        context.setLocalProperty(_DESCRIPTION, name)
    try:
        yield tag
    finally:
        # A session that has ended meanwhile has no jobs that could be named.
        with suppress(Exception):
            spark.removeTag(tag)
            if context is not None:
                context.setLocalProperty(_DESCRIPTION, previous)


@contextmanager
def following(
    spark: Any, watch: Watch, phase: Phase, done: int, share: int, total: int, *, name: str
) -> Generator[None]:
    """Report the progress of a Spark job from a thread, and interrupt the job soon after it was cancelled.

    The job is `share` of the phase's `total`, after the part that was `done`; Spark's own pages show its `name`.
    Spark's errors become `RebuildError`.
    """
    ended = threading.Event()
    stages = _Stages()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            try:
                watch.check()
                # An error of the progress report must not fail the job.
                with suppress(Exception):
                    watch.report(phase, done + int(share * stages.fraction(spark)), total)
            except Stopped:
                with suppress(Exception):
                    spark.interruptTag(tag)
                return

    thread = threading.Thread(target=follow, name="eventjet-spark-progress", daemon=True)
    with named(spark, name) as tag:
        thread.start()
        try:
            with stages.updated_by(spark):
                yield
        except RebuildError:
            raise
        except Exception as error:
            # If the job was interrupted, `check` raises `Stopped`, because Spark's error has no meaning then.
            watch.check()
            raise RebuildError(f"Spark could not finish: {reason_of(error)}") from error
        finally:
            ended.set()
            thread.join()


class _Stages:
    """The completed and total tasks of the running stages; classic Spark is polled, Spark Connect reports by itself."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[int, int]] = {}
        self._fraction = 0.0

    @contextmanager
    def updated_by(self, spark: Any) -> Generator[None]:
        """Receive the progress reports of a Spark Connect session within the `with` block."""
        if not is_remote(spark):
            yield
            return
        spark.registerProgressHandler(self._update)
        try:
            yield
        finally:
            spark.removeProgressHandler(self._update)

    def fraction(self, spark: Any) -> float:
        """Return the completed fraction: 0 while nothing is known, and never smaller when more stages appear."""
        if not is_remote(spark):
            self._poll(spark.sparkContext.statusTracker())
        totals = list(self._totals.values())
        total = sum(tasks for _, tasks in totals)
        done = sum(completed for completed, _ in totals) / total if total else 0.0
        self._fraction = max(self._fraction, done)
        return self._fraction

    def _poll(self, tracker: Any) -> None:
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                self._totals[stage] = (info.numCompletedTasks, info.numTasks)
        for stage in set(self._totals) - set(tracker.getActiveStageIds()):
            total = self._totals[stage][1]
            self._totals[stage] = (total, total)

    def _update(self, stages: Any, **_: Any) -> None:
        self._totals |= {stage.stage_id: (stage.num_completed_tasks, stage.num_tasks) for stage in stages or ()}


def reason_of(error: Exception) -> str:
    """Return the innermost error message of a task from the many lines of Spark's error."""
    text = str(error)
    sentences = _EVENTJET_ERROR.findall(text) or _PYTHON_ERROR.findall(text)
    reason = sentences[-1] if sentences else first_line(error)
    causes = _CAUSE.findall(text) if reason.startswith(("org.apache.", "java.")) else []
    return causes[-1] if causes else reason
