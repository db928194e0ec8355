"""Run scenarios one after the other, or several at once, each in a process of its own."""

from __future__ import annotations

import importlib
import logging
import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from tests.faults.trials.machine import missing
from tests.faults.trials.report import Outcome
from tests.faults.trials.trial import SCENARIOS, Options, Scenario, Trial
from tests.faults.trials.verdict import Figures

MODULES = ("power", "partition", "processes", "limits", "pasts", "clocks", "snapshots", "parts")


def load() -> None:
    """Import the modules that list scenarios."""
    for name in MODULES:
        importlib.import_module(f"tests.faults.trials.{name}")


def outcomes_of(chosen: Sequence[Scenario], options: Options, jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each scenario; several at once come as they end."""
    if jobs == 1:
        yield from (_tried(entry, options) for entry in chosen)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(_in_a_process, entry.name, options): entry for entry in chosen}
        for done in as_completed(running):
            yield Outcome(running[done], *done.result())


def _in_a_process(name: str, options: Options) -> tuple[Figures, list[str], float, str, str]:
    """Run a scenario in a process of its own, and return what an `Outcome` has beside the scenario."""
    load()
    logging.disable(logging.ERROR)
    outcome = _tried(SCENARIOS[name], options)
    return outcome.figures, outcome.notes, outcome.seconds, outcome.skipped, outcome.error


def _tried(entry: Scenario, options: Options) -> Outcome:
    """Run a scenario; whatever it raises is in its outcome."""
    for need in entry.needs:
        if (why := missing(need)) is not None:
            return Outcome(entry, skipped=why)
    began = time.monotonic()
    outcome = Outcome(entry)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventjet-faults-")))
        # The embedded PostgreSQL, which root may not run, passes through.
        folder.chmod(0o711)
        trial = Trial(folder, options, stack, random.Random(f"{options.seed}/{entry.name}"))
        try:
            entry.run(trial)
        except Exception as error:  # noqa: BLE001 - the report says it, and the next one runs
            outcome.error = "".join(traceback.format_exception(error))
        outcome.figures, outcome.notes = trial.figures, trial.notes
    outcome.seconds = time.monotonic() - began
    return outcome
