"""What the demo tells, and to whom: figures as values, and a port for whoever shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the demo is."""

    accounts: int = 2_000
    commands: int = 20_000
    imported: int = 200_000
    engine: str = "spark"


class Teller(Protocol):
    """Shows what is going on."""

    def progress(self, phase: str, done: int, total: int | None = None, step: str = "") -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """One phase, measured."""

    phase: str
    events: int
    seconds: float

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Verified:
    """What one verification found."""

    when: str
    differences: int
    rows: int


@dataclass(slots=True)
class DemoReport:
    """Everything the demo measured, in order."""

    figures: list[Figures] = field(default_factory=list[Figures])
    verified: list[Verified] = field(default_factory=list[Verified])
    seconds: float = 0.0
