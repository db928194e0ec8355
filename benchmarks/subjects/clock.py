"""What a subject measures of itself, printed as one line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence


class Clock:
    """Wall and CPU time of this process, from `start` to `stop`."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def stop(self, count: int, latencies_s: Sequence[float] = ()) -> None:
        """Print what `count` events or calls took, and the percentiles of single calls where they were timed."""
        wall, cpu = time.monotonic() - self._wall, time.process_time() - self._cpu
        result = {"count": count, "wall_s": wall, "cpu_s": cpu}
        if latencies_s:
            ordered = sorted(latencies_s)
            result |= {
                f"p{percent}_ms": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3
                for percent in (50, 99)
            }
        print(json.dumps(result), flush=True)
