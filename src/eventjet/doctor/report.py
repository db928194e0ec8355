"""The installation to examine, the report with the findings of one part, and the comparison of clocks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod

from eventjet.errors import ApiRefused, Forbidden, LogUnusable, Unreachable
from eventjet.findings import Finding, Level
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings

FINDINGS_MAX = 100
"""Findings that one part lists at most; further findings are counted."""
SKEW_MAX_S = 2.0
"""Skew of clocks that is tolerated: machines with NTP stay well below, and people notice more in a lag."""
_CLOCK_COSTS = {
    "server": "deadlines of processes, `recorded_at`, `--since` and every lag in seconds are off by as much",
    "database": "how long ago a worker was seen, and when an event was quarantined, are off by as much",
}
_COST_UNUSABLE = "nothing that needs it works"


@dataclass(frozen=True, slots=True)
class Installation:
    """An installation to examine, and how long that may take."""

    app: Application
    settings: Settings
    monitoring: tuple[str, ...]
    """Validated URLs of the servers' monitoring endpoints; the more servers have one, the more can be checked."""
    timeout_s: float
    """Seconds for the whole examination."""
    clock: Callable[[], float]
    """Return this machine's time in seconds since 1970."""


@dataclass(slots=True)
class Report:
    """The findings of one part. One thread adds findings; another may read them at any time."""

    part: str
    findings: list[Finding] = field(default_factory=list[Finding])
    left_out: int = 0

    def add(self, level: Level, check: str, what: str, cost: str = "", fix: str = "") -> None:
        """Add a finding; `check` is the name that programs know it by."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(self.part, check, level, what, cost, fix))
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
        """Turn a missing permission, a refusal by the server, and an unusable log within the block into findings.

        `reported_by` names the part that reports the unusable log, if it is another one. A server that does not
        answer ends the whole part, since every further check would wait for it once more.
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
        """Add the finding that these credentials lack the permission to check something."""
        what = f"not allowed to know: these credentials may not use {error.subject}"
        allow = f'Allow `publish: "{error.subject}"`, or use those of the role `admin` (`eventjet nats-config`).'
        self.unknown(check, what, "it is not looked at", error.remedy or allow)

    def unusable(self, check: str, error: Unreachable, cost: str = "") -> None:
        """Add the finding that something exists and cannot be used."""
        self.fault(check, f"{error.component}: {error.reason}", cost or _COST_UNUSABLE, error.remedy)

    def no_server(self) -> None:
        """Add the finding that this part was not checked, since it needs a server and none answered."""
        self.unknown("reach", "not looked at: no server answered, or not in time (see server)")


def skew(before: float, remote_time: float, after: float) -> float:
    """Return the least skew, negative if behind, of a clock that showed `remote_time` between two times of ours."""
    return remote_time - after if remote_time > after else min(0.0, remote_time - before)


def check_clock(report: Report, component: str, where: str, times: tuple[float, float, float]) -> None:
    """Compare the clock of a `server` or a `database` with this machine's; `times` are as for `skew`."""
    ahead_s = skew(*times)
    if abs(ahead_s) <= SKEW_MAX_S:
        report.ok("clock", f"the clock of {where} agrees with this machine's")
        return
    way = "ahead of" if ahead_s > 0 else "behind"
    report.warning(
        "clock",
        f"the clock of {where} is {abs(ahead_s):,.1f} s {way} this machine's",
        f"{_CLOCK_COSTS[component]}; what is ordered and what is counted is not",
        "Run an NTP service, such as chrony, on both machines.",
    )
