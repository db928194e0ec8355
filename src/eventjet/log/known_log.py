"""`KnownLog`: which log a stream is, as a writer knows it, so that nothing remembered of another one is relied upon.

A save is fenced by positions alone, and a stream that was deleted and made again has the same positions. So a writer
looks at the stream when it begins, every second while it is asked, and as soon as the server tells that the stream was
deleted, made or changed. What it remembers counts for three seconds after a look, and is forgotten when the log
or a part of it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from eventjet.errors import LogUnusable, StoreError
from eventjet.jetstream.api import StreamState
from eventjet.jetstream.client import Client
from eventjet.log.topology import AGGREGATES, IDENTITY, Drift, check_settings, drifts_of, identity_of, info
from eventjet.log.wholeness import loss
from eventjet.observability import logs

_log = logging.getLogger(__name__)

RENEW_S = 1.0
"""A look that is older is made again, beside the command that asks."""
RELY_S = 3.0
"""A look that is older has to be made again first."""


class KnownLog:
    """For any number of tasks of one loop; they share a look. `close` it."""

    def __init__(self, stream: str, client: Client) -> None:
        self.identity = ""
        """UUID of the log when it was looked at last; empty when nobody has, or may."""
        self.loss = ""
        """What was gone from it then, in words; empty for a whole one."""
        self.aggregates: frozenset[str] = frozenset()
        """Which ones `init` has noted in it until then; empty where it has noted none."""
        self.on_changed: list[Callable[[], object]] = []
        """Called when the stream holds another past than before, or may."""
        self._stream = stream
        self._client = client
        self._seen: StreamState | None = None
        self._seen_at = float("-inf")
        self._shared: asyncio.Task[StreamState] | None = None
        self._listens = False
        self._drifts: Sequence[Drift] = ()
        client.on_lost.append(self._told)

    @property
    def is_certain(self) -> bool:
        """Whether what is remembered of the log may be relied upon now; begins a look when it is time for one."""
        age_s = time.monotonic() - self._seen_at
        if RENEW_S < age_s <= RELY_S and (self._shared is None or self._shared.done()):
            self._begin()
        return age_s <= RELY_S and self.identity != ""

    async def confirm(self) -> bool:
        """`is_certain`, after a look if need be; raises `LogUnusable` for a stream that is missing or not eventjet's.

        False as well where the server answers nothing, or these credentials may not look.
        """
        if not self.is_certain:
            look = self._shared
            if look is None or look.done():
                look = self._begin()
            try:
                await asyncio.shield(look)
            except LogUnusable:
                raise
            except StoreError:
                return False
        return self.is_certain

    @property
    def first(self) -> int | None:
        """Position of the first record by the last look; None where it showed none."""
        return self._seen.first if self._seen is not None and self._seen.messages else None

    @property
    def server_version(self) -> str:
        """Of the server that told of the stream last; empty where none did."""
        return "" if self._seen is None else self._seen.metadata.get("_nats.ver", "")

    def check_settings(self) -> None:
        """Raise `LogDrifted` where the last look showed settings with which nothing may be recorded."""
        if self._drifts and self._seen is not None:
            check_settings(self._seen)

    async def drifts(self, age_s: float) -> Sequence[Drift]:
        """What has drifted by a look that is no older; raises as `look`."""
        await self._renewed(age_s)
        return self._drifts

    async def end(self, age_s: float) -> int | None:
        """Position of the last record by a look that is no older; None where it cannot be known."""
        try:
            await self._renewed(age_s)
        except StoreError:
            return None
        return None if self._seen is None else self._seen.last

    async def _renewed(self, age_s: float) -> None:
        if time.monotonic() - self._seen_at > age_s:
            look = self._shared
            if look is None or look.done():
                look = self._begin()
            await asyncio.shield(look)

    async def look(self) -> StreamState:
        """The stream as its leader knows it now; raises `LogUnusable`, `StoreUnavailable` and `Forbidden`."""
        if not self._listens:
            self._listens = True
            await self._client.serve(f"$JS.EVENT.ADVISORY.STREAM.*.{self._stream}", lambda _: self._told())
        asked_at = time.monotonic()
        try:
            found = await info(self._client, self._stream)
        except LogUnusable:
            self._told()
            raise
        before, self._seen = self._seen, found
        missing = loss(found)
        if before is not None and (_is_another(before, found) or missing != self.loss):
            self._told()
        self.identity = found.metadata.get(IDENTITY, "")
        identity_of(found)
        self.loss = missing
        self.aggregates = frozenset(found.metadata.get(AGGREGATES, "").split())
        self._warn(drifts_of(found))
        self._seen_at = asked_at
        return found

    async def close(self) -> None:
        """End the look under way."""
        if self._shared is not None:
            self._shared.cancel()
            await asyncio.wait({self._shared})

    def _begin(self) -> asyncio.Task[StreamState]:
        self._shared = asyncio.create_task(self.look(), name=f"eventjet look at {self._stream}")
        self._shared.add_done_callback(_taken)
        return self._shared

    def _warn(self, drifts: Sequence[Drift]) -> None:
        if drifts != self._drifts:
            self._drifts = drifts
            for drift in drifts:
                logs.LOG_DRIFTED.tell(_log, drift=drift)

    def _told(self) -> None:
        """The stream may hold another past."""
        self._seen_at = float("-inf")
        for forget in self.on_changed:
            forget()


def _is_another(before: StreamState, found: StreamState) -> bool:
    """Whether the stream was made again, restored or rolled back."""
    made = (before.metadata.get(IDENTITY), before.created)
    return made != (found.metadata.get(IDENTITY), found.created) or found.last < before.last


def _taken(look: asyncio.Task[StreamState]) -> None:
    """Nobody waits for what it raises: the next one raises it again."""
    if not look.cancelled():
        look.exception()
