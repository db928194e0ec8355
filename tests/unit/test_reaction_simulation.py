"""Seeded schedules of reactors and processes: the product keeps every promise, and each broken rule is caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.reactions.campaign import run_reactions, run_reactions_on_all_processors, traced_reactions
from tests.simulation.reactions.streams import Rules

ROOT = Path(__file__).parents[2]
SCHEDULES = int(os.environ.get("EVENTJET_TEST_REACTION_SCHEDULES", "200"))
SEEDS_TO_CATCH = 600
"""The number of schedules within which a broken rule must show."""

COVERED = {
    "Hearing", "Reacting", "Transferring", "answer late", "answer lost", "asked to leave", "blocked",
    "connection lost", "deadline: CreditRefused", "deadline: Resumed", "done beyond the cursor", "dropped",
    "handled again", "killed", "killed or stopped after a write", "link lost", "operator paused",
    "operator resumed", "operator retried", "operator set back", "operator set forwards", "quarantined",
    "partitions 1", "partitions 2", "partitions 3", "partitions 4", "request in an outage", "request late",
    "request lost", "retried", "stale read", "stopped", "timer fired", "timer fired twice", "try that fails",
    "try that hangs", "try that passes",
}  # fmt: skip


@pytest.mark.timeout(400)
def test_every_promise_holds_in_all_schedules() -> None:
    report = run_reactions_on_all_processors(0, SCHEDULES)
    assert report.schedules == SCHEDULES
    assert report.broken == []
    assert {name for name, count in report.counts.items() if count >= SCHEDULES // 200} >= COVERED


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(6):
        assert traced_reactions(seed) == traced_reactions(seed)
    assert traced_reactions(1) != traced_reactions(2)


def test_a_trace_is_the_same_in_every_process() -> None:
    traces = {
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--reactions", "--trace", "41"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(traces) == 1
    assert traces.pop()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (Rules(compares=False), "takes back|puts it back"),
        (Rules(atomic=False), "passes position .* over, which was not handled"),
        (Rules(log_compares=False), "more money|was noted 2 times|went "),
        (Rules(on_time=False), "was tried again after|was given up"),
        (Rules(once=False), "was noted 2 times"),
        (Rules(clocks=False), "is tried again below the cursor"),
        (Rules(waits=False), "has not ended"),
        (Rules(orders=False), "was handled before|was handled, and"),
    ],
    ids=[
        "a cursor is written whatever is there",
        "quarantining is not atomic with passing over",
        "an event is stored whatever is there",
        "a timer fires early and says it is time",
        "a handler's commands have no ids",
        "one worker's second is another's three",
        "a process rests on a state without what woke it",
        "the events of an aggregate are handled at once",
    ],
)
@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_broken_rule_is_caught(rules: Rules, says: str) -> None:
    assert is_caught(rules, says, SEEDS_TO_CATCH)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_timer_that_is_cleared_before_it_is_handled_is_caught() -> None:
    """It takes a crash between both, on a process that nothing else wakes: about one schedule in 800."""
    assert is_caught(Rules(clears_last=False), "has not ended", 10 * SEEDS_TO_CATCH)


def is_caught(rules: Rules, says: str, seeds: int) -> bool:
    """Return whether one of that many schedules shows the fault."""
    return any(
        re.search(says, broken) for first in range(0, seeds, 20) for _, broken in run_reactions(first, 20, rules).broken
    )
