"""The event handlers of schedules: those of the product, or with a rule broken on purpose."""

from __future__ import annotations

from typing import Any, cast

from eventjet.app import App
from eventjet.commands.repository import Repositories
from eventjet.domain.quarantined import AggregateKey
from eventjet.domain.recorded import Recorded
from eventjet.jetstream.client import Client
from eventjet.log.timers import Due, JetStreamTimers
from eventjet.subscriptions.declarations import Declaration
from eventjet.subscriptions.event_source import EventSource
from eventjet.subscriptions.handlers import Deps, EventHandler, ProcessHandler, ReactorHandler, Try
from eventjet.subscriptions.process_steps import ProcessRunner
from tests.simulation.reactions.streams import Rules


def handler_of(
    app: App,
    declaration: Declaration,
    feed: EventSource,
    repositories: Repositories,
    client: Client,
    deps: Any,
    rules: Rules,
) -> EventHandler:
    """Return the handler of a declaration as the supervisor makes it."""
    for cls, info in app.processes.items():
        if info.name == declaration.name:
            runner, timers = ProcessRunner(repositories, cls, info), JetStreamTimers(client, app.name)
            if not rules.waits:
                runner.cache_first = lambda event: None  # else the first event itself shows that a replica lags
                return RestsTooSoon(declaration, feed, runner, timers)
            return (ProcessHandler if rules.clears_last else ClearsFirst)(declaration, feed, runner, timers)
    kind = ReactorHandler if rules.orders else HasNoOrder
    return kind(declaration, feed, app.reactors[declaration.declared_as], repositories, cast("Deps", OpenDeps(deps)))


class OpenDeps:
    """Deps that are already open."""

    def __init__(self, value: Any) -> None:
        self._value = value

    async def opened(self) -> Any:
        return self._value


class RestsTooSoon(ProcessHandler):
    """Believes a replica that lacks the event that woke the process."""

    async def wake(self, process_id: str, position: int = 0, fired: int = 0) -> None:
        await super().wake(process_id, 0, fired)


class ClearsFirst(ProcessHandler):
    """Clears a timer before it is handled."""

    async def come_due(self, due: Due) -> None:
        await self._timers.clear(self.declaration.name, due)
        await super().come_due(due)


class HasNoOrder(ReactorHandler):
    """Handles the events of an aggregate concurrently."""

    def work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try]:
        (aggregate, aggregate_id), handle = super().work(event)
        return (aggregate, f"{aggregate_id}/{event.position}"), handle
