"""What a subject measures of itself, printed as one line of JSON."""

from __future__ import annotations

import json
import time


class Clock:
    """Wall and CPU time of this process, from `start` to `stop`."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def stop(self, count: int) -> None:
        """Print what `count` events took."""
        wall, cpu = time.monotonic() - self._wall, time.process_time() - self._cpu
        print(json.dumps({"count": count, "wall_s": wall, "cpu_s": cpu}), flush=True)
