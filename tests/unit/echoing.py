"""A task for fold processes that tells what it was given, and fails, hangs or starts threads where it is told to."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eventjet.codec.headers import RawRecord
from eventjet.parallel.process import ShareWork

FOR_EVER = threading.Event()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What stands for an application."""

    fails: bool = False
    hangs: bool = False
    threads: bool = False

    def load(self) -> object:
        if self.fails:
            raise ValueError("no app")
        if self.hangs:
            FOR_EVER.wait()
        if self.threads:
            threading.Thread(target=FOR_EVER.wait, daemon=True).start()
        return self


@dataclass(frozen=True, slots=True)
class Echo:
    """Answers with (share, mark, positions and subjects of its records)."""

    fails: str = ""
    reason: str = ""
    hangs: bool = False

    @contextmanager
    def begin(self, share: int) -> Generator[ShareWork]:
        self.reach("begin")
        yield _Echoing(self, share)

    def reach(self, when: str) -> None:
        if self.fails == when:
            raise ValueError(self.reason or f"no {when}")


class _Echoing:
    def __init__(self, task: Echo, share: int) -> None:
        self._task = task
        self._share = share
        self._taken: list[tuple[int, bytes]] = []

    def take(self, records: list[RawRecord]) -> None:
        self._task.reach("take")
        if self._task.hangs:
            FOR_EVER.wait()
        self._taken += [(one[0], one[2]) for one in records]

    def cut(self, mark: Any) -> Any:
        self._task.reach("cut")
        if self._task.hangs:
            while True:  # at work, and deaf
                pass
        taken, self._taken = self._taken, []
        return self._share, mark, taken

    def reason_of(self, error: Exception) -> str:
        return f"told: {error}"
