"""PURE: how far another clock is from this machine's, and what that costs."""

from __future__ import annotations

from eventjet.doctor.diagnosis import Diagnoses
from eventjet.findings import Level

SKEW_MAX_S = 2.0
"""What machines that follow NTP stay well below, and what people notice in a lag."""

_COSTS = {
    "server": "deadlines of processes, `recorded_at`, `--since` and every lag in seconds are off by as much",
    "database": "how long ago a worker was seen, and when an event was parked, are off by as much",
}


def skew(before: float, there: float, after: float) -> float:
    """How far `there` is ahead (below 0: behind), at the least: it was asked between `before` and `after`."""
    return there - after if there > after else min(0.0, there - before)


def tell_clock(told: Diagnoses, whose: str, where: str, times: tuple[float, float, float]) -> None:
    """Tell of the clock of a `server` or a `database`; `times` are as for `skew`."""
    found = skew(*times)
    if abs(found) <= SKEW_MAX_S:
        told.ok("clock", f"the clock of {where} agrees with this machine's")
        return
    way = "ahead of" if found > 0 else "behind"
    told.add(
        "clock",
        Level.WARNING,
        f"the clock of {where} is {abs(found):,.1f} s {way} this machine's",
        f"{_COSTS[whose]}; what is ordered and what is counted is not",
        "Run an NTP service, such as chrony, on both machines.",
    )
