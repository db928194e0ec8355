"""The app of a worker process of the fault tests, where its fold processes find it as well: `app`.

Whoever imports this module sets the variable first, to the kind of the app and its name: `tally:NAME`.
"""

from __future__ import annotations

import os

from eventjet import App
from tests.faults.among import ALONE_S, SLOW
from tests.faults.bad_events import MENDED, mended, wary
from tests.faults.tally import Tally, journal, totals
from tests.slow_alone import slow_alone

_PROJECTIONS = {"tally": [totals, journal], "wary": [mended if MENDED in os.environ else wary]}
_kind, _, _name = os.environ["EVENTJET_TEST_WORKED"].partition(":")
_pid = os.environ.get(SLOW)
app = App(
    _name,
    aggregates=[Tally],
    projections=[slow_alone(one, ALONE_S, int(_pid)) if _pid else one for one in _PROJECTIONS[_kind]],
)
