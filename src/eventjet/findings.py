"""Findings of checks, as the doctor, an audit of the log and a verification of rows report them. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, but an operator should know it."""
    UNKNOWN = "unknown"
    """The check is not possible from here, or with these credentials."""
    WARNING = "warning"
    """Everything works now, but an outage or a fault would cost something."""
    FAULT = "fault"
    """Something does not work, or data may be lost or is lost."""
    UNREACHABLE = "unreachable"
    """A component did not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check: how bad it is, what it leads to and how to repair it."""

    part: str
    """The part of the installation that was checked: `streams`, `database`, `log`."""
    check: str
    """The stable name of the check, for programs."""
    level: Level
    what: str
    cost: str = ""
    """What happens if it is not repaired."""
    fix: str = ""
    """The command, or the line of configuration, that repairs it."""
