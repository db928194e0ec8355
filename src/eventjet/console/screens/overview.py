"""The overview: the log, and the live status of each read model, reactor and process."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.live import stream_of
from eventjet.console.pages import number, page, rendered
from eventjet.console.status_poller import KEPT_S, PolledStatus, StatusPoller
from eventjet.operations.log import TIMERS_MAX, age_s
from eventjet.subscriptions.status import PROJECTION, WorkStatus
from eventjet.text import duration

_EVERY_S = 0.4
_WIDTH, _HEIGHT = 120, 32
_POINTS_MAX = 60


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of a position and the log's end over the last two minutes: SVG points of two lines, and a description."""

    log: str
    position: str
    words: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table of the overview."""

    status: WorkStatus
    name: str
    """The name, with the revision if there is more than one."""
    plot: Plot | None


async def overview(request: Request) -> Response:
    """Show the overview."""
    return page(request, "overview.html", **await _found(request))


async def overview_live(request: Request) -> Response:
    """Stream the changing part of the overview whenever it changes."""
    streams = stream_of(request)

    async def parts() -> AsyncGenerator[str]:
        sent = ""
        while await streams.pause(_EVERY_S):
            now = rendered(request, "overview_now.html", **await _found(request))
            if now != sent:
                sent = now
                yield now

    return streams.response(parts())


async def _found(request: Request) -> dict[str, Any]:
    poller: StatusPoller = request.app.state.poller
    polled = await poller.polled()
    revisions = Counter(status.name for status in polled.statuses if status.kind == PROJECTION)
    rows = [
        Row(
            status,
            f"{status.name} revision {status.revision}" if revisions[status.name] > 1 else status.name,
            _plot(poller, status),
        )
        for status in polled.statuses
    ]
    return {
        "polled": polled,
        "models": [row for row in rows if row.status.kind == PROJECTION],
        "followers": [row for row in rows if row.status.kind != PROJECTION],
        "last_age_s": None if polled.log is None else age_s(polled.log.last_at),
        "log_faults": _log_faults(polled),
        "monitored": bool(poller.monitoring),
        "timers_max": TIMERS_MAX,
        "plot_width": _WIDTH,
        "plot_height": _HEIGHT,
    }


def _log_faults(polled: PolledStatus) -> list[str]:
    """Return the log's faults without repetition, since an unreachable server fails two looks."""
    if polled.log_fault:
        return [polled.log_fault]
    return [polled.following_fault] if polled.following_fault else []


def _plot(poller: StatusPoller, one: WorkStatus) -> Plot | None:
    samples = poller.positions(one.name, one.revision)
    if len(samples) < 2:
        return None
    stride = -(-len(samples) // _POINTS_MAX)
    samples = [*samples[:-1:stride], samples[-1]]
    lowest = min(min(position, last) for _, position, last in samples)
    highest = max(max(position, last) for _, position, last in samples)
    (since_s, first, first_end), (_, position, last) = samples[0], samples[-1]
    words = (
        f"In the last {duration(since_s)} it went from {number(first)} to {number(position)}, and the log from "
        f"{number(first_end)} to {number(last)}."
    )

    def line(points: Sequence[tuple[float, int]]) -> str:
        return " ".join(
            f"{_WIDTH * (1 - min(1.0, before_s / KEPT_S)):.1f},{_level(value, lowest, highest):.1f}"
            for before_s, value in points
        )

    return Plot(
        line([(sample[0], sample[2]) for sample in samples]),
        line([(sample[0], sample[1]) for sample in samples]),
        words,
    )


def _level(value: int, lowest: int, highest: int) -> float:
    """Return the y coordinate of a value in the plot; a value that never changes is a line at the foot."""
    share = (value - lowest) / (highest - lowest) if highest > lowest else 0.0
    return 1 + (_HEIGHT - 2) * (1 - share)
