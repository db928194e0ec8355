"""What followers do about events: the product's, or with one of its rules broken on purpose."""

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


def followed_of(
    app: App, one: Declaration, feed: EventSource, repositories: Repositories, client: Client, deps: Any, rules: Rules
) -> EventHandler:
    """As the supervisor makes it of a declaration."""
    for cls, info in app.processes.items():
        if info.name == one.name:
            runner, timers = ProcessRunner(repositories, cls, info), JetStreamTimers(client, app.name)
            if not rules.waits:
                runner.cache_first = lambda event: None  # else the first event itself shows that a replica lags
                return RestsTooSoon(one, feed, runner, timers)
            return (ProcessHandler if rules.clears_last else ClearsFirst)(one, feed, runner, timers)
    kind = ReactorHandler if rules.orders else HasNoOrder
    return kind(one, feed, app.reactors[one.declared_as], repositories, cast("Deps", Given(deps)))


class Given:
    """Deps that are open from the beginning."""

    def __init__(self, value: Any) -> None:
        self._value = value

    async def opened(self) -> Any:
        return self._value


class RestsTooSoon(ProcessHandler):
    """Believes a replica that does not know of what woke it."""

    async def wake(self, process_id: str, position: int = 0, fired: int = 0) -> None:
        await super().wake(process_id, 0, fired)


class ClearsFirst(ProcessHandler):
    """Forgets a timer before it is dealt with."""

    async def come_due(self, due: Due) -> None:
        await self._timers.clear(self.declaration.name, due)
        await super().come_due(due)


class HasNoOrder(ReactorHandler):
    """Handles the events of an aggregate at once."""

    def work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try]:
        (aggregate, aggregate_id), handle = super().work(event)
        return (aggregate, f"{aggregate_id}/{event.position}"), handle
