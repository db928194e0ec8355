"""Backoff of writers that compete for one aggregate: PURE, times are parameters. See ADR 0039.

Writers cannot see each other: each knows only the races it lost, and which of its cached states turned out stale. So
each keeps a **window** from which it draws its pauses. A race lost after a pause widens the window by the time of some
saves, and a race won halves it. So the windows of all competing writers become alike, and are wider the more writers
there are. A writer that won `TURN` times in a row pauses as well, or it would go on for as long as it has commands.
A writer that sees after a pause that nobody else wrote narrows its window to a quarter, and soon pauses no more.
"""

from __future__ import annotations

TURN = 12
"""Commands that a writer records in a row before it lets others have a turn."""
FIRST_SAVES = 2
"""Width of the first window, in durations of a save; there is no pause after the first lost race."""
WIDER_SAVES = 30
"""How much a lost race widens the window, in durations of a save."""
WON_FACTOR, QUIET_FACTOR = 0.5, 0.25
"""Factors by which the window narrows after a race won, and after a pause in which nobody else wrote."""
SAVE_S, WINDOW_MIN_S, PAUSE_MAX_S = 0.002, 0.001, 2.0
AGED_MAX = 8.0
"""Greatest divisor of the pauses of a command, which become shorter the more races it has lost."""

LEARNING_RATE = 0.25
"""Weight of the newest observation in a running average."""
STALENESS_MAX = 1 / 3
"""Above this probability of being stale, a cached state is confirmed first: a lost race costs more than a read."""
STALENESS_MAX_IN_TRANSACTION = 1 / 8
"""The same in a transaction, where a lost race costs a whole batch."""


class ContentionBackoff:
    """The contention backoff of one aggregate on one connection.

    `now` is the time of any monotonic clock, in seconds; `jitter` is a random number between 0 and 1.
    """

    __slots__ = ("_has_paused", "_resumes_at", "_save_s", "_wins", "staleness", "window_s")

    def __init__(self, staleness: float = 0.0) -> None:
        self.staleness = staleness
        """Probability that a cached state is not the newest."""
        self.window_s = 0.0
        """Mean of the pauses in seconds; 0 while no other writer is known to compete."""
        self._save_s = SAVE_S
        """Running average, in seconds, of attempts that won; lost attempts take longer the more writers compete."""
        self._wins = 0
        self._has_paused = False
        self._resumes_at = 0.0

    @property
    def is_calm(self) -> bool:
        """True if there was no contention recently."""
        return self.window_s == 0.0 and self.staleness < 0.05

    def observe(self, is_stale: bool) -> None:
        """Record whether a cached state was stale."""
        self.staleness += (is_stale - self.staleness) * LEARNING_RATE

    def delay_s(self, now: float) -> float:
        """Return how long the next command waits so that others get a turn; call it once for each command."""
        pause_s = max(0.0, self._resumes_at - now)
        if pause_s:
            self._has_paused = True
        return pause_s

    def record_conflict(self, lost_before: int, jitter: float) -> float:
        """Record a lost race and return how long to pause; the same command lost `lost_before` races before."""
        self._wins = 0
        if not self.window_s:
            self.window_s = max(WINDOW_MIN_S, FIRST_SAVES * self._save_s)
            if not lost_before:
                return 0.0
        elif self._has_paused:
            self.window_s = min(PAUSE_MAX_S, self.window_s + WIDER_SAVES * self._save_s)
        self._has_paused = True
        return self.window_s * (0.5 + jitter) / min(AGED_MAX, 1 + lost_before / 2)

    def record_success(self, elapsed_s: float, now: float, jitter: float) -> None:
        """Record that a command was stored, by an attempt that took `elapsed_s` seconds."""
        self._save_s += (elapsed_s - self._save_s) * LEARNING_RATE
        if self._has_paused:
            self._narrow(WON_FACTOR)
        self._has_paused = False
        self._wins += 1
        if self._wins >= TURN:
            self._wins = 0
            self._resumes_at = now + self.window_s * (0.5 + jitter)

    def record_quiet(self) -> None:
        """Record that nobody else wrote since the cached state."""
        if self._has_paused:
            self._narrow(QUIET_FACTOR)

    def _narrow(self, factor: float) -> None:
        self.window_s *= factor
        if self.window_s < max(WINDOW_MIN_S, self._save_s):
            self.window_s = 0.0
