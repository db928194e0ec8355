"""The screens, one file for each topic; `ENDPOINTS` lists them by the names of `pages.PATHS`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.screens import actions, aggregates, log, overview, processes, quarantine, read_models

ENDPOINTS: Mapping[str, tuple[str, Callable[[Request], Awaitable[dict[str, Any] | Response]]]] = {
    "overview": ("overview.html", overview.overview),
    "overview_live": ("", overview.overview_live),
    "aggregates": ("aggregates.html", aggregates.aggregates),
    "aggregate": ("aggregate.html", aggregates.aggregate),
    "aggregate_state": ("aggregate_state.html", aggregates.aggregate_state),
    "log": ("log.html", log.log),
    "log_live": ("", log.log_live),
    "event": ("event.html", log.event),
    "body": ("", log.body),
    "models": ("models.html", read_models.models),
    "model": ("model.html", read_models.model),
    "row": ("row.html", read_models.row),
    "quarantine": ("quarantine.html", quarantine.quarantine),
    "quarantined": ("quarantined.html", quarantine.quarantined),
    "processes": ("processes.html", processes.processes),
    "instances": ("instances.html", processes.instances),
    "process": ("process.html", processes.process),
    "jobs": ("jobs.html", actions.jobs),
    "job": ("job.html", actions.job),
    "job_live": ("", actions.job_live),
    "act": ("act.html", actions.act),
    "actions": ("actions.html", actions.actions),
    "action": ("action.html", actions.action),
    "action_live": ("", actions.action_live),
}
"""The template of each screen, and the function that returns the template's values, or another response."""
POSTED = {"act"}
"""The names of the endpoints that take forms."""
