"""pyeventsourcing's bulk append: `python -m benchmarks.subjects.append_pyeventsourcing <store> <count>`."""

from __future__ import annotations

import contextlib
import io
import sys

from benchmarks.postings import postings
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.peer_pyeventsourcing import fill

if __name__ == "__main__":
    store, count = sys.argv[1:]
    all_postings = list(postings(int(count)))
    clock = Clock()
    clock.start()
    with contextlib.redirect_stdout(io.StringIO()):
        fill(store, all_postings)
    clock.stop(int(count))
