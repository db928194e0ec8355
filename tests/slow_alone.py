"""`slow_alone`: a projection whose function is slow in one process, as a worker's alone, and quick in all others.

Such a worker does not arrive while its fold processes start, so they always have something to fold.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from typing import Any, get_type_hints


def slow_alone(declared: Any, seconds: float, pid: int | None = None) -> Any:
    """The projection, which takes so long for an event in the process `pid`; by default in this one."""
    made_by = "fold" if hasattr(declared, "fold") else "rows"
    function = getattr(declared, made_by)
    its_own = os.getpid() if pid is None else pid

    @functools.wraps(function)
    def slow(*given: Any) -> Any:
        if os.getpid() == its_own:
            time.sleep(seconds)
        return function(*given)

    slow.__annotations__ = get_type_hints(function)  # by name they would be looked up here
    return replace(declared, **{made_by: slow})
