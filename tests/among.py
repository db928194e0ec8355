"""How many processes fold in tests that try more than one number: `EVENTJET_TEST_AMONG=1,2,4`, by default one."""

from __future__ import annotations

import os

from eventjet.errors import RebuildError
from eventjet.rebuild import EngineOptions

AMONG = tuple(int(one) for one in os.environ.get("EVENTJET_TEST_AMONG", "1").split(","))
SEVERAL = tuple(one for one in AMONG if one > 1) or (2,)
"""For tests that are about fold processes."""
LOCAL = EngineOptions("local", processes=AMONG[-1])
"""The local engine as the laws of rebuilds are tried with it: with the last of these numbers."""


def told_as(error: type[Exception]) -> tuple[type[Exception], ...]:
    """What a rebuild or a verification on `LOCAL` raises for it: fold processes tell theirs in words alone."""
    return (error,) if LOCAL.processes == 1 else (error, RebuildError)
