"""The app of a worker process of the fault tests: `app`.

Whoever imports this module sets the variable first, to the kind of the app and its name: `tally:NAME`.
"""

from __future__ import annotations

import os

from eventjet import App
from tests.faults.bad_events import MENDED, mended, wary
from tests.faults.tally import Tally, journal, totals

_PROJECTIONS = {"tally": [totals, journal], "wary": [mended if MENDED in os.environ else wary]}
_kind, _, _name = os.environ["EVENTJET_TEST_WORKED"].partition(":")
app = App(
    _name,
    aggregates=[Tally],
    projections=_PROJECTIONS[_kind],
)
