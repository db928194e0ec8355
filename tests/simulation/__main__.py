"""`python -m tests.simulation`: run schedules and print what they covered, or the trace of one.

There are two kinds: of saves, and of reactors and processes. Both are run unless one is named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.campaign import Report, run_on_all_processors, traced
from tests.simulation.reactions.campaign import run_reactions_on_all_processors, traced_reactions


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of schedules."""

    name: str
    run: Callable[[int, int, Callable[[Report], object]], Report]
    trace: Callable[[int], tuple[list[str], str | None]]
    share: int
    """The number of schedules of saves for each schedule of this kind: some kinds take longer."""


KINDS = (
    Kind("saves", run_on_all_processors, traced, 1),
    Kind("reactions", run_reactions_on_all_processors, traced_reactions, 20),
)


def main() -> int:
    """Return exit status 0 if every promise held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    for kind in KINDS:
        parser.add_argument(f"--{kind.name}", action="append_const", dest="kinds", const=kind, help="only these")
    parser.add_argument("--schedules", type=int, default=20_000, help="of saves; of both, a 20th are of reactions")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trace", type=int, metavar="SEED", help="print the trace of one schedule and end")
    options = parser.parse_args()
    kinds: list[Kind] = options.kinds or list(KINDS)
    if options.trace is not None:
        return _print_trace(kinds[0], options.trace)
    broken = [
        _run(kind, options.first_seed, options.schedules if options.kinds else options.schedules // kind.share)
        for kind in kinds
    ]
    return any(broken)


def _print_trace(kind: Kind, seed: int) -> bool:
    lines, broken = kind.trace(seed)
    sys.stdout.write("\n".join(lines) + "\n")
    if broken is not None:
        sys.stdout.write(f"BROKEN: {broken}\n")
    return broken is not None


def _run(kind: Kind, first_seed: int, schedules: int) -> bool:
    """Run schedules, print what they covered, and return whether a promise was broken."""
    started = reported = time.monotonic()

    def progress(report: Report) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported >= 5.0:
            reported = now
            rate = report.schedules / (now - started)
            sys.stdout.write(
                f"{report.schedules:,} of {schedules:,} schedules of {kind.name}, {rate:,.0f}/s, "
                f"{len(report.broken)} broken\n"
            )
            sys.stdout.flush()

    report = kind.run(first_seed, schedules, progress)
    seconds = time.monotonic() - started
    for name, count in sorted(report.counts.items()):
        sys.stdout.write(f"{count:12,}  {name}\n")
    sys.stdout.write(
        f"{report.schedules:,} schedules of {kind.name}, seeds {first_seed:,} to {first_seed + schedules - 1:,}, in "
        f"{seconds:,.1f} s ({report.schedules / seconds:,.0f}/s): {len(report.broken)} broke a promise\n"
    )
    for seed, broken in report.broken[:20]:
        sys.stdout.write(f"seed {seed}: {broken} (python -m tests.simulation --{kind.name} --trace {seed})\n")
    return bool(report.broken)


if __name__ == "__main__":
    raise SystemExit(main())
