"""`Vitals`: health and metrics of one process of workers, kept by a task of its loop, read by any thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from eventjet.errors import EventjetError
from eventjet.observability.metrics import exposition
from eventjet.projections.application import Application
from eventjet.projections.sql_projection import AnyResolved
from eventjet.settings import Settings
from eventjet.workers.context import WorkerContext
from eventjet.workers.health import Health, Verdict
from eventjet.workers.status import Looker

_LOOK_MAX_S = 20.0


class Vitals:
    """`keep` looks, until it is cancelled; a loop that hangs shows as a look that grows old."""

    def __init__(
        self, app: Application, settings: Settings, context: WorkerContext, chosen: Sequence[AnyResolved]
    ) -> None:
        self._app = app
        self._settings = settings
        self._context = context
        self._chosen = {(resolved.name, resolved.revision) for resolved in chosen}
        self._health = Health(context.owner, context.options.stalled_s, time.monotonic())

    def verdict(self) -> Verdict:
        """As of now."""
        return self._health.verdict(time.monotonic())

    def metrics(self) -> str:
        """As Prometheus reads them."""
        return exposition(self._health.samples(time.monotonic()), list(self._context.meters.values()))

    async def keep(self) -> None:
        """Look again and again."""
        async with Looker(self._app, self._settings) as looker:
            while True:
                try:
                    async with asyncio.timeout(_LOOK_MAX_S):
                        found = (await looker.look()).projections
                except Exception as error:  # noqa: BLE001 - health tells of it, whatever it is
                    said = str(error) if isinstance(error, EventjetError) else type(error).__name__
                    self._health = self._health.without(said)
                else:
                    own = [one for one in found if (one.name, one.revision) in self._chosen]
                    self._health = self._health.after(time.monotonic(), own)
                await asyncio.sleep(self._context.options.look_s)
