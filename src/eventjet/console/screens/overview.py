"""The overview: the log, and where each read model, reactor and process stands. Live."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eventjet.console.live import streams_of
from eventjet.console.pages import number, page, rendered
from eventjet.console.pulse import KEPT_S, Beat, Pulse
from eventjet.operations.log import TIMERS_MAX, age_s
from eventjet.shown import duration
from eventjet.subscriptions.status import PROJECTION, WorkStatus

_EVERY_S = 0.4
_WIDTH, _HEIGHT = 120, 32
_POINTS_MAX = 60


@dataclass(frozen=True, slots=True)
class Plot:
    """Position against the log over the last two minutes: points of SVG, and what they say in words."""

    log: str
    position: str
    words: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    status: WorkStatus
    name: str
    """With its revision, where there is more than one."""
    plot: Plot | None


async def overview(request: Request) -> Response:
    """The page."""
    return page(request, "overview.html", **await _found(request))


async def overview_live(request: Request) -> Response:
    """Its moving part, whenever something of it is another."""
    streams = streams_of(request)

    async def parts() -> AsyncGenerator[str]:
        sent = ""
        while await streams.pause(_EVERY_S):
            now = rendered(request, "overview_now.html", **await _found(request))
            if now != sent:
                sent = now
                yield now

    return streams.response(parts())


async def _found(request: Request) -> dict[str, Any]:
    pulse: Pulse = request.app.state.pulse
    beat = await pulse.beat()
    revisions = Counter(one.name for one in beat.statuses if one.kind == PROJECTION)
    rows = [
        Row(one, f"{one.name} revision {one.revision}" if revisions[one.name] > 1 else one.name, _plot(pulse, one))
        for one in beat.statuses
    ]
    return {
        "beat": beat,
        "models": [row for row in rows if row.status.kind == PROJECTION],
        "followers": [row for row in rows if row.status.kind != PROJECTION],
        "last_age_s": None if beat.log is None else age_s(beat.log.last_at),
        "log_faults": _log_faults(beat),
        "monitored": bool(pulse.monitoring),
        "timers_max": TIMERS_MAX,
        "plot_width": _WIDTH,
        "plot_height": _HEIGHT,
    }


def _log_faults(beat: Beat) -> list[str]:
    """Each once: one server that is away stops two looks."""
    if beat.log_fault:
        return [beat.log_fault]
    return [beat.following_fault] if beat.following_fault else []


def _plot(pulse: Pulse, one: WorkStatus) -> Plot | None:
    seen = pulse.positions(one.name, one.revision)
    if len(seen) < 2:
        return None
    every = -(-len(seen) // _POINTS_MAX)
    seen = [*seen[:-1:every], seen[-1]]
    lowest = min(min(position, last) for _, position, last in seen)
    highest = max(max(position, last) for _, position, last in seen)
    (since_s, first, first_end), (_, position, last) = seen[0], seen[-1]
    words = (
        f"In the last {duration(since_s)} it went from {number(first)} to {number(position)}, and the log from "
        f"{number(first_end)} to {number(last)}."
    )

    def line(points: Sequence[tuple[float, int]]) -> str:
        return " ".join(
            f"{_WIDTH * (1 - min(1.0, before_s / KEPT_S)):.1f},{_level(value, lowest, highest):.1f}"
            for before_s, value in points
        )

    return Plot(line([(one[0], one[2]) for one in seen]), line([(one[0], one[1]) for one in seen]), words)


def _level(value: int, lowest: int, highest: int) -> float:
    """Within the plot; one that stands still is a line at its foot."""
    share = (value - lowest) / (highest - lowest) if highest > lowest else 0.0
    return 1 + (_HEIGHT - 2) * (1 - share)


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "overview": {"endpoint": overview},
    "overview_live": {"endpoint": overview_live},
}
