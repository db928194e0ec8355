"""Event sourcing on NATS JetStream: aggregates, projections in SQL, and rebuilds beside the live read model.

The front door. Names are resolved when first used (PEP 562), so that importing eventjet costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventjet.app import App, load_app
    from eventjet.codec.upcasting import upcaster
    from eventjet.domain.aggregate import aggregate
    from eventjet.domain.context import with_metadata
    from eventjet.domain.event import event
    from eventjet.domain.recorded import Metadata, Recorded
    from eventjet.errors import (
        ConcurrencyConflict,
        DefinitionError,
        EventjetError,
        NotCaughtUp,
        OutcomeUnknown,
        Refused,
        Unreachable,
    )
    from eventjet.jet import Jet
    from eventjet.projections.projection import Entries, Projection, entries, projection
    from eventjet.projections.sql_projection import SqlProjection
    from eventjet.repository import Committed, Imported, ImportReport, Repository
    from eventjet.settings import Settings

_HOMES = {
    "App": "app",
    "Committed": "repository",
    "ConcurrencyConflict": "errors",
    "DefinitionError": "errors",
    "Entries": "projections.projection",
    "EventjetError": "errors",
    "ImportReport": "repository",
    "Imported": "repository",
    "Jet": "jet",
    "Metadata": "domain.recorded",
    "NotCaughtUp": "errors",
    "OutcomeUnknown": "errors",
    "Projection": "projections.projection",
    "Recorded": "domain.recorded",
    "Refused": "errors",
    "Repository": "repository",
    "Settings": "settings",
    "SqlProjection": "projections.sql_projection",
    "Unreachable": "errors",
    "aggregate": "domain.aggregate",
    "entries": "projections.projection",
    "event": "domain.event",
    "load_app": "app",
    "projection": "projections.projection",
    "upcaster": "codec.upcasting",
    "with_metadata": "domain.context",
}

__all__ = [
    "App",
    "Committed",
    "ConcurrencyConflict",
    "DefinitionError",
    "Entries",
    "EventjetError",
    "ImportReport",
    "Imported",
    "Jet",
    "Metadata",
    "NotCaughtUp",
    "OutcomeUnknown",
    "Projection",
    "Recorded",
    "Refused",
    "Repository",
    "Settings",
    "SqlProjection",
    "Unreachable",
    "aggregate",
    "entries",
    "event",
    "load_app",
    "projection",
    "upcaster",
    "with_metadata",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'eventjet' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"eventjet.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
