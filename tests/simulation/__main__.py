"""`python -m tests.simulation`: run schedules and print what they covered, or the trace of one."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.campaign import Report, run_on_all_processors, traced


def main() -> int:
    """Exit status 0 when every promise held, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trace", type=int, metavar="SEED", help="print the trace of one schedule and end")
    options = parser.parse_args()
    if options.trace is not None:
        lines, broken = traced(options.trace)
        sys.stdout.write("\n".join(lines) + "\n")
        if broken is not None:
            sys.stdout.write(f"BROKEN: {broken}\n")
        return broken is not None
    started = told = time.monotonic()

    def progress(report: Report) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= 5.0:
            told = now
            rate = report.schedules / (now - started)
            sys.stdout.write(f"{report.schedules:,} of {options.schedules:,} schedules, {rate:,.0f}/s\n")
            sys.stdout.flush()

    report = run_on_all_processors(options.first_seed, options.schedules, progress)
    seconds = time.monotonic() - started
    for name, count in sorted(report.counts.items()):
        sys.stdout.write(f"{count:12,}  {name}\n")
    last_seed = options.first_seed + options.schedules - 1
    sys.stdout.write(
        f"{report.schedules:,} schedules, seeds {options.first_seed:,} to {last_seed:,}, in {seconds:,.1f} s "
        f"({report.schedules / seconds:,.0f}/s): {len(report.broken)} broke a promise\n"
    )
    for seed, broken in report.broken[:20]:
        sys.stdout.write(f"seed {seed}: {broken} (python -m tests.simulation --trace {seed})\n")
    return bool(report.broken)


if __name__ == "__main__":
    raise SystemExit(main())
