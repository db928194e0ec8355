"""The console: the log, the read models and their faults, in a browser. Needs the extra `ui`.

`console` returns it as an ASGI app, to mount in your own; `eventjet ui` serves it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.console.access import Access, Level
    from eventjet.console.site import console

__all__ = ["Access", "Level", "console"]

__getattr__ = lazy(__name__, {"eventjet.console.access": "Access Level", "eventjet.console.site": "console"})
