"""An operator who pauses, resumes, decides about quarantined events and sets cursors, at any time."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from eventjet.codec.headers import MSG_ID, header
from eventjet.domain.position import PAUSED
from eventjet.errors import EventjetError
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import Cursors
from tests.simulation.reactions.books import OPERATOR
from tests.simulation.reactions.server import Link, SimulatedClient

if TYPE_CHECKING:
    from tests.simulation.reactions.world import ReactionWorld


class Operator:
    """The operator, over a connection like any other."""

    def __init__(self, world: ReactionWorld) -> None:
        self._world = world
        self._cursors = Cursors(SimulatedClient(world.server, Link(world.network, OPERATOR)), world.app.name)

    async def act(self) -> None:
        """Try one random action."""
        world = self._world
        names = list(world.books.by_name)
        name = names[int(world.random() * len(names))]
        draw = world.random()
        if draw < 0.25:
            await self._pause(name)
        elif draw < 0.6:
            await self._try("retried", name, cursor_control.retry(self._cursors, name, None))
        elif draw < 0.75:
            await self._drop(name)
        else:
            await self._set(name, forwards=draw > 0.95)

    async def calm(self) -> None:
        """Resume paused cursors, and sometimes retry all quarantined events."""
        world = self._world
        for name, known in world.books.by_name.items():
            while known.cursor.state == PAUSED:
                await self._try("resumed at last", name, cursor_control.resume(self._cursors, [name]))
            if world.random() < 0.5:
                await self._try("retried at last", name, cursor_control.retry(self._cursors, name, None))

    async def _try(self, action_name: str, name: str, action: Awaitable[object]) -> None:
        world = self._world
        world.note("operator", action_name, name)
        try:
            await action
            world.count(f"operator {action_name}")
        except EventjetError as error:
            world.note("operator", type(error).__name__)
            world.count(f"operator had {type(error).__name__}")

    async def _pause(self, name: str) -> None:
        world = self._world
        await self._try("paused", name, cursor_control.pause(self._cursors, [name]))
        world.loop.after(world.random() * 4.0, lambda: world.loop.create_task(self._resume(name)))

    async def _resume(self, name: str) -> None:
        await self._try("resumed", name, cursor_control.resume(self._cursors, [name]))

    async def _drop(self, name: str) -> None:
        known = self._world.books.by_name[name]
        quarantined = [position for position, entry in known.entries.items() if entry.event.resolution == "quarantined"]
        if quarantined:
            await self._try("dropped", name, cursor_control.drop(self._cursors, name, quarantined[:1]))

    async def _set(self, name: str, *, forwards: bool) -> None:
        world = self._world
        log = world.truth.all
        now = world.books.by_name[name].cursor.position
        position = now + int(world.random() * (len(log) - now + 1)) if forwards else int(world.random() * (now + 1))
        if forwards and not world.work.may_be_skipped:
            return
        event_id = (header(log[position - 1][3], MSG_ID) or "") if position else ""
        cursor = Cursor(name, "", world.truth.identity, position, event_id)
        action_name = "set forwards" if forwards else "set back"
        await self._try(action_name, name, cursor_control.set_position(self._cursors, cursor))
