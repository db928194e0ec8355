"""The overview: the log, and the live status of each read model, reactor and process."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.live import LiveResponse
from eventjet.console.pages import number
from eventjet.console.status_poller import HISTORY_S, StatusPoller
from eventjet.findings import Level
from eventjet.subscriptions.work_status import PROJECTION, Condition, WorkStatus, labels
from eventjet.text import counted, duration

_EVERY_S = 0.4
_WIDTH, _HEIGHT = 120, 32
_POINTS_MAX = 60
_SHORTEST = 4
"""The width of the line of a single sample."""
_GAP_S = 20.0
"""Seconds between two samples above which nothing is known of the lag between them."""
_TOP_MIN = 10
"""The lag at the top of a chart is at least this, so that a few events look like few."""


async def overview(request: Request) -> dict[str, Any]:
    """Show the overview."""
    poller: StatusPoller = await request.app.state.poller.refreshed()
    rows: list[dict[str, Any]] = [
        {"status": status, "label": label, "chart": _chart(poller, status)}
        for label, status in zip(labels(poller.statuses), poller.statuses, strict=True)
    ]
    return {
        "polled": poller,
        "glance": _glance(rows),
        "models": [row for row in rows if row["status"].kind == PROJECTION],
        "followers": [row for row in rows if row["status"].kind != PROJECTION],
        "plot_width": _WIDTH,
        "plot_height": _HEIGHT,
    }


async def overview_live(request: Request) -> Response:
    """Stream the changing part of the overview whenever it changes."""
    return LiveResponse(request, "overview_now.html", partial(overview, request), _EVERY_S)


_WORST_FIRST = (Level.FAULT, Level.WARNING, Level.UNKNOWN, Level.NOTE, Level.OK)


def _glance(rows: list[dict[str, Any]]) -> list[tuple[Condition, list[str]]]:
    """Return each condition with the labels of the subscriptions that have it, the worst first."""
    groups: dict[Condition, list[str]] = {}
    for row in rows:
        groups.setdefault(row["status"].condition, []).append(row["label"])
    return sorted(groups.items(), key=lambda group: _WORST_FIRST.index(group[0].level))


def _chart(poller: StatusPoller, status: WorkStatus) -> dict[str, str] | None:
    """Return the lag over the last two minutes as the points of an SVG line and area, and in words.

    A single sample is a short line. Without a sample the result is None. Between samples that are far apart nobody
    looked, so the line begins after the last such gap.
    """
    now = time.monotonic()
    samples = [(now - at, lag) for at, lag in poller.history.lags(status.name, status.revision)]
    samples = [sample for sample in samples if sample[0] <= HISTORY_S] or samples[-1:]
    if not samples:
        return None
    gaps = [index for index in range(1, len(samples)) if samples[index - 1][0] - samples[index][0] > _GAP_S]
    samples = samples[gaps[-1] :] if gaps else samples
    stride = -(-len(samples) // _POINTS_MAX)
    shown = [*samples[:-1:stride], samples[-1]]
    top = max(_TOP_MIN, *(lag for _, lag in samples))
    points = [(_WIDTH * (1 - min(1.0, age_s / HISTORY_S)), 1 + (_HEIGHT - 2) * (1 - lag / top)) for age_s, lag in shown]
    points = [(min(points[0][0], _WIDTH - _SHORTEST), points[0][1]), *points[1:], (_WIDTH, points[-1][1])]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    first_s, first_lag = samples[0]
    return {
        "line": line,
        "area": f"{points[0][0]:.1f},{_HEIGHT} {line} {_WIDTH},{_HEIGHT}",
        "words": f"Lag over the last {duration(first_s)}: it was {counted(first_lag, 'event')}, "
        f"is {number(samples[-1][1])}, and was {number(max(lag for _, lag in samples))} at the most.",
    }
