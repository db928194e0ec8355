"""How writers of one aggregate make room for each other: PURE, times are parameters. See ADR 0039.

Writers cannot see each other: each knows the races it lost, and which of its remembered states turned out stale. So
each keeps a **window** from which it draws its pauses. A race lost after a pause widens it by the time of some saves, a
race won halves it, so the windows of all rivals become alike, and wider the more rivals there are. Losers do not pause
alone: a writer that won `TURN` times in a row pauses as they do, or it would go on for as long as it has something to
do. A writer that finds after a pause that nobody wrote soon has no rivals any more.
"""

from __future__ import annotations

TURN = 12
"""Commands recorded in a row before others get a turn."""
FIRST_SAVES = 2
"""Width of the first window, in times of a save; after the first race lost there is no pause."""
WIDER_SAVES = 30
"""How much wider a lost race makes it, in times of a save."""
WON_FACTOR, QUIET_FACTOR = 0.5, 0.25
"""What is left of the window after a race won, and where nobody wrote."""
SAVE_S, WINDOW_MIN_S, PAUSE_MAX_S = 0.002, 0.001, 2.0
AGED_MAX = 8.0
"""How much shorter the pauses of a command become that has lost many races."""

LEARNING_RATE = 0.25
"""Weight of the newest observation."""
STALENESS_MAX = 1 / 3
"""How likely a remembered state may be stale before it is confirmed first: a lost race costs more than a look."""
STALENESS_MAX_IN_TRANSACTION = 1 / 8
"""The same in a transaction, where it costs a batch."""


class ContentionBackoff:
    """One aggregate's, on one connection. `now` is any clock's, in seconds; `jitter` is between 0 and 1."""

    __slots__ = ("_has_paused", "_resumes_at", "_save_s", "_wins", "staleness", "window_s")

    def __init__(self, staleness: float = 0.0) -> None:
        self.staleness = staleness
        """How likely a remembered state is not the newest."""
        self.window_s = 0.0
        """Mean of the pauses; 0 while nobody is known to compete."""
        self._save_s = SAVE_S
        """Average time of tries that won: tries that lost take longer the more rivals there are."""
        self._wins = 0
        self._has_paused = False
        self._resumes_at = 0.0

    @property
    def is_calm(self) -> bool:
        """True when no contention was seen recently."""
        return self.window_s == 0.0 and self.staleness < 0.05

    def observe(self, is_stale: bool) -> None:
        """Learn that a remembered state was stale, or was not."""
        self.staleness += (is_stale - self.staleness) * LEARNING_RATE

    def delay_s(self, now: float) -> float:
        """Return how long the next command waits so that others get a turn; ask once a command."""
        pause_s = max(0.0, self._resumes_at - now)
        if pause_s:
            self._has_paused = True
        return pause_s

    def record_conflict(self, lost_before: int, jitter: float) -> float:
        """Return how long to pause after a lost race, before which the same command lost `lost_before` others."""
        self._wins = 0
        if not self.window_s:
            self.window_s = max(WINDOW_MIN_S, FIRST_SAVES * self._save_s)
            if not lost_before:
                return 0.0
        elif self._has_paused:
            self.window_s = min(PAUSE_MAX_S, self.window_s + WIDER_SAVES * self._save_s)
        self._has_paused = True
        return self.window_s * (0.5 + jitter) / min(AGED_MAX, 1 + lost_before / 2)

    def record_success(self, took_s: float, now: float, jitter: float) -> None:
        """Learn that a command was recorded, by a try that took `took_s`."""
        self._save_s += (took_s - self._save_s) * LEARNING_RATE
        if self._has_paused:
            self._narrow(WON_FACTOR)
        self._has_paused = False
        self._wins += 1
        if self._wins >= TURN:
            self._wins = 0
            self._resumes_at = now + self.window_s * (0.5 + jitter)

    def record_quiet(self) -> None:
        """Learn that nobody else wrote since the state that was known."""
        if self._has_paused:
            self._narrow(QUIET_FACTOR)

    def _narrow(self, factor: float) -> None:
        self.window_s *= factor
        if self.window_s < max(WINDOW_MIN_S, self._save_s):
            self.window_s = 0.0
