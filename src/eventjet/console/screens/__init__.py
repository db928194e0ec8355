"""The screens, one file for each topic; `ENDPOINTS` lists them by the names of `pages.PATHS`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.screens import actions, aggregates, log, overview, processes, quarantine, read_models

ENDPOINTS: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
    "overview": overview.overview,
    "overview_live": overview.overview_live,
    "aggregates": aggregates.aggregates,
    "aggregate": aggregates.aggregate,
    "aggregate_state": aggregates.aggregate_state,
    "log": log.log,
    "log_live": log.log_live,
    "event": log.event,
    "models": read_models.models,
    "model": read_models.model,
    "row": read_models.row,
    "quarantine": quarantine.quarantine,
    "parked": quarantine.parked,
    "processes": processes.processes,
    "process": processes.process,
    "jobs": actions.jobs,
    "job": actions.job,
    "job_live": actions.job_live,
    "act": actions.act,
    "actions": actions.actions,
    "action": actions.action,
    "action_live": actions.action_live,
}
POSTED = {"act"}
"""The names of the endpoints that take forms."""
