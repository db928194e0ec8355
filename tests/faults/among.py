"""Workers and rebuilds with fold processes as the fault tests start them, and what shows that these folded: `divided`.

With one process (`tests.among`) the worker or the rebuild folds itself. With several a test has to see that they were
used, else it could not fail over them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.audit import Audit
    from tests.faults.processes import WorkerProcess

FOLDING = "EVENTJET_TEST_FOLDING"
"""The variable that has the number of fold processes of `tests.faults.worker`."""
SLOW = "EVENTJET_TEST_SLOW"
"""The variable that has the process id of a worker that is slow alone."""
ALONE_S = 0.02
"""What such a worker takes for an event alone: it falls behind, and its fold processes catch up."""
BATCH_MAX = 5
"""Of a worker with fold processes, so that 20 events are far behind."""
BOUND_S = 4.0
"""How long a fold process of such a worker may take for a batch, before it counts as lost."""
TURN_S = 6.0
"""How long a projection of such a worker has them while another one waits: long enough to see that one is lost."""
PATIENCE = "EVENTJET_TEST_PATIENCE_S"
"""The variable that has the same for fold processes of a rebuild; without it they have as long as they have."""
DIVIDES = "processes fold what comes after"
_DIVISION = re.compile(r"(\S+): \d+ processes fold what comes after position (\d+)")


def divisions(logged: str) -> list[tuple[str, int]]:
    """Each time that a worker says it divides its work: the projection, and the position it begins after."""
    return [(name, int(position)) for name, position in _DIVISION.findall(logged)]


def divided(workers: Iterable[WorkerProcess], audit: Audit) -> int:
    """Terms of these workers in which what fold processes made was committed: a commit begins where they began."""
    commits = {(one.worker, one.name, one.before) for one in audit.commits}
    found = [(str(one.pid), name, position) for one in workers for name, position in divisions(one.logged())]
    return sum(one in commits for one in found)
