"""`python -m tests.fuzz --minutes 60`: fuzz every target for its share of the time, and print what breaks a law."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, Target

EXAMPLES = 2_000


def main() -> int:
    """Return exit status 1 when a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="in all")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", action="append", default=[], choices=[target.name for target in TARGETS])
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    chosen = [target for target in TARGETS if target.name in options.only or not options.only]
    broken = 0
    for target in chosen:
        broken += not _hold(target, first, time.monotonic() + options.minutes * 60 / len(chosen))
    sys.stdout.write(f"seed {first}: {broken} of {len(chosen)} targets with a finding\n")
    return int(broken > 0)


def _hold(target: Target, first: int, deadline: float) -> bool:
    """Return whether the target's law held until the deadline."""
    tried = number = 0

    def law(value: object) -> None:
        nonlocal tried
        tried += 1
        target.law(value)

    phases = (Phase.generate, Phase.shrink)
    checks = list(HealthCheck)
    how = settings(max_examples=EXAMPLES, database=None, deadline=None, phases=phases, suppress_health_check=checks)
    while time.monotonic() < deadline:
        try:
            seed(first + number)(how(given(target.inputs)(law)))()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            sys.stdout.write(f"{target.name}: {''.join(traceback.format_exception(error))}\n")
            return False
        number += 1
    sys.stdout.write(f"{target.name}: {tried:,} inputs, its law held\n")
    sys.stdout.flush()
    return True


if __name__ == "__main__":
    raise SystemExit(main())
