"""The trouble in a schedule: lost and late messages, and times at which the server behaves otherwise."""

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
"""(cumulative share of the schedules, the chance of each single mishap)."""
BOTH = ("pause", "full", "sick", "busy", "unlisted", "denied")
ONE_REPLICA = (*BOTH, "restart")
THREE_REPLICAS = (*BOTH, "election", "deposed", "deposed", "unavailable")
DEPOSED_MAX_S = 1.9
"""The longest time for which a deposed leader continues to answer."""
ELECTION_S = 4.0
"""The shortest time that a follower waits for its leader before it stands for election."""


class Window(NamedTuple):
    """A time during which the server behaves otherwise."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True, slots=True)
class Weather:
    """The trouble of a schedule, drawn once."""

    replicas: int
    request_s: float
    dedupe_s: float
    mishap: float
    """The chance that a request is lost, an answer lost, a request late, an answer late: each."""
    rival: float
    """The chance that a rival writes just before a message is taken, or just after."""
    claimed: float
    """The chance that another writer has used an event id of a save on a subject of its own."""
    stale: float
    """The chance that a lagging replica answers a load."""
    windows: tuple[Window, ...]


def drawn(random: Callable[[], float]) -> Weather:
    """Draw the weather of a schedule."""
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
            # The successor works already when the old leader wakes up and continues to answer for a while.
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
