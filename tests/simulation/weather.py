"""What goes wrong in one schedule: how often messages are lost or late, and what the server does to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from eventjet.log.outcome import ErrorReply

UNAVAILABLE = ErrorReply(503, 10008, "JetStream system temporarily unavailable")
UNLISTED = ErrorReply(400, 19999, "of a later version")
NO_SPACE = ErrorReply(503, 10077, "write: disk quota exceeded")
BUSY = ErrorReply(429, 10210, "atomic publish too many inflight")

HARSHNESS = ((0.3, 0.01), (0.6, 0.06), (0.85, 0.15), (1.0, 0.3))
"""Share of the schedules up to here → how likely each single mishap is."""
BOTH = ("pause", "full", "sick", "busy", "unlisted", "denied")
ONE_REPLICA = (*BOTH, "restart")
THREE_REPLICAS = (*BOTH, "election", "deposed", "deposed", "unavailable")
DEPOSED_MAX_S = 1.9
"""How long a deposed leader goes on answering, at the most."""
ELECTION_S = 4.0
"""A follower waits at least so long for its leader before it stands for election."""


class Window(NamedTuple):
    """A time during which the server behaves otherwise."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True, slots=True)
class Weather:
    """Drawn once a schedule."""

    replicas: int
    request_s: float
    dedupe_s: float
    mishap: float
    """How likely a request is lost, an answer is lost, a request is late, an answer is late: each."""
    rival: float
    """How likely a rival writes just before a message is taken, or just after."""
    claimed: float
    """How likely another writer has used one of our event ids on a subject of its own."""
    stale: float
    """How likely a load is answered by a replica that lags."""
    windows: tuple[Window, ...]


def drawn(random: Callable[[], float]) -> Weather:
    """The weather of one schedule."""
    replicas = 3 if random() < 0.55 else 1
    draw = random()
    mishap = next(chance for share, chance in HARSHNESS if draw <= share)
    kinds = THREE_REPLICAS if replicas == 3 else ONE_REPLICA
    windows: list[Window] = []
    start = random() * 2.0
    for _ in range(int(random() * 4.0)):
        kind = kinds[int(random() * len(kinds))]
        end = start + 0.05 + random() * random() * 8.0
        windows.append(Window(start, end, kind))
        if kind == "deposed":
            # The successor works already when the old leader wakes up and goes on answering for a while.
            wakes = end + random() * random() * 2.0
            end = wakes + random() * DEPOSED_MAX_S
            windows.append(Window(wakes, end, "two leaders"))
            end += ELECTION_S
        start = end + random() * 3.0
    return Weather(
        replicas=replicas,
        request_s=(0.5, 1.0, 4.0)[int(random() * 3)],
        dedupe_s=120.0 if random() < 0.8 else 3.0,
        mishap=mishap,
        rival=0.0 if random() < 0.4 else 0.12,
        claimed=0.0 if random() < 0.8 else 0.05,
        stale=0.0 if random() < 0.5 else 0.2,
        windows=tuple(windows),
    )
