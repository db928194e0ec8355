"""`Repositories`: the repositories of one app over one log, and the way to open them on a server."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar, cast

from eventjet.codec.subjects import snapshot_bucket
from eventjet.commands.histories import Snapshots
from eventjet.commands.repository import Repository
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.process import is_process
from eventjet.domain.subscription import shown_name
from eventjet.errors import StoreError, Unreachable, UsageError
from eventjet.jetstream.client import Client, connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.snapshots import KeyValueSnapshots, SnapshotCodec
from eventjet.log.store import EventStore
from eventjet.loop_guard import LoopGuard
from eventjet.nats.client import NatsClient
from eventjet.observability import logs, tracing
from eventjet.projections.app_ref import Application
from eventjet.settings import Settings

_log = logging.getLogger(__name__)

S = TypeVar("S")
E = TypeVar("E")


class Repositories:
    """One repository for each aggregate type, made when it is first asked for."""

    def __init__(self, app: Application, store: EventStore, snapshots: KeyValueSnapshots | None = None) -> None:
        self.app = app
        self.store = store
        self.catalog = app.catalog.of_log()
        """With what this log declares void."""
        self.guard = LoopGuard()
        """Of all that awaits on this connection."""
        self._snapshots = snapshots
        self._made: dict[Any, Repository[Any, Any]] = {}

    def of(self, aggregate: AggregateType[S, E], /) -> Repository[S, E]:
        """The repository of one aggregate type, the same for every call; raises `UsageError` for a stranger."""
        if not isinstance(aggregate, type):
            kind = type(aggregate).__name__
            raise UsageError(
                f"A repository is asked for with a {kind}. Give the class of the aggregate, for instance Account."
            )
        if aggregate not in self._made:
            info = self.app.aggregates.get(aggregate)
            if info is None:
                where = "processes" if is_process(aggregate) else "aggregates"
                raise UsageError(
                    f"{shown_name(aggregate)} is not listed in the app {self.app.name!r}. List it in App({where}=[…])."
                )
            snapshots: Snapshots[Any] | None = None
            if info.snapshot_every is not None and self._snapshots is not None:
                snapshots = Snapshots(self._snapshots, SnapshotCodec[Any](aggregate), info.snapshot_every)
            initial = cast("Callable[[], Any]", aggregate)
            self._made[aggregate] = Repository(self.app.name, self.store, self.catalog, initial, snapshots, self.guard)
        return self._made[aggregate]

    def forget(self) -> None:
        """Drop every cached state: the stream may hold another past."""
        for repository in self._made.values():
            repository.cache.clear()
            if repository.claims is not None:
                repository.claims.forget()


@asynccontextmanager
async def open_repositories(
    app: Application, settings: Settings, nats: NatsClient | None = None
) -> AsyncGenerator[tuple[Repositories, Client]]:
    """Connect, or take an open client, and on the way out wait for the saves in flight.

    Raises `Unreachable` and `UsageError`.
    """
    client = await connect(settings, nats)
    known = app.catalog.aggregates
    store = JetStreamStore(app.name, client, save_timeout_s=settings.save_timeout_s, aggregates=known)
    snapshots = KeyValueSnapshots(snapshot_bucket(app.name), client)
    repositories = Repositories(app, store, snapshots)
    repositories.guard.check()  # from here on it belongs to this loop
    store.stream.on_changed.append(repositories.forget)
    async with AsyncExitStack() as ending:
        # In reverse, each even when one before it was cancelled.
        ending.enter_context(tracing.connected())
        ending.push_async_callback(client.close)
        ending.push_async_callback(snapshots.close)
        ending.push_async_callback(store.settle)
        with suppress(StoreError, Unreachable):
            await store.stream.look()  # tells what has drifted
            if store.unknown:
                logs.AGGREGATES_UNKNOWN.tell(_log, stream=app.name, names=", ".join(store.unknown))
        await store.check_server()
        yield repositories, client
