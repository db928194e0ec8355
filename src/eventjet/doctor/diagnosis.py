"""What the doctor looks at, and `Diagnoses`, which gathers the findings of one part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from eventjet.errors import ApiRefused, Forbidden, LogUnusable, Unreachable
from eventjet.findings import Finding, Level
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings

NAMED_MAX = 10
"""Of many things of one kind, so many are named."""
FOUND_MAX = 100
"""Of one part; what comes beyond is counted."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is looked at, and how long that may take."""

    app: Application
    settings: Settings
    monitoring: tuple[str, ...]
    """URLs of the servers' monitoring endpoints, checked; the more of them, the more is known."""
    timeout_s: float
    """For all of it."""
    clock: Callable[[], float]
    """Seconds since 1970 as this machine has them."""


@dataclass(slots=True)
class Diagnoses:
    """Of one part. One thread adds, another may read at any time."""

    part: str
    found: list[Finding] = field(default_factory=list[Finding])
    left_out: int = 0

    def add(self, check: str, level: Level, what: str, cost: str = "", fix: str = "") -> None:
        if len(self.found) < FOUND_MAX:
            self.found.append(Finding(self.part, check, level, what, cost, fix))
        else:
            self.left_out += 1

    def ok(self, check: str, what: str) -> None:
        self.add(check, Level.OK, what)

    @contextmanager
    def guarded(self, check: str, *, told_by: str = "") -> Generator[None]:
        """Within the block a missing right is told, and so are a refusal and what says that the log is no use.

        The latter may be `told_by` another part. A server that does not answer ends the part: it would be waited for
        once more at every look.
        """
        try:
            yield
        except Forbidden as error:
            self.add_forbidden(check, error)
        except LogUnusable as error:
            if told_by:
                self.add(check, Level.UNKNOWN, f"not looked at: the log cannot be used (see {told_by})")
            else:
                self.add_unusable(check, error)
        except ApiRefused as error:
            what = f"the server refused {error.subject}: {error.description} ({error.err_code})"
            self.add(check, Level.FAULT, what, _COST_UNUSABLE, "Look at the server's log.")

    def add_forbidden(self, check: str, error: Forbidden) -> None:
        self.add(
            check,
            Level.UNKNOWN,
            f"not allowed to know: these credentials may not use {error.subject}",
            "it is not looked at",
            error.remedy
            or f'Allow `publish: "{error.subject}"`, or use those of the role `admin` (`eventjet nats-config`).',
        )

    def add_unusable(self, check: str, error: Unreachable, cost: str = "") -> None:
        self.add(check, Level.FAULT, f"{error.component}: {error.reason}", cost or _COST_UNUSABLE, error.remedy)


_COST_UNUSABLE = "nothing that needs it works"


def named(names: Iterable[Any]) -> str:
    """At most ten of them in words."""
    known: Sequence[str] = [str(name) for name in names]
    more = len(known) - NAMED_MAX
    return ", ".join(known[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
