"""What is known of the other writers of one aggregate, and how writers make room for each other. PURE.

Writers cannot see each other: each knows of the races that it lost, and of its own states that turned out to be old. So
each keeps a **window**, within which it draws its pauses. A race that is lost after a pause widens it by the time of
some saves, one that is won halves it: so rivals come to windows of one width, the wider the more of them there are.
Losers do not pause alone: who won `TURN` times in a row pauses as they do, or it would go on for as long as it has
something to do. Who finds after a pause that nobody wrote meanwhile soon has no rivals any more.
"""

from __future__ import annotations

TURN = 12
"""Commands recorded in a row before others get a turn."""
FIRST_SAVES = 2
"""Saves' time that the first window is wide; after the first race lost there is no pause."""
WIDER_SAVES = 30
"""Saves' time that a lost race makes it wider."""
NARROWER, NOBODY = 0.5, 0.25
"""What is left of it after a race won, and where nobody wrote."""
SAVE_S, LEAST_S, PAUSE_MAX_S = 0.002, 0.001, 2.0
AGED_MAX = 8.0
"""How much shorter the pauses of a command become that has lost many races."""

LEARNS = 0.25
"""Weight of the newest observation."""
CONFIRMED_ABOVE = 1 / 3
"""How likely a remembered state may be an old one before it is confirmed first: a lost race costs more than a look."""
CONFIRMED_ABOVE_IN_BATCH = 1 / 8
"""The same in a transaction, where it costs a batch."""


class Rivals:
    """Of one aggregate, as one connection knows them. `now` is any clock's, in seconds; `jitter` is between 0 and 1."""

    __slots__ = ("_has_paused", "_resumes_at", "_save_s", "_wins", "old", "window_s")

    def __init__(self, old: float = 0.0) -> None:
        self.old = old
        """How likely a remembered state is not the newest."""
        self.window_s = 0.0
        """Mean of the pauses; 0 when nobody is known to compete."""
        self._save_s = SAVE_S
        """How long a try takes that wins, on the average: others that race with it take longer the more they are."""
        self._wins = 0
        self._has_paused = False
        self._resumes_at = 0.0

    @property
    def is_calm(self) -> bool:
        """Whether there is nothing worth knowing."""
        return self.window_s == 0.0 and self.old < 0.05

    def learn(self, is_old: bool) -> None:
        """A remembered state was the newest, or not."""
        self.old += (is_old - self.old) * LEARNS

    def room_s(self, now: float) -> float:
        """How long the next command waits so that others get a turn; asked once for a command."""
        pause_s = max(0.0, self._resumes_at - now)
        if pause_s:
            self._has_paused = True
        return pause_s

    def lost(self, before: int, jitter: float) -> float:
        """A race was lost, after `before` others of the same command; how long to pause."""
        self._wins = 0
        if not self.window_s:
            self.window_s = max(LEAST_S, FIRST_SAVES * self._save_s)
            if not before:
                return 0.0
        elif self._has_paused:
            self.window_s = min(PAUSE_MAX_S, self.window_s + WIDER_SAVES * self._save_s)
        self._has_paused = True
        return self.window_s * (0.5 + jitter) / min(AGED_MAX, 1 + before / 2)

    def won(self, took_s: float, now: float, jitter: float) -> None:
        """A command was recorded, by a try that took so long."""
        self._save_s += (took_s - self._save_s) * LEARNS
        if self._has_paused:
            self._narrow(NARROWER)
        self._has_paused = False
        self._wins += 1
        if self._wins >= TURN:
            self._wins = 0
            self._resumes_at = now + self.window_s * (0.5 + jitter)

    def nobody_wrote(self) -> None:
        """The newest state was read, and is the one that was known."""
        if self._has_paused:
            self._narrow(NOBODY)

    def _narrow(self, factor: float) -> None:
        self.window_s *= factor
        if self.window_s < max(LEAST_S, self._save_s):
            self.window_s = 0.0
