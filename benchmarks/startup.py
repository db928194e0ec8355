"""How long `import eventjet`, `eventjet --help` and a worker take until they are ready: `python -m benchmarks.startup`.

Each in a fresh interpreter, in turns, with the imports of the peers that are installed here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from benchmarks import peers
from benchmarks.laps import initialise, running_worker
from benchmarks.measure import Figures, conditions, keep
from benchmarks.stores import Stores

_FRONT_DOOR = "from eventjet import App, aggregate, event"
AIMED_AT = {"import eventjet": 0.25, "eventjet --help": 0.5}


def main(runs: int) -> int:
    print(conditions())
    figures = Figures("start-up", "s", higher_is_better=False)
    programs = {
        "python, nothing imported": [sys.executable, "-c", "pass"],
        "import eventjet": [sys.executable, "-c", "import eventjet"],
        _FRONT_DOOR: [
            sys.executable,
            "-c",
            "from eventjet import App, aggregate, event",
        ],
        "eventjet --help": [sys.executable, "-m", "eventjet.cli", "--help"],
    }
    others = {
        "eventsourcing.application": peers.pyeventsourcing_python(),
        "eventsource": peers.eventsource_python(),
        "protean": peers.protean_python(),
    }
    programs |= {f"import {name}": [found, "-c", f"import {name}"] for name, found in others.items() if found}
    with Stores.opened() as stores, stores.nats_always() as nats, stores.postgres() as database:
        initialise(nats, database)
        for _ in range(runs):
            for name, command in programs.items():
                started = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
                figures.add(name, time.perf_counter() - started)
            started = time.perf_counter()
            with running_worker(nats, database):
                figures.add("eventjet worker, until it is ready", time.perf_counter() - started)
    figures.show()
    for name, most in AIMED_AT.items():
        print(f"  {name}: {figures.median(name):.2f} s, aimed at {most:g} s at most")
    keep([figures])
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    sys.exit(main(parser.parse_args().runs))
