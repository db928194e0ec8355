"""Two trials of `python -m tests.faults`, as small as they can be."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.trials import limits, processes
from tests.faults.trials.report import Outcome
from tests.faults.trials.trial import SCENARIOS, Options, Trial


@pytest.mark.parametrize("run", [processes.kill_single, limits.max_bytes])
def test_a_trial_succeeds(run: Callable[[Trial], None], tmp_path: Path) -> None:
    (trial_scenario,) = [entry for entry in SCENARIOS.values() if entry.run is run]
    with ExitStack() as stack:
        trial = Trial(tmp_path, Options(rounds=1, seconds=0.4), stack, random.Random(7))
        trial_scenario.run(trial)
    outcome = Outcome(trial_scenario, trial.figures, trial.notes)
    assert not outcome.failed, outcome.line()
    assert trial.figures.acked >= 20
