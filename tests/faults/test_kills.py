"""Workers killed and stopped at every failpoint while events arrive: nothing lost, repeated or out of order."""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack
from itertools import product
from statistics import median

import pytest

from eventjet import failpoints
from tests.faults.audit import Audit
from tests.faults.chain import LEASE_S, Chain
from tests.faults.processes import Fault
from tests.faults.scene import Scene

KILLS = int(os.environ.get("EVENTJET_TEST_KILLS", "14"))
"""How many times a worker is killed or stopped, on each database; 28 reach every failpoint in both ways."""
EVENTS = int(os.environ.get("EVENTJET_TEST_EVENTS", str(100 * KILLS)))
"""Events that arrive meanwhile."""
PLACES = ("idle", *(name for name in failpoints.NAMES if name.startswith("worker.")))
"""Failpoints of a revision that takes over are in `test_revision_edges`."""
OFTEN = (
    "worker.batch_taken",
    "worker.batch_folded",
    "worker.before_commit",
    "worker.rows_written",
    "worker.after_commit",
)
"""Failpoints that every batch reaches, so they are armed for a later one."""


def plan(kills: int, first: str) -> list[Fault]:
    """Return every place in both ways, again and again, shuffled; a short plan has half of them in the `first` way."""
    chance = random.Random(kills)
    actions = (first, "stop" if first == "kill" else "kill")
    every = [(name, actions[(index + turn) % 2]) for turn, (index, name) in product((0, 1), enumerate(PLACES))]
    faults: list[Fault] = []
    while len(faults) < kills:
        part = every[: kills - len(faults)]
        chance.shuffle(part)
        faults += [Fault(name, action, chance.randrange(1, 9) if name in OFTEN else 1) for name, action in part]
    return faults


def coverage(done: Counter[Fault]) -> list[str]:
    """Return a line for each place: how often it was reached in each way."""
    return [
        f"  {name:24} killed {done[Fault(name, 'kill')]:3}, stopped and revived {done[Fault(name, 'stop')]:3}"
        for name in PLACES
    ]


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * KILLS)
def test_workers_killed_and_stopped_at_every_step_lose_and_repeat_nothing(stage: Scene, processes: ExitStack) -> None:
    faults = plan(KILLS, "stop" if stage.is_sqlite else "kill")
    chain = Chain(stage, processes, EVENTS)
    chain.run(faults)
    verdict = stage.finish()
    audit = Audit.read(stage.ledger.settings.database)
    stage.say(f"{chain.done.total()} kills, {chain.under_load} while events arrived: {verdict}")
    stage.say(f"rows equal to the fold of the log at each of {stage.checks} looks in between; {audit}")
    stage.say(f"{chain.refused} of those revived were refused a write, {chain.locked} held the database while stopped")
    if chain.takeovers_s:
        took_s = f"{median(chain.takeovers_s):.2f} s in the middle, {max(chain.takeovers_s):.2f} s at most"
        many = len(chain.takeovers_s)
        stage.say(f"workers that stood by took leases of {LEASE_S} s over from stopped ones {many} times: {took_s}")
    stage.summary.extend(coverage(chain.done))
    assert verdict.right
    assert not audit.zombies
    assert not audit.breaks
    assert chain.done.total() == KILLS
    assert {fault.name for fault in chain.done} == set(PLACES)
    assert chain.under_load > KILLS / 3
