"""What is examined, the report that gathers the findings of one part, and how far another clock is from this one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

from eventjet.errors import ApiRefused, Forbidden, LogUnusable, Unreachable
from eventjet.findings import Finding, Level
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings

NAMED_MAX = 10
"""Names of one kind that are written out."""
FOUND_MAX = 100
"""Findings of one part; what comes beyond is counted."""
SKEW_MAX_S = 2.0
"""What machines that follow NTP stay well below, and what people notice in a lag."""
_CLOCK_COSTS = {
    "server": "deadlines of processes, `recorded_at`, `--since` and every lag in seconds are off by as much",
    "database": "how long ago a worker was seen, and when an event was quarantined, are off by as much",
}
_COST_UNUSABLE = "nothing that needs it works"


@dataclass(frozen=True, slots=True)
class Installation:
    """What is examined, and how long that may take."""

    app: Application
    settings: Settings
    monitoring: tuple[str, ...]
    """URLs of the servers' monitoring endpoints, checked; the more of them, the more is known."""
    timeout_s: float
    """For all of it."""
    clock: Callable[[], float]
    """Seconds since 1970 as this machine has them."""


@dataclass(slots=True)
class Report:
    """The findings of one part. One thread adds, another may read at any time."""

    part: str
    found: list[Finding] = field(default_factory=list[Finding])
    left_out: int = 0

    def add(self, level: Level, check: str, what: str, cost: str = "", fix: str = "") -> None:
        """Add a finding; `check` is its name for programs."""
        if len(self.found) < FOUND_MAX:
            self.found.append(Finding(self.part, check, level, what, cost, fix))
        else:
            self.left_out += 1

    ok = partialmethod(add, Level.OK)
    note = partialmethod(add, Level.NOTE)
    unknown = partialmethod(add, Level.UNKNOWN)
    warning = partialmethod(add, Level.WARNING)
    fault = partialmethod(add, Level.FAULT)
    unreachable = partialmethod(add, Level.UNREACHABLE)

    @contextmanager
    def guarded(self, check: str, *, reported_by: str = "") -> Generator[None]:
        """Report a missing right within the block, a refusal, and what says that the log is no use.

        The latter may be `reported_by` another part. A server that does not answer ends the part: it would be waited
        for once more at every look.
        """
        try:
            yield
        except Forbidden as error:
            self.forbidden(check, error)
        except LogUnusable as error:
            if reported_by:
                self.unknown(check, f"not looked at: the log cannot be used (see {reported_by})")
            else:
                self.unusable(check, error)
        except ApiRefused as error:
            what = f"the server refused {error.subject}: {error.description} ({error.err_code})"
            self.fault(check, what, _COST_UNUSABLE, "Look at the server's log.")

    def forbidden(self, check: str, error: Forbidden) -> None:
        """Add that these credentials may not look."""
        what = f"not allowed to know: these credentials may not use {error.subject}"
        allow = f'Allow `publish: "{error.subject}"`, or use those of the role `admin` (`eventjet nats-config`).'
        self.unknown(check, what, "it is not looked at", error.remedy or allow)

    def unusable(self, check: str, error: Unreachable, cost: str = "") -> None:
        """Add that something is there and cannot be used."""
        self.fault(check, f"{error.component}: {error.reason}", cost or _COST_UNUSABLE, error.remedy)

    def no_server(self) -> None:
        """Add that a part which needs NATS was not looked at."""
        self.unknown("reach", "not looked at: no server answered, or not in time (see server)")


def named(names: Iterable[Any]) -> str:
    """Return at most ten names in words."""
    known = [str(name) for name in names]
    more = len(known) - NAMED_MAX
    return ", ".join(known[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def skew(before: float, there: float, after: float) -> float:
    """Return how far `there` is ahead (below 0: behind), at the least: it was asked between `before` and `after`."""
    return there - after if there > after else min(0.0, there - before)


def check_clock(report: Report, whose: str, where: str, times: tuple[float, float, float]) -> None:
    """Compare the clock of a `server` or a `database` with this machine's; `times` are as for `skew`."""
    ahead_s = skew(*times)
    if abs(ahead_s) <= SKEW_MAX_S:
        report.ok("clock", f"the clock of {where} agrees with this machine's")
        return
    way = "ahead of" if ahead_s > 0 else "behind"
    report.warning(
        "clock",
        f"the clock of {where} is {abs(ahead_s):,.1f} s {way} this machine's",
        f"{_CLOCK_COSTS[whose]}; what is ordered and what is counted is not",
        "Run an NTP service, such as chrony, on both machines.",
    )
