"""`Jet`: an application's open connection to its log and its read models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import Decoder, RawRecord
from eventjet.domain.aggregate import AggregateInfo, AggregateType
from eventjet.domain.recorded import Recorded
from eventjet.errors import UsageError
from eventjet.importing import Imported, Importer, ImportReport
from eventjet.projections.bound import BoundProjection
from eventjet.repository import Repository
from eventjet.settings import Settings
from eventjet.store.connection import connect
from eventjet.store.jetstream import JetStreamStore
from eventjet.store.requests import Requests
from eventjet.store.store import EventStore, LogState
from eventjet.store.topology import Topology, declare

S = TypeVar("S")
E = TypeVar("E")


class Jet:
    """Made by `App.connect`; safe for any number of tasks of one loop."""

    def __init__(
        self,
        name: str,
        store: EventStore,
        catalog: Catalog,
        aggregates: Mapping[Any, AggregateInfo],
        projections: Mapping[str, BoundProjection],
        settings: Settings,
    ) -> None:
        self.name = name
        self.store = store
        self.settings = settings
        self._catalog = catalog
        self._aggregates = aggregates
        self._projections = projections
        self._repositories: dict[Any, Repository[Any, Any]] = {}
        self._decoder = Decoder(catalog)
        self.requests: Requests | None = None

    def repository(self, aggregate: AggregateType[S, E], /) -> Repository[S, E]:
        """The repository of one aggregate type, the same for every call; raises `UsageError` for a stranger."""
        found = self._repositories.get(aggregate)
        if found is None:
            info = self._aggregates.get(aggregate)
            if info is None:
                raise UsageError(f"{aggregate!r} is not an aggregate of {self.name!r}. List it in App(aggregates=[…]).")
            found = Repository(self.name, self.store, self._catalog, cast("Callable[[], Any]", aggregate), info)
            self._repositories[aggregate] = found
        return found

    async def init(self) -> Topology:
        """Create the stream and the bucket where they are missing; report what differs, change nothing."""
        if self.requests is None:
            raise UsageError("This log is not on a server, so there is nothing to create.")
        return await declare(self.requests, self.name, self.settings.replicas)

    async def append_many(
        self,
        events: Iterable[Imported] | AsyncIterable[Imported],
        *,
        source: str,
        progress: Callable[[int], object] | None = None,
    ) -> ImportReport:
        """Import events in batches, ordered per aggregate. Run the same `source` again to store what is missing."""
        return await Importer(self.store, self._catalog, source).run(events, progress)

    async def caught_up(self, projection: str, *, position: int, timeout_s: float = 5.0) -> None:
        """Wait until the projection is true up to `position`, in whichever process its worker runs.

        Raises `NotCaughtUp` after `timeout_s`, and `UsageError` for a projection the app does not have.
        """
        from eventjet.projections.checkpoint import wait_caught_up

        bound = self._projections.get(projection)
        if bound is None:
            raise UsageError(f"{self.name!r} has no projection {projection!r}. It has {', '.join(self._projections)}.")
        await wait_caught_up(self.settings.database, bound, position, timeout_s)

    async def tail(self, *, start: int = 1, follow: bool = False) -> AsyncIterator[Recorded[Any]]:
        """All events of the log in order, from a position on."""
        async for record in self.store.records(start=start, follow=follow):
            recorded = self._decoder(record)
            if recorded is not None:
                yield recorded

    def decode(self, record: RawRecord) -> Recorded[Any] | None:
        """One record as the app knows it."""
        return self._decoder(record)

    async def log(self) -> LogState:
        """Identity and ends of the log."""
        return await self.store.state()


@asynccontextmanager
async def open_jet(
    name: str,
    catalog: Catalog,
    aggregates: Mapping[Any, AggregateInfo],
    projections: Mapping[str, BoundProjection],
    settings: Settings,
) -> AsyncGenerator[Jet]:
    """Connect, and on the way out wait for the saves in flight."""
    client, requests = await connect(settings)
    store = JetStreamStore(name, client, requests, save_timeout_s=settings.save_timeout_s)
    jet = Jet(name, store, catalog, aggregates, projections, settings)
    jet.requests = requests
    try:
        yield jet
    finally:
        await store.settle()
        await client.close()
