"""Read models made again from the log, beside the live ones, and proofs that a live one is what the log says.

`rebuild` plans at one pinned position, folds on Spark or locally into a shadow, checks it, catches it up and swaps it
in; `verify` compares a live read model with such a shadow. Neither pauses anything.
"""

from eventjet.rebuild.plan import ENGINES, EngineName
from eventjet.rebuild.progress import Progress
from eventjet.rebuild.runner import RebuildReport, Rebuilt, rebuild
from eventjet.rebuild.verify import Difference, VerifyReport, verify
from eventjet.spark.ship import AppRef

__all__ = [
    "ENGINES",
    "AppRef",
    "Difference",
    "EngineName",
    "Progress",
    "RebuildReport",
    "Rebuilt",
    "VerifyReport",
    "rebuild",
    "verify",
]
