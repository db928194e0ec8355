"""PURE: what a database says of itself that makes it less than read models need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weakness:
    """One setting, or its version."""

    what: str
    cost: str
    remedy: str
    is_fault: bool = False
    """Whether rows may be lost or wrong, or nothing can be written."""
    is_rare: bool = False
    """Whether it takes a coincidence that few ever meet."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """A database, as it answers."""

    version: str
    """As a person calls it: `PostgreSQL 18.1`."""
    weaknesses: tuple[Weakness, ...]


def numbers_of(version: str) -> tuple[int, ...]:
    """Of `18.1 (Debian …)` the numbers that it begins with."""
    numbers = version.partition(" ")[0].split(".")
    return tuple(int(one) for one in numbers if one.isdecimal())
