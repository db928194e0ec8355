"""How long `import eventjet`, `eventjet --help` and a worker take until they are ready: `python -m benchmarks.startup`.

Each in a fresh interpreter, in turns, with the imports of the peers that are installed here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks import peers
from benchmarks.laps import initialise, running_worker
from benchmarks.measure import Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.stores import Stores

_FRONT_DOOR = "from eventjet import App, aggregate, event"
AIMED_AT = {"import eventjet": 0.25, "eventjet --help": 0.5}


def main(runs: int) -> int:
    print(conditions())
    figures = Figures("start-up", "s", higher_is_better=False)
    programs = {
        "python, nothing imported": [sys.executable, "-c", "pass"],
        "import eventjet": [sys.executable, "-c", "import eventjet"],
        _FRONT_DOOR: [sys.executable, "-c", _FRONT_DOOR],
        "eventjet --help": [sys.executable, "-m", "eventjet.cli", "--help"],
    }
    others = {
        "eventsourcing.application": peers.pyeventsourcing_python(),
        "eventsource": peers.eventsource_python(),
        "protean": peers.protean_python(),
    }
    programs |= {f"import {name}": [python, "-c", f"import {name}"] for name, python in others.items() if python}
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
    targets = [
        f"  {name}: {figures.median(name):.2f} s, aimed at {limit_s:g} s at most" for name, limit_s in AIMED_AT.items()
    ]
    report([figures], note="\n".join(targets))
    return 0


if __name__ == "__main__":
    sys.exit(main(parser_of(__doc__, runs=7).parse_args().runs))
