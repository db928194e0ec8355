"""The program `eventjet` for the fault tests of rebuilds: it may have less patience with fold processes."""

from __future__ import annotations

import os

from eventjet.cli.__main__ import run
from eventjet.parallel import processes as fold_processes
from eventjet.rebuild import divided_load
from tests.faults.among import PATIENCE

if PATIENCE in os.environ:
    divided_load._BOUND_S = float(os.environ[PATIENCE])  # pyright: ignore[reportPrivateUsage]
    fold_processes._BEGIN = 1  # pyright: ignore[reportPrivateUsage]
run()
