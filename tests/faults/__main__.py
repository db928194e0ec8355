"""`python -m tests.faults`: run the trials (and the parts that pytest runs), and write a report of their counts."""

from __future__ import annotations

import argparse
import logging
import random
import sys
from contextlib import suppress
from pathlib import Path

from tests.faults.trials import report
from tests.faults.trials.machine import apart
from tests.faults.trials.report import Outcome
from tests.faults.trials.running import load, outcomes_of
from tests.faults.trials.trial import SCENARIOS, Options


def main() -> int:
    """Return exit status 0 when every scenario held, and every control has lost what it must; 1 otherwise."""
    load()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run's choices; drawn when it is not given")
    parser.add_argument("--report", type=Path, help="the Markdown file to write")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=SCENARIOS)
    parser.add_argument("--root", action="store_true", help="also what needs disks and networks of its own")
    parser.add_argument("--rounds", type=int, default=3, help="how often each does what it does")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long commands run around each fault")
    parser.add_argument("--minutes", type=float, default=10.0, help="of steady load")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios that run at once, each in a process of its own")
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    arguments = parser.parse_args()
    chosen = [SCENARIOS[name] for name in arguments.only] or [
        entry for entry in SCENARIOS.values() if arguments.root == bool(entry.needs)
    ]
    if arguments.list:
        sys.stdout.writelines(f"{entry.name}: {entry.what}\n" for entry in chosen)
        return 0
    if any(entry.needs for entry in chosen):
        with suppress(OSError):  # then each scenario says why
            apart()
    # Failing servers are the subject here.
    logging.disable(logging.ERROR)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    options = Options(seed, arguments.rounds, arguments.seconds, arguments.minutes)
    outcomes: list[Outcome] = []
    for outcome in outcomes_of(chosen, options, arguments.jobs):
        outcomes.append(outcome)
        sys.stdout.write(f"{outcome.line()}\n")
        sys.stdout.flush()
        if arguments.report is not None:
            arguments.report.parent.mkdir(parents=True, exist_ok=True)
            arguments.report.write_text(report.page(outcomes, options), encoding="utf-8")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
