"""The screens, a file each: `ROUTES` lists them by the names of `pages.PATHS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventjet.ui.screens import actions, jobs, overview, quarantine

ROUTES: Mapping[str, Mapping[str, Any]] = {
    **overview.ROUTES,
    **quarantine.ROUTES,
    **jobs.ROUTES,
    **actions.ROUTES,
}
