"""Run bulk jobs over the log; writers, workers and readers go on meanwhile.

* `rebuild` plans at one pinned position, folds on Spark or locally into a shadow table, checks the shadow, catches it
  up and swaps it in
* `verify` compares a live read model with such a shadow
* `build_snapshots` folds aggregates instead of projections
* `archive` seals the log's past in files, and `restore` publishes an archive again
* `audit` checks the log itself

Each name is imported when it is first used, because a Spark task needs only a few of them.
"""

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.archive.republish import Restored
    from eventjet.findings import Finding, Level
    from eventjet.projections.app_ref import AppRef
    from eventjet.rebuild.archiving import ArchiveReport, archive, restore
    from eventjet.rebuild.auditing import AuditReport, audit
    from eventjet.rebuild.job import EngineOptions
    from eventjet.rebuild.log_audit import Kind, LogFinding, Place
    from eventjet.rebuild.plan import ENGINES, EngineName
    from eventjet.rebuild.progress import Progress
    from eventjet.rebuild.runner import Candidate, Preview, RebuildReport, Rebuilt, preview, rebuild
    from eventjet.rebuild.snapshots import SnapshotReport, build_snapshots
    from eventjet.rebuild.verifying import Difference, VerifyReport, verify

__all__ = [
    "ENGINES",
    "AppRef",
    "ArchiveReport",
    "AuditReport",
    "Candidate",
    "Difference",
    "EngineName",
    "EngineOptions",
    "Finding",
    "Kind",
    "Level",
    "LogFinding",
    "Place",
    "Preview",
    "Progress",
    "RebuildReport",
    "Rebuilt",
    "Restored",
    "SnapshotReport",
    "VerifyReport",
    "archive",
    "audit",
    "build_snapshots",
    "preview",
    "rebuild",
    "restore",
    "verify",
]

__getattr__ = lazy(
    __name__,
    {
        "eventjet.archive.republish": "Restored",
        "eventjet.findings": "Finding Level",
        "eventjet.projections.app_ref": "AppRef",
        "eventjet.rebuild.archiving": "ArchiveReport archive restore",
        "eventjet.rebuild.auditing": "AuditReport audit",
        "eventjet.rebuild.job": "EngineOptions",
        "eventjet.rebuild.log_audit": "Kind LogFinding Place",
        "eventjet.rebuild.plan": "ENGINES EngineName",
        "eventjet.rebuild.progress": "Progress",
        "eventjet.rebuild.runner": "Candidate Preview RebuildReport Rebuilt preview rebuild",
        "eventjet.rebuild.snapshots": "SnapshotReport build_snapshots",
        "eventjet.rebuild.verifying": "Difference VerifyReport verify",
    },
)
