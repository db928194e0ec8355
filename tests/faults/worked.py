"""The app of a worker process of the fault tests, where its fold processes find it as well: `app`.

Whoever imports this module sets the variable first, to the kind of the app and its name: `tally:NAME`.
"""

from __future__ import annotations

import os

from tests.faults.bad_events import wary_app
from tests.faults.tally import tally_app

_kind, _, _name = os.environ["EVENTJET_TEST_WORKED"].partition(":")
app = (wary_app if _kind == "wary" else tally_app)(_name)
