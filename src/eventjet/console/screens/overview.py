"""The overview: the log, and the live status of each read model, reactor and process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.live import LiveResponse
from eventjet.console.pages import number
from eventjet.console.status_poller import KEPT_S, StatusPoller
from eventjet.subscriptions.status import PROJECTION, WorkStatus
from eventjet.text import duration

_EVERY_S = 0.4
_WIDTH, _HEIGHT = 120, 32
_POINTS_MAX = 60


async def overview(request: Request) -> dict[str, Any]:
    """Show the overview."""
    poller: StatusPoller = await request.app.state.poller.refreshed()
    revisions = Counter(status.name for status in poller.statuses if status.kind == PROJECTION)
    rows: list[dict[str, Any]] = [
        {
            "status": status,
            "name": f"{status.name} revision {status.revision}" if revisions[status.name] > 1 else status.name,
            "plot": _plot(poller, status),
        }
        for status in poller.statuses
    ]
    return {
        "polled": poller,
        "models": [row for row in rows if row["status"].kind == PROJECTION],
        "followers": [row for row in rows if row["status"].kind != PROJECTION],
        "plot_width": _WIDTH,
        "plot_height": _HEIGHT,
    }


async def overview_live(request: Request) -> Response:
    """Stream the changing part of the overview whenever it changes."""
    return LiveResponse(request, "overview_now.html", partial(overview, request), _EVERY_S)


def _plot(poller: StatusPoller, status: WorkStatus) -> dict[str, str] | None:
    """Return a plot of a position and the log's end over the last two minutes: two SVG lines, and a description."""
    samples = poller.positions(status.name, status.revision)
    if len(samples) < 2:
        return None
    stride = -(-len(samples) // _POINTS_MAX)
    samples = [*samples[:-1:stride], samples[-1]]
    lowest = min(min(position, last) for _, position, last in samples)
    highest = max(max(position, last) for _, position, last in samples)
    (since_s, first, first_end), (_, position, last) = samples[0], samples[-1]

    def line(index: int) -> str:
        """Return the points of a line; a value that never changes is a line at the foot."""
        span = highest - lowest or 1
        return " ".join(
            f"{_WIDTH * (1 - min(1.0, sample[0] / KEPT_S)):.1f},"
            f"{1 + (_HEIGHT - 2) * (1 - (sample[index] - lowest) / span):.1f}"
            for sample in samples
        )

    return {
        "position": line(1),
        "log": line(2),
        "words": f"In the last {duration(since_s)} it went from {number(first)} to {number(position)}, and the log "
        f"from {number(first_end)} to {number(last)}.",
    }
