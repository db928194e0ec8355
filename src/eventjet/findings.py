"""What a check found, in the words that the doctor, an audit of the log and a verification of rows share. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, and somebody should know."""
    UNKNOWN = "unknown"
    """It cannot be seen from here, or with these credentials."""
    WARNING = "warning"
    """It works now, and costs something on a bad day."""
    FAULT = "fault"
    """Something stands still, may be lost, or is lost."""
    UNREACHABLE = "unreachable"
    """A component did not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found: how bad it is, what it costs and what mends it."""

    part: str
    """What was looked at: `streams`, `database`, `log`."""
    check: str
    """The name of the check for programs, which stays."""
    level: Level
    what: str
    cost: str = ""
    """What comes of it where nobody mends it."""
    fix: str = ""
    """The command, or the line of configuration, that mends it."""
