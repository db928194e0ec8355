"""Run every part of the examination in its own thread with one deadline, so that a part that hangs hides no other."""

from __future__ import annotations

import importlib.util
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from eventjet.doctor.database import check_database
from eventjet.doctor.report import Installation, Report
from eventjet.doctor.server import check_monitoring, check_servers
from eventjet.doctor.streams import check_streams
from eventjet.doctor.subscriptions import check_reactions, check_read_models
from eventjet.errors import EventjetError, Forbidden, LakeRefused, LogUnusable, StoreError, Unauthorized, Unreachable
from eventjet.findings import Finding, Level
from eventjet.lake import status
from eventjet.runtime import run_async
from eventjet.spark.session import find_java
from eventjet.text import counted, listed
from eventjet.urls import shown_master

T = TypeVar("T")

_REPORT_S = 0.3
"""Seconds before the deadline at which a part that waits for another gives up, so that it can still report."""
_UNSEEN = "what rests on it was not looked at"
_SYNC = "The next `eventjet lake sync` makes it."
_LOCAL = "`--engine local` rebuilds in one process, without Spark and Java"


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of an examination."""

    app: str
    findings: tuple[Finding, ...]
    """All findings, by part, in the order in which the parts are listed."""
    left_out: int
    """Number of findings that exceed the limit of a part and are not listed."""
    own_fault: Exception | None = None
    """An unexpected error, of eventjet itself or of the app's own code; None where there was none."""

    @property
    def counts(self) -> Mapping[Level, int]:
        """Return the number of findings of each level."""
        counts = Counter(finding.level for finding in self.findings)
        return {level: counts[level] for level in Level}


def examine(installation: Installation) -> Examined:
    """Check every part of an installation, and change nothing. Blocks for little more than `timeout_s` at the most."""
    deadline = time.monotonic() + installation.timeout_s

    def part(name: str, check: Callable[..., T], *needs: _Part[Any]) -> _Part[T]:
        """Return a part whose check gets the outcomes of other parts as functions that wait for them."""
        outcomes = [job.outcome for job in needs]
        return _Part(name, lambda report: check(installation, report, *outcomes), deadline)

    server = part("server", check_servers)
    database = part("database", check_database)
    parts: list[_Part[Any]] = [
        server,
        part("monitoring", check_monitoring, server),
        part("streams", check_streams, server),
        database,
        part("read models", check_read_models, server, database),
        part("reactions", check_reactions, server),
        part("lake", check_lake, server),
        part("environment", check_environment),
    ]
    for job in parts:
        job.start()
    for job in parts:
        job.join()
    return Examined(
        installation.app.name,
        tuple(finding for job in parts for finding in job.findings()),
        sum(job.report.left_out for job in parts),
        next((job.own_fault for job in parts if job.own_fault is not None), None),
    )


class _Part(Generic[T]):
    """One part of the examination, in a daemon thread that is abandoned when its time is over."""

    def __init__(self, name: str, check: Callable[[Report], T], deadline: float) -> None:
        self.report = Report(name)
        self.own_fault: Exception | None = None
        self._check = check
        self._deadline = deadline
        self._result: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, name=f"eventjet doctor {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def outcome(self) -> T | None:
        """Wait for the result of the check; None if it fails, or comes too late for the caller to report on it."""
        try:
            return self._result.result(max(0.0, self._deadline - _REPORT_S - time.monotonic()))
        except Exception:  # noqa: BLE001 - the part reports it itself, of a time that was too short too
            return None

    def join(self) -> None:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))

    def findings(self) -> list[Finding]:
        """Return the findings so far, with a finding of the level unreachable where the check still runs."""
        findings = list(self.report.findings)
        if self._thread.is_alive():
            what = "it did not answer in time, so the rest of it was not looked at"
            fix = "Look at its load, or allow more with `--timeout SECONDS`."
            findings.append(Finding(self.report.part, "time", Level.UNREACHABLE, what, _UNSEEN, fix))
        return findings

    def _run(self) -> None:
        try:
            result = self._check(self.report)
        except Exception as error:  # noqa: BLE001 - one part must not hide what the others find
            self._report_error(error)
            self._result.set_exception(error)
        else:
            self._result.set_result(result)

    def _report_error(self, error: Exception) -> None:
        report = self.report
        match error:
            case Unauthorized():
                report.unreachable("access", f"it refused the credentials ({error.reason})", _UNSEEN, error.remedy)
            case Forbidden():
                report.forbidden("access", error)
            case LogUnusable():
                report.unusable("log", error)
            case Unreachable():
                report.unreachable("reach", f"{error.component}: {error.reason}", _UNSEEN, error.remedy)
            case StoreError() | OSError():
                report.unreachable("reach", str(error), _UNSEEN, "Look at the server's log, then try again.")
            case EventjetError():
                report.fault("use", str(error), _UNSEEN)
            case _:
                self.own_fault = error


def check_lake(installation: Installation, report: Report, servers: Callable[[], object]) -> None:
    """Check how far the tables of the lake in `EVENTJET_LAKE` are, and whether they are of this log."""
    settings = installation.settings
    if settings.lake is None:
        return
    if servers() is None:
        report.no_server()
        return
    try:
        lake = run_async(
            status(
                installation.app,
                settings.lake,
                settings,
                table_format=settings.lake_format,
                catalog=settings.lake_catalog,
            )
        )
    except LakeRefused as error:
        what = f"the table {error.table} of {error.url} cannot be used: {error.reason}"
        report.fault("table", what, "the lake does not follow the log", error.remedy)
        return
    events = [table for table in lake.tables if not table.is_read_model]
    positions = [table.position for table in events if table.position is not None]
    if not positions:
        what = f"{lake.url} has no {lake.format} tables of {lake.stream}"
        report.warning("tables", what, "nobody can read them", "Run `eventjet lake sync`.")
        return
    if len(positions) < len(events):
        new = listed(table.name for table in events if table.position is None)
        report.note("tables", f"{lake.url} has no table {new} yet", "its events are in `events` only", _SYNC)
    if lake.undeclared:
        what = f"{lake.url} has {listed(lake.undeclared)}, of no event and no projection that the app declares"
        cost = "nothing keeps it up to date, and who reads it does not see that"
        report.note("tables", what, cost, "Delete what nobody reads any more; renamed events are under their new name.")
    behind = counted(max(0, lake.last - min(positions)), "event")
    report.ok("position", f"{lake.url} has the log up to position {min(positions):,}, {behind} behind")
    if read_models := [f"{table.name} as of {table.position:,}" for table in lake.tables if table.is_read_model]:
        report.ok("read models", f"{lake.url} has {listed(read_models)}")


def check_environment(_installation: Installation | None, report: Report) -> None:
    """Check the versions of eventjet and Python, and what rebuilds on Spark need, without importing PySpark."""
    report.ok("python", f"eventjet {version('eventjet')} on Python {platform.python_version()}")
    if importlib.util.find_spec("pyspark") is None:
        cost = f"no rebuild on several cores; {_LOCAL}"
        report.note("spark", "Spark is not installed", cost, 'pip install "eventjet[spark]"')
        return
    spark = f"PySpark {version('pyspark')}"
    remote = os.environ.get("SPARK_REMOTE")
    if remote:
        report.ok("spark", f"{spark}, which works on {shown_master(remote)}")
        return
    try:
        java = find_java()
    except Unreachable as error:
        cost = f"rebuilds on Spark on this machine fail; {_LOCAL}"
        report.warning("java", f"{spark} has no Java: {error.reason}", cost, error.remedy)
        return
    report.ok("spark", f"{spark} with Java {java.version} of {java.origin}")
