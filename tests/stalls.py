"""`python -m tests.stalls -- COMMAND…`: run a command while its processes, servers included, stop now and then.

From time to time one of them, drawn at random, is stopped (SIGSTOP) for up to two seconds and then goes on, as on a
busy machine. Processes that the command itself has stopped stay as they are. The seed decides every pause and every
length; the command decides which processes there are at the time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager, suppress

BUSY_LOOP = "while True: pass"


def running_under(root: int) -> list[int]:
    """Return a process and its descendants that are neither stopped nor ended, oldest first."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    children: defaultdict[int, list[int]] = defaultdict(list)
    states: dict[int, str] = {}
    for pid, parent, state in (line.split()[:3] for line in listing.splitlines()):
        children[int(parent)].append(int(pid))
        states[int(pid)] = state[0]
    family = [root]
    for pid in family:  # grows during the loop
        family += children[pid]
    return sorted(pid for pid in family if states.get(pid, "Z") not in "TtZ")


@contextmanager
def stopped(pid: int) -> Generator[None]:
    """Stop a process for the block, unless it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def shake(command: subprocess.Popen[bytes], chance: random.Random, pause_s: float, longest_s: float) -> int:
    """Stop processes until the command has ended; return how often."""
    stalls = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            command.wait(chance.uniform(0.0, 2 * pause_s))
            return stalls
        length_s, draw = chance.uniform(0.0, longest_s), chance.random()
        family = running_under(command.pid)
        if family:
            stalls += 1
            with stopped(family[int(draw * len(family))]):
                time.sleep(length_s)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stalls", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two stalls, on average")
    parser.add_argument("--longest", type=float, default=2.0, help="seconds that a stall takes at most")
    parser.add_argument("--busy", type=int, default=0, help="busy loops to run beside the command")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    sys.stderr.write(f"stalls: --seed {options.seed}\n")
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(options.busy)]
    try:
        with subprocess.Popen(options.command) as command:
            # Ctrl-C reaches the command by itself; this program ends with it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: command.terminate())
            stalls = shake(command, random.Random(options.seed), options.pause, options.longest)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    sys.stderr.write(f"stalls: {stalls} with --seed {options.seed}, status {command.returncode}\n")
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


if __name__ == "__main__":
    sys.exit(main())
