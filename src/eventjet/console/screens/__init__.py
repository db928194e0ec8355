"""The screens, a file each: `ROUTES` lists them by the names of `pages.PATHS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventjet.console.screens import (
    actions,
    aggregate,
    aggregates,
    event,
    jobs,
    log,
    models,
    overview,
    processes,
    quarantine,
    row,
)

ROUTES: Mapping[str, Mapping[str, Any]] = {
    **aggregate.ROUTES,
    **aggregates.ROUTES,
    **event.ROUTES,
    **overview.ROUTES,
    **models.ROUTES,
    **row.ROUTES,
    **processes.ROUTES,
    **quarantine.ROUTES,
    **jobs.ROUTES,
    **actions.ROUTES,
    **log.ROUTES,
}
