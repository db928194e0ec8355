"""What eventjet asks of Python's collector of cycles, which stops the process while it looks at every object there is.

Events, records and rows make no cycles: looking for some among them finds nothing, and among millions of objects it
takes seconds. See ADR 0043.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_settled = 0
"""How many blocks of `settled` are under way in this process."""


def settle_process() -> None:
    """In a process of eventjet's own, once it has imported what it needs: look seldom, and only at what is new.

    Batches of thousands of events live for a moment: looked for at the usual rate, they cost an eighth of a worker's
    time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def settled() -> Generator[None]:
    """In the application's process: within the block, look only at what is made within it.

    Its thresholds stay as they are, and so does what it froze itself. What was there before and came to be a cycle of
    garbage is found after the block.
    """
    global _settled  # noqa: PLW0603  it is the process that is frozen, or not
    with _lock:
        if _settled == 0 and gc.get_freeze_count():
            is_ours = False
        else:
            is_ours = True
            _settled += 1
            if _settled == 1:
                gc.freeze()
    try:
        yield
    finally:
        with _lock:
            if is_ours:
                _settled -= 1
                if _settled == 0:
                    gc.unfreeze()


@contextmanager
def uncollected() -> Generator[None]:
    """Within the block, look at nothing: a fold makes no cycles, and the rows it holds would be walked over again and
    again. At 50,000 rows that is a quarter of all time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
