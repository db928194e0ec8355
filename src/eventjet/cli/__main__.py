"""The entry point of the program, as `eventjet` and as `python -m eventjet.cli`.

While its modules are imported, which takes a moment, Ctrl-C ends the program without a traceback.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130


def run() -> None:
    """Run the program, as the console script does."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(_INTERRUPTED))
    from eventjet.cli.main import run as begin

    signal.signal(signal.SIGINT, before)
    begin()


if __name__ == "__main__":
    run()
