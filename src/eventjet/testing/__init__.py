"""What an application's tests use: `scenario` for decisions, `projected` for read models; no server, no database.

Lazy, since pytest imports this package at every start for the fixtures in `plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventjet.testing.projecting import on, projected
    from eventjet.testing.scenarios import scenario

_HOMES = {"on": "projecting", "projected": "projecting", "scenario": "scenarios"}

__all__ = ["on", "projected", "scenario"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eventjet.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"eventjet.testing.{_HOMES[name]}"), name)
