"""The trouble on the network of a schedule, drawn from its seed. At some time the trouble ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Weather:
    """Delays and losses; `counts` has the number of each."""

    calm_at: float
    mishap: float
    """The chance of each kind of mishap for a request."""
    outages: tuple[tuple[float, float], ...]
    """The times (start, end) at which nothing comes through."""
    slow: float
    """The longest usual delay, in seconds."""
    stale: float = 0.0
    """The chance that a replica that is asked lags."""
    pounce: float = 0.0
    """The chance that a worker is killed or stopped right after a write of a cursor."""
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def delays(self, now: float, random: Callable[[], float]) -> tuple[float | None, float | None]:
        """Return the delays of a request and of its answer, None for one that is lost."""
        request_s = 0.0005 + self.slow * random() * random()
        back = 0.0005 + self.slow * random() * random()
        if now >= self.calm_at:
            return request_s, back
        if self.is_out(now):
            self.count("request in an outage")
            return None, None
        draw, mishap = random(), self.mishap
        if draw >= 4 * mishap:
            return request_s, back
        if draw < mishap:
            self.count("request lost")
            return None, None
        if draw < 2 * mishap:
            self.count("answer lost")
            return request_s, None
        if draw < 3 * mishap:
            self.count("request late")
            return min(request_s + random() * 12.0, self.calm_at - now + request_s), back
        self.count("answer late")
        return request_s, back + random() * 5.0

    def is_out(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.outages)

    def count(self, occurrence: str) -> None:
        self.counts[occurrence] = self.counts.get(occurrence, 0) + 1


def drawn(random: Callable[[], float]) -> Weather:
    calm_at = 4.0 + random() * 12.0
    outages: list[tuple[float, float]] = []
    while random() < 0.35:
        start = random() * calm_at
        outages.append((start, min(calm_at, start + 0.2 + random() * random() * 6.0)))
    return Weather(
        calm_at=calm_at,
        mishap=(0.0, 0.003, 0.02, 0.06)[int(random() * 4)],
        outages=tuple(outages),
        slow=(0.005, 0.03, 0.2)[int(random() * 3)],
        stale=(0.0, 0.2)[int(random() * 2)],
        pounce=(0.0, 0.02, 0.1)[int(random() * 3)],
    )
