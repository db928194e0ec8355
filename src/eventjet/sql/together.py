"""`Run`, `Last`: statements that cross to a database together, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Run: TypeAlias = tuple[str, list[Any] | None]
"""(text for the driver, its parameters, once for each execution); None for one without any."""


@dataclass(frozen=True, slots=True)
class Last:
    """The statement whose result is wanted, and the cursor that is to have it."""

    cursor: Any
    text: str
    parameters: Any
