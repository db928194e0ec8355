"""A Spark job followed while it runs: its progress is reported, and it is interrupted when nobody wants it any more."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from eventjet.errors import RebuildError
from eventjet.rebuild.progress import Phase, Stopped, Watch
from eventjet.spark.session import first_line, is_remote

_POLL_S = 0.25
_OURS = re.compile(r"^eventjet\.[\w.]+: (?P<told>.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?P<told>[A-Za-z_][\w.]*(?:Error|Exception|Failure)\b.*)$", re.MULTILINE)


@contextmanager
def following(spark: Any, watch: Watch, phase: Phase, done: int, share: int, total: int) -> Generator[None]:
    """Report progress from a thread, and interrupt the job soon after it is not wanted any more.

    The job is `share` of the phase's `total`, after what was `done`. What Spark raises becomes a `RebuildError`.
    """
    ended = threading.Event()
    seen = _Stages()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            try:
                watch.check()
                # A job does not fail because its progress cannot be told.
                with suppress(Exception):
                    watch.tell(phase, done + int(share * seen.fraction(spark)), total)
            except Stopped:
                with suppress(Exception):
                    spark.interruptAll()
                return

    thread = threading.Thread(target=follow, name="eventjet-spark-progress", daemon=True)
    thread.start()
    try:
        with seen.told_by(spark):
            yield
    except RebuildError:
        raise
    except Exception as error:
        # After an interruption Spark's error says nothing: the work was stopped.
        watch.check()
        raise RebuildError(f"Spark could not finish: {_reason_of(error)}") from error
    finally:
        ended.set()
        thread.join()


class _Stages:
    """How much of the running jobs is done, in tasks: classic Spark is asked, a Spark Connect server tells."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[int, int]] = {}
        self._told = 0.0

    @contextmanager
    def told_by(self, spark: Any) -> Generator[None]:
        """Listen to a Spark Connect server meanwhile."""
        if not is_remote(spark):
            yield
            return
        spark.registerProgressHandler(self._take)
        try:
            yield
        finally:
            spark.removeProgressHandler(self._take)

    def fraction(self, spark: Any) -> float:
        """0 while nothing is known; it never goes back when a job turns out to have more stages."""
        if not is_remote(spark):
            self._ask(spark.sparkContext.statusTracker())
        totals = list(self._totals.values())
        total = sum(tasks for _, tasks in totals)
        done = sum(completed for completed, _ in totals) / total if total else 0.0
        self._told = max(self._told, done)
        return self._told

    def _ask(self, tracker: Any) -> None:
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                self._totals[stage] = (info.numCompletedTasks, info.numTasks)
        for stage in set(self._totals) - set(tracker.getActiveStageIds()):
            total = self._totals[stage][1]
            self._totals[stage] = (total, total)

    def _take(self, stages: Any, **_: Any) -> None:
        self._totals |= {one.stage_id: (one.num_completed_tasks, one.num_tasks) for one in stages or ()}


def _reason_of(error: Exception) -> str:
    """The innermost sentence of what a task raised, out of Spark's many lines."""
    sentences = _OURS.findall(str(error)) or _RAISED.findall(str(error))
    return sentences[-1] if sentences else first_line(error)
