"""Read models made again from the log, beside the live ones, and proofs that a live one is what the log says.

`rebuild` plans at one pinned position, folds on Spark or locally into a shadow, checks it, catches it up and swaps it
in; `verify` compares a live read model with such a shadow; `build_snapshots` folds aggregates instead. None of them
pauses anything.
"""

from eventjet.projections.app_ref import AppRef
from eventjet.rebuild.plan import ENGINES, EngineName
from eventjet.rebuild.preview import Candidate, Preview, preview
from eventjet.rebuild.progress import Progress
from eventjet.rebuild.runner import RebuildReport, Rebuilt, rebuild
from eventjet.rebuild.snapshots import SnapshotReport, build_snapshots
from eventjet.rebuild.verify import Difference, VerifyReport, verify

__all__ = [
    "ENGINES",
    "AppRef",
    "Candidate",
    "Difference",
    "EngineName",
    "Preview",
    "Progress",
    "RebuildReport",
    "Rebuilt",
    "SnapshotReport",
    "VerifyReport",
    "build_snapshots",
    "preview",
    "rebuild",
    "verify",
]
