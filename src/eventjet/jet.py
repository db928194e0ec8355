"""`Jet`: an application's open connection to its log and its read models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar, cast, overload

from eventjet.codec.headers import RawRecord
from eventjet.codec.records import Decoder
from eventjet.commands import Blobs, Committed, Imported, ImportReport, Planned, Repository
from eventjet.commands.blobs import store_blobs
from eventjet.commands.execute import transact
from eventjet.commands.history import tail_log
from eventjet.commands.importing import Importer
from eventjet.commands.repository import Repositories, open_repositories
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.blob import blobs_in
from eventjet.domain.moment import check_timeout
from eventjet.domain.process import Acts, is_process
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.domain.unique import CLAIMS
from eventjet.errors import EventjetError, LogUnusable, NotCaughtUp, OutcomeUnknown, StoreError, UsageError
from eventjet.errors.projection import ANOTHER_LOG, NO_WORKER
from eventjet.jetstream.client import Client, connect
from eventjet.log.gathering import gather
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.mirror import LogReader
from eventjet.log.public_stream import check_public_stream
from eventjet.log.store import EventStore, LogState
from eventjet.log.topology import Topology, declare, note_aggregates, others_answering
from eventjet.log.unknown_events import LIST_S, unknown_aggregates
from eventjet.nats.client import NatsClient
from eventjet.projections.app_ref import Application, Declared, projections_of
from eventjet.projections.sql_projection import AnyResolved
from eventjet.runtime import GuardedBlock, GuardedIterator
from eventjet.serving.service import Service
from eventjet.settings import Settings
from eventjet.sql.waiting import Checkpoints, Waiting
from eventjet.subscriptions.cursor_control import create_missing_cursors
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of, has_timers, probes_of
from eventjet.subscriptions.process_waiting import is_settled, not_settled, settled, waits_for

_TOKEN = re.compile(r"([a-z][a-z0-9_]{0,62}):(0|[1-9][0-9]{0,18})(?:@([A-Za-z0-9_-]{1,64}))?", re.ASCII)
_POSITION_MAX = 2**63 - 1
_END_S = 1.0
"""How long the end of the log is asked for after a position was not reached."""

S = TypeVar("S")
E = TypeVar("E")
A = TypeVar("A", bound=Acts)
S1 = TypeVar("S1")
E1 = TypeVar("E1")
S2 = TypeVar("S2")
E2 = TypeVar("E2")
S3 = TypeVar("S3")
E3 = TypeVar("E3")
S4 = TypeVar("S4")
E4 = TypeVar("E4")


class ReadModels(Protocol):
    """Read models that are folded from a log in memory without workers."""

    async def catch_up(self, resolved: AnyResolved) -> int:
        """Fold the rest of the log into the rows, and return the position of its last record."""
        ...


class Jet:
    """An application's open connection to its log and its read models; made by `App.connect`.

    Safe for any number of tasks of the event loop that opened it. In another loop, such as that of another thread or of
    a forked process, every method that awaits raises `UsageError` at once.

    ```python
    accounts = jet.repository(Account)
    await jet.transact(
        accounts.decide("a-1", Account.deposit, Decimal(40)),
        accounts.decide("a-2", Account.deposit, Decimal(40)),
    )
    assert [recorded.position async for recorded in jet.tail()] == [1, 2]
    ```
    """

    def __init__(
        self,
        repositories: Repositories,
        settings: Settings,
        client: Client | None = None,
        read_models: ReadModels | None = None,
    ) -> None:
        self.name = repositories.app.name
        self.settings = settings
        self.store: EventStore = repositories.store
        self.client = client
        """None for a log in memory."""
        self.run_processes: Callable[[], Awaitable[None]] | None = None
        """Runs the processes of a log in memory until they rest; None where nobody does, and on a server."""
        self._mirror: JetStreamStore | None = None
        self._mirror_client: Client | None = None
        self._mirror_opening = asyncio.Lock()
        self._read_models = read_models
        self._app = repositories.app
        self._repositories = repositories
        self._guard = repositories.guard
        self._catalog = repositories.catalog
        self._decoder = Decoder(self._catalog)
        self._checkpoints = Checkpoints(settings.database)
        # Notices of workers arrive over the connection; a log in memory has none.
        self._waiting = Waiting(self.name, self._checkpoints, client.serve if client is not None else None)

    @property
    def blobs(self) -> Blobs:
        """The content of blobs: stored, read and saved over this connection."""
        return Blobs(self.store.objects, self._guard)

    def repository(self, aggregate: AggregateType[S, E], /) -> Repository[S, E]:
        """Return the repository of one aggregate type, the same for every call.

        Raises `UsageError` for a type that the app does not list.
        """
        return self._repositories.of(aggregate)

    @overload
    async def transact(self, a: Planned[S1, E1], /) -> tuple[Committed[S1, E1]]: ...
    @overload
    async def transact(
        self, a: Planned[S1, E1], b: Planned[S2, E2], /
    ) -> tuple[Committed[S1, E1], Committed[S2, E2]]: ...
    @overload
    async def transact(
        self, a: Planned[S1, E1], b: Planned[S2, E2], c: Planned[S3, E3], /
    ) -> tuple[Committed[S1, E1], Committed[S2, E2], Committed[S3, E3]]: ...
    @overload
    async def transact(
        self, a: Planned[S1, E1], b: Planned[S2, E2], c: Planned[S3, E3], d: Planned[S4, E4], /
    ) -> tuple[Committed[S1, E1], Committed[S2, E2], Committed[S3, E3], Committed[S4, E4]]: ...
    @overload
    async def transact(self, /, *plans: Planned[Any, Any]) -> tuple[Committed[Any, Any], ...]: ...
    async def transact(self, /, *plans: Planned[Any, Any]) -> tuple[Committed[Any, Any], ...]:
        """Execute decisions on several aggregates in one atomic append: everything is recorded, or nothing.

        All decisions are made again after a conflict. If it is repeated with the same command ids, it returns what came
        of all members the first time. Raises `Refused` if a decision records nothing, an aggregate is named twice, or
        the log has only some of the commands; `UsageError` if only some have an id; `CommandReused`; what a decision
        raises; and what `EventStore.append` raises.
        """
        self._guard.check()
        return await transact(self.store, plans)

    async def resolve(self, unknown: OutcomeUnknown) -> int:
        """Find out what became of a save whose deadline passed, and return the position of its last event.

        The log is read first, and the same events are sent again only if the log has none in their place. Raises
        `ConcurrencyConflict` if another writer's event is in their place, so that nothing of the save is stored;
        `OutcomeUnknown` again while the server does not answer, or a subclass of it: `SaveTorn` if the log has only a
        part of the save, and `LogReplaced` if it is another log than the one on which the save began; `BlobMissing` if
        a sweep has removed the content of a blob meanwhile; and `UsageError` for a log in
        memory.
        """
        self._guard.check()
        if not unknown.writes:
            raise unknown  # there are no events to send, and the error says already what the log has
        resolve = getattr(self.store, "resolve", None)
        if resolve is None:
            raise UsageError("This log knows every outcome at once, so there is nothing to resolve.")
        if self._catalog.with_blobs:
            events = (event.encoded.event for write in unknown.writes for event in write.events)
            await store_blobs(self.store.objects, [blob for event in events for blob in blobs_in(event)])
        return await resolve(unknown.writes, unknown.log)

    async def init(self) -> Topology:
        """Create missing streams and buckets, and report existing ones that differ without changing them.

        A reactor or a process without a cursor gets one at its start position, and the log notes the names of the app's
        aggregates. Neither happens in a log with events of aggregates that the app does not declare, which are in
        `Topology.unknown`: first events of aggregates whose names are not noted are refused there. Problems of a
        publication, of an inbox or of noting the names are in `Topology.unusable`. Raises `UsageError` for a log in
        memory, `LogUnusable` for a stream that is not eventjet's, and `Forbidden`.
        """
        self._guard.check()
        if self.client is None:
            raise UsageError("This log is not on a server, so there is nothing to create.")
        declarations = declarations_of(self._app)
        unusable: list[LogUnusable] = []
        for publication in self._app.publications.values():
            try:
                await check_public_stream(self.client, publication.stream, publication.name)
            except LogUnusable as error:
                unusable.append(error)
        aggregate_names, replicas = {*self._catalog.aggregates, CLAIMS}, self.settings.replicas
        gathered: list[str] = []
        for inbox in self._app.inboxes.values():
            try:
                if inbox.sources and await gather(self.client, inbox, replicas):
                    gathered.append(inbox.stream)
            except LogUnusable as error:
                unusable.append(error)
        needs = {
            "cursors": bool(declarations),
            "timers": has_timers(self._app),
            "objects": bool(self._catalog.with_blobs),
        }
        topology = await declare(self.client, self.name, replicas, **needs, aggregates=aggregate_names)
        other_responders = await others_answering(self.client, probes_of(self._app))
        unknown_names = await self.client.run(unknown_aggregates(self.name, self._catalog.aggregates), LIST_S)
        if not unknown_names:
            note_error = await note_aggregates(self.client, self.name, aggregate_names)
            unusable += [] if note_error is None else [note_error]
        topology = replace(
            topology,
            created=(*topology.created, *gathered),
            others=other_responders,
            unknown=tuple(unknown_names),
            unusable=tuple(unusable),
        )
        if unknown_names or not declarations:
            return topology
        stored_cursors = Cursors(self.client, self.name)
        cursors, errors = await create_missing_cursors(stored_cursors, self.store, self.client, declarations.values())
        return replace(topology, cursors=tuple(cursors), unusable=(*unusable, *errors))

    async def append_many(
        self,
        events: Iterable[Imported] | AsyncIterable[Imported],
        *,
        source: str,
        progress: Callable[[int], object] | None = None,
    ) -> ImportReport:
        """Import events in batches; run it again with the same `source` and events to store what is missing.

        The events of one aggregate are given in their order. `source` names the import, in 1 to 100 characters of
        `A-Za-z0-9_.:-`. `progress` is called after each batch with the number of the import's events that are in the
        log. An asynchronous source of events is cancelled if the import ends with an error.

        Raises `Refused` for an aggregate type whose unique values are claimed already, since an import claims none; for
        an event that is earlier than the aggregate's event before it; if other writers win 100 races in a row; and if
        the stream is replaced meanwhile. Raises `UsageError` for anything that is not an event of the app.
        """
        self._guard.check()
        return await Importer(self._repositories, source).run(events, progress)

    @overload
    async def caught_up(self, projection: str | Declared, *, position: int, timeout_s: float = 5.0) -> None: ...
    @overload
    async def caught_up(self, projection: str | Declared, *, token: str, timeout_s: float = 5.0) -> None: ...
    async def caught_up(
        self,
        projection: str | Declared,
        *,
        position: int | None = None,
        token: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """Wait until a projection, given itself or by name, includes all events up to a position.

        Its worker may run in any process. Give either `position`, of the log of this connection, or `token`, which is
        `Committed.token` and may come from another process. Raises `NotCaughtUp` after `timeout_s` seconds, or at once
        if the projection failed, is paused or retired, or was made from another log; `Unreachable` if the database does
        not answer or the stream is missing; `UsageError` for a projection that the app does not have, for an invalid
        position, and for a token that is not of this app.
        """
        self._guard.check()
        check_timeout(timeout_s)
        name = projection if isinstance(projection, str) else projection.name
        (resolved,) = projections_of(self._app, [name])
        if (position is None) == (token is None):
            raise UsageError("`caught_up` waits for a position or for a token. Give one of them.")
        target, log = position_in(token, self.name) if token is not None else (position, "")
        if not isinstance(target, int) or target < 0:  # refused here, since all waiting calls share one task
            what = target if isinstance(target, int) else type(target).__name__  # its value may be personal
            raise UsageError(f"{what} is not a position. Hand on `Committed.position`, or its `token` as text.")
        if self.client is None:
            if self._read_models is None:
                raise UsageError("This log is in memory, and nothing keeps read models of it. Take `App.in_memory`.")
            reached = await self._read_models.catch_up(resolved)
            if log not in ("", self.store.identity):
                raise NotCaughtUp(name, target, reached, timeout_s, ANOTHER_LOG)
            if reached < target:  # no other process writes to this log
                raise NotCaughtUp(name, target, reached, timeout_s, reason=_log_ends(reached))
            return
        if await self.store.confirm():
            log = self.store.continuing(log, target) if log else self.store.identity
        try:
            await self._waiting.caught_up(resolved, target, timeout_s, log)
        except NotCaughtUp as error:
            reason = await self._late_reason(target) if error.reason in (None, NO_WORKER) else None
            if reason is None:
                raise
            raise NotCaughtUp(name, target, error.reached, timeout_s, error.state, reason) from None

    async def reader(self) -> EventStore:
        """Return the store to read events from in the order of the log: a mirror's, if `Settings.read_from` names one.

        The mirror is compared with the log. Raises `LogUnusable` if it may not be read in its place, and `Unreachable`.
        """
        self._guard.check()
        if self.client is None or self.settings.read_from is None:
            return self.store
        async with self._mirror_opening:
            if self._mirror is None:
                client = await connect(self.settings.for_reads())
                self._mirror_client = client
                self._mirror = JetStreamStore(
                    self.name, client, save_timeout_s=self.settings.save_timeout_s, is_mirror=True
                )
        assert self._mirror_client is not None
        await LogReader(self.name, self.client, self._mirror_client).states()
        return self._mirror

    async def _late_reason(self, target: int) -> str | None:
        """Return in words which stream does not have a position that was waited for; None if it is not known."""
        end = await self._end_of_log()
        if end is not None and end < target:
            return _log_ends(end)
        if self.settings.read_from is not None:
            with suppress(EventjetError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    mirror_end = (await (await self.reader()).state()).last
                    if mirror_end < target:
                        return f"the mirror that workers read ends at position {mirror_end}, and the log at {end}"
        return None

    async def _end_of_log(self) -> int | None:
        """Return the position of the last record; None if the server does not say it within a moment."""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_END_S):
                return (await self.store.state()).last
        return None

    async def settled(
        self,
        process: type[A],
        process_id: str,
        /,
        *,
        timeout_s: float = 5.0,
        until: Callable[[A], bool] | None = None,
    ) -> A:
        """Wait until a process instance has come to its end, and return its state.

        A process is at its end when it has begun and its state has neither a next step nor a deadline. Where that is
        not the outcome you wait for, `until` decides by the state. A worker may run in any process; an instance without
        events is waited for, too. In memory, `testing.world` runs the processes, and nothing is waited for. Raises
        `NotSettled` after `timeout_s` seconds, which says where the instance is and why; `UsageError` for a class that
        is no process of the app; and as `Repository.load`.
        """
        self._guard.check()
        check_timeout(timeout_s)
        if not is_process(process):
            raise UsageError(f"{shown_name(process)} is not a process. Give a class that `@process(…)` declares.")
        executor = self.repository(cast("AggregateType[A, Any]", process)).executor
        if self.client is not None:
            return await settled(executor, self.client, process_id, timeout_s=timeout_s, until=until)
        if self.run_processes is not None:
            await self.run_processes()
        folded = await executor.newest(process_id)
        if is_settled(folded, until):
            return own_copy(folded.state)
        record = await self.store.tail(executor.info.name, process_id)
        reason = waits_for(folded, record)
        if self.run_processes is None:
            reason += "; this log is in memory, where processes run in `eventjet.testing.world`"
        raise not_settled(executor.info.name, process_id, None, folded, record, reason)

    def service(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that serves the app's decisions over this connection, as `eventjet serve` does.

        At the end it finishes the requests that it has taken. Raises `UsageError` for a log in memory.
        """
        return GuardedBlock(self._service(), self._guard, "jet.service()")

    @asynccontextmanager
    async def _service(self) -> AsyncGenerator[None]:
        if self.client is None:
            raise UsageError("This log is in memory. Serve an app that is connected to a NATS server.")
        service = Service(self._repositories, self.client, self._app.served)
        try:
            await service.open()
            yield
        finally:
            await service.close()

    def masked(self, type_name: str, schema: int | None, body: Any) -> Any:
        """Return the JSON of an event's body with personal values masked."""
        return self._catalog.masked(type_name, schema, body)

    async def close(self) -> None:
        """Close the database connections of this `Jet`; pending calls of `caught_up` raise `Unreachable`."""
        self._guard.check()
        async with AsyncExitStack() as stack:
            # The stack closes in reverse order, and each part even if the one before it was cancelled.
            if self._mirror is not None and self._mirror_client is not None:
                stack.push_async_callback(self._mirror_client.close)
                stack.push_async_callback(self._mirror.settle)
            stack.push_async_callback(self._checkpoints.close)
            stack.push_async_callback(self._waiting.close)

    def tail(
        self,
        deliver: Literal["all", "last", "new"] = "all",
        *,
        position: int | None = None,
        since: datetime | None = None,
        until: int | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[Recorded[Any]]:
        """Yield the log's events in order, from a start position to the end of the log or beyond.

        * `deliver`: start at the first event (`all`), at the last (`last`) or after the last (`new`)
        * `position`: start at this position instead
        * `since`: start at this time instead; the time of an event is here when the log stored it, which for imported
          events is not their `recorded_at`
        * `until`: end after this position
        * `limit`: end after so many events
        * `follow`: wait for more events at the end of the log

        Raises `UnknownEvent` and `UndecodableEvent`, and `UsageError` for a time without a zone, and for an invalid
        position or limit.
        """
        bounds = {"position": position, "since": since, "until": until, "limit": limit}
        return GuardedIterator(self._tail(deliver=deliver, follow=follow, **bounds), self._guard)

    async def _tail(self, **bounds: Any) -> AsyncGenerator[Recorded[Any]]:
        await self.skipped()
        async for recorded in tail_log(await self.reader(), self._decoder, **bounds):
            yield recorded

    def decode(self, record: RawRecord) -> Recorded[Any] | None:
        """Decode a record of the log as an event of the app; None for a retired event and for a skipped record."""
        return self._decoder(record)

    async def skipped(self) -> Mapping[int, str]:
        """Read the skip markers of the log, which `decode` obeys from now on; return reasons by position."""
        self._guard.check()
        self._catalog.skipped.update(await self.store.skip_markers())
        return self._catalog.skipped

    async def log(self) -> LogState:
        """Return the stream identity and the first and last position of the log."""
        self._guard.check()
        return await self.store.state()


@asynccontextmanager
async def open_jet(app: Application, settings: Settings, nats: NatsClient | None = None) -> AsyncGenerator[Jet]:
    """Connect, or use an open client; at the end wait for the saves in flight, and close what was opened."""
    async with open_repositories(app, settings, nats) as (repositories, client):
        jet = Jet(repositories, settings, client)
        try:
            yield jet
        finally:
            await jet.close()


def _log_ends(end: int) -> str:
    return f"the log ends at position {end}"


def position_in(token: str, app: str) -> tuple[int, str]:
    """Return a token's position and the identity of its log, if it has one; raises `UsageError` for another app's."""
    match = _TOKEN.fullmatch(token.strip(" \t"))
    if match is None or int(match[2]) > _POSITION_MAX:
        raise UsageError(
            f"{token[:80]!r} is not a token. Hand on `Committed.token` as it is, for instance {app}:1234@…."
        )
    if match[1] != app:
        raise UsageError(
            f"The token {match[0]!r} is of the app {match[1]!r}, and this connection is of {app!r}. "
            "Hand it to a process of the app that made it."
        )
    return int(match[2]), match[3] or ""
