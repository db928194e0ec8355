"""Tools for an application's tests.

`scenario` tests decisions, `story` a process, `reacted` a reactor, `projected` read models, and `world` a whole app
whose clock the test moves; `App.in_memory` is a log in memory for code that executes commands. None of these needs a
server; `running` starts an app on real ones. `AggregateLaws`, `ProjectionLaws` and `CodecLaws` check an application
with histories that Hypothesis makes up. The names are imported when they are used, since pytest imports this package
at every start for the fixtures in `plugin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.testing.laws import AggregateLaws, CodecLaws, ProjectionLaws
    from eventjet.testing.projecting import on, projected
    from eventjet.testing.reacting import reacted
    from eventjet.testing.running import running
    from eventjet.testing.scenarios import scenario
    from eventjet.testing.store_contract import StoreContract
    from eventjet.testing.stories import story
    from eventjet.testing.world import world

__all__ = [
    "AggregateLaws",
    "CodecLaws",
    "ProjectionLaws",
    "StoreContract",
    "on",
    "projected",
    "reacted",
    "running",
    "scenario",
    "story",
    "world",
]

__getattr__ = lazy(
    __name__,
    {
        "eventjet.testing.laws": "AggregateLaws CodecLaws ProjectionLaws",
        "eventjet.testing.projecting": "on projected",
        "eventjet.testing.reacting": "reacted",
        "eventjet.testing.running": "running",
        "eventjet.testing.scenarios": "scenario",
        "eventjet.testing.store_contract": "StoreContract",
        "eventjet.testing.stories": "story",
        "eventjet.testing.world": "world",
    },
)
