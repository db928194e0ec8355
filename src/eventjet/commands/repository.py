"""`Repository`: load and change the aggregates of one type. The module `execute` describes how a command runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import FunctionType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.commands import request_of
from eventjet.codec.headers import context_headers
from eventjet.codec.subjects import snapshot_bucket
from eventjet.commands.execute import Executor, Planned, execute
from eventjet.commands.history import Bounds
from eventjet.commands.loading import Snapshots
from eventjet.commands.unique import UniqueValues
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.decision import Committed, check_decision, decided_on
from eventjet.domain.process import heard_prefix, is_process
from eventjet.domain.recorded import NO_METADATA, Metadata, Recorded
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import Refused, StoreError, Unreachable, UsageError
from eventjet.jetstream.client import Client, connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.snapshots import KeyValueSnapshots, SnapshotCodec
from eventjet.log.store import EventStore
from eventjet.nats.client import NatsClient
from eventjet.observability import logs, tracing
from eventjet.projections.app_ref import Application
from eventjet.runtime import LoopGuard
from eventjet.settings import Settings
from eventjet.text import shown

_log = logging.getLogger(__name__)

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


class Repository(Generic[S, E]):
    """The aggregates of one type over one connection: load them, read their histories, execute decisions on them.

    Safe for any number of tasks of the event loop that opened the connection.

    ```python
    accounts = jet.repository(Account)
    done = await accounts.execute("a-1", Account.deposit, Decimal(100))
    assert (done.state.balance, done.version) == (100, 1)
    assert (await accounts.load("a-1")).balance == 100
    ```
    """

    def __init__(
        self,
        app: str,
        store: EventStore,
        catalog: Catalog,
        aggregate: Callable[[], S],
        snapshots: Snapshots[S] | None = None,
        guard: LoopGuard | None = None,
    ) -> None:
        self.executor: Executor[S, E] = Executor(app, store, catalog, aggregate, snapshots)
        self._unique = UniqueValues(self.executor) if self.executor.info.unique else None
        self._guard = guard or LoopGuard()
        self._aggregate = aggregate

    @property
    def unique(self) -> UniqueValues:
        """The unique values of the aggregate type; raises `UsageError` if it declares none."""
        if self._unique is None:
            raise UsageError(
                f"{self.executor.info.name!r} declares no values that are unique. Name an aggregate with a method that "
                "is `@unique(…)`."
            )
        return self._unique

    async def load(
        self,
        aggregate_id: str,
        /,
        *,
        version: int | None = None,
        position: int | None = None,
        at: datetime | None = None,
    ) -> S:
        """Return the state of an aggregate now, or as it was at a version, at a position of the log or at a time.

        An id without events has the initial state. The end of the log is read at every call: the state includes every
        event that was stored before, by any process. At most one bound may be given; the state includes the events at
        the bound. Raises `HistoryBroken`, `CodecError`, `StoreUnavailable`, and `UsageError` for a bound that is in the
        future or beyond the end of the log or of the history.
        """
        self._guard.check()
        executor = self.executor
        executor.subject(aggregate_id)
        if version is None and position is None and at is None:
            return own_copy((await executor.newest_of_leader(aggregate_id)).state)
        folded = await executor.histories.load_until(aggregate_id, version=version, position=position, at=at)
        return own_copy(folded.state)

    async def history(
        self,
        aggregate_id: str,
        /,
        *,
        after: int = 0,
        version: int | None = None,
        position: int | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> list[Recorded[E]]:
        """Return recorded events of one aggregate: all of them, or those within bounds.

        * `after`: only events of later versions
        * `version`: only events up to this version
        * `position`: only events up to this position of the log
        * `newest_first`: return the events from the newest to the oldest
        * `limit`: return at most so many events, the oldest or with `newest_first` the newest

        Only the requested events are read, as far as the server allows; the last event takes two direct gets. A bound
        beyond the end is no error. The events must follow one another and the event before them, as in `load`: raises
        `HistoryBroken` if they do not, `CodecError`, `StoreUnavailable`, and `UsageError` for a bound that is not a
        whole number of 0 or more.
        """
        self._guard.check()
        self.executor.subject(aggregate_id)
        bounds = Bounds(after, version, position, newest_first, limit)
        return await self.executor.histories.events(aggregate_id, bounds)

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Call a decision on the aggregate's state and record the events that it returns, all of them or none.

        `decide` is a method of the aggregate, which is called with the state, `args` and `kwargs`, and called again if
        another writer was quicker. Raises what the decision raises, once its state is confirmed as the newest;
        `ConcurrencyConflict` after 100 lost races; and what `EventStore.append` raises. `save_timeout_s` of the
        settings counts from the call: if the command spends it waiting for its turn at the aggregate, or for a read,
        nothing was sent, and it raises `StoreUnavailable`.
        """
        return await self.run(self.decide(aggregate_id, decide, *args, **kwargs))

    def decide(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Planned[S, E]:
        """Plan a decision, which `Jet.transact` executes together with others; arguments as in `execute`."""
        if type(decide) is not FunctionType:
            check_decision(decide, self._aggregate)
        call = partial(decided_on, decide, args=args, kwargs=kwargs)
        return Planned(self.executor, aggregate_id, call, called=decide)

    def command(
        self,
        command_id: str | None = None,
        /,
        *,
        ignoring: Collection[str] = (),
        metadata: Metadata = NO_METADATA,
    ) -> Command[S, E]:
        """Return an idempotent command, which returns its first outcome if it is executed again with the same id.

        An id counts for one aggregate. The newest 1,024 ids of an aggregate are known, and all ids if it has no
        snapshot policy. The id of a command that recorded nothing is not kept. An id that is used again with another
        decision or other arguments raises `CommandReused`; `ignoring` names arguments that may be others when the
        command is repeated, such as the time. Without an id, the command only carries the metadata. `execute` and
        `decide` raise `UsageError` for a name in `ignoring` that the decision does not have.

        Raises `Refused` for an id that begins with `<process>.heard.`, which a process keeps for itself.

        ```python
        deposits = jet.repository(Account).command("request-17", ignoring=("amount",))
        first = await deposits.execute("a-1", Account.deposit, Decimal(5))
        assert await deposits.execute("a-1", Account.deposit, Decimal(6)) == first
        ```
        """
        context_headers(command_id, metadata)  # an invalid id or metadata is refused before a decision is made
        name = self.executor.info.name
        if command_id is not None and is_process(self._aggregate) and command_id.startswith(heard_prefix(name)):
            raise Refused(
                f"The command id {shown(command_id, 60)}",
                f"the process {name!r} notes under such ids which events it has heard, and would pass over others",
                "Use another id.",
            )
        return Command(self, command_id, metadata, ignoring)

    async def run(self, plan: Planned[S, E]) -> Committed[S, E]:
        """Execute a planned decision, with the command id and the metadata of the plan if it has them."""
        self._guard.check()  # before the lock: if another loop took it, the loop of this connection would wait for it
        return (await execute(self.executor.store, (plan,)))[0]

    def forget(self) -> None:
        """Drop every cached state, because the stream may have another history now."""
        self.executor.cache.clear()
        if self._unique is not None:
            self._unique.forget()


class Command(Generic[S, E]):
    """A repository whose `execute` and `decide` carry a command id and metadata; made by `Repository.command`."""

    def __init__(
        self, repository: Repository[S, E], command_id: str | None, metadata: Metadata, ignoring: Collection[str] = ()
    ) -> None:
        self._repository = repository
        self._command_id = command_id
        self._metadata = metadata
        self._ignoring = ignoring

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Execute as `Repository.execute`; if the command id was recorded before, return the first outcome."""
        return await self._repository.run(self.decide(aggregate_id, decide, *args, **kwargs))

    def decide(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Planned[S, E]:
        """Plan as `Repository.decide`; a transaction of planned commands is recorded only once."""
        plan = self._repository.decide(aggregate_id, decide, *args, **kwargs)
        command_id, request = self._command_id, None
        if command_id is not None:
            whose = f"{aggregate_id}\n{command_id}\n"
            request = request_of(decide, args, kwargs, whose=whose, ignoring=self._ignoring)
        return replace(plan, command_id=command_id, metadata=self._metadata, request=request)


class Repositories:
    """The repositories of one app over one log: one for each aggregate type, created at its first use."""

    def __init__(self, app: Application, store: EventStore, snapshots: KeyValueSnapshots | None = None) -> None:
        self.app = app
        self.store = store
        self.catalog = app.catalog.of_log()
        """The app's catalog, with the skip markers of this log (`skipped`)."""
        self.guard = LoopGuard()
        """The check that every call on this connection runs in the connection's event loop."""
        self._snapshots = snapshots
        self._repositories: dict[Any, Repository[Any, Any]] = {}

    def of(self, aggregate: AggregateType[S, E], /) -> Repository[S, E]:
        """Return the one repository of an aggregate type; raises `UsageError` for a type that the app does not list."""
        if not isinstance(aggregate, type):
            kind = type(aggregate).__name__
            raise UsageError(
                f"A repository is asked for with a {kind}. Give the class of the aggregate, for instance Account."
            )
        if aggregate not in self._repositories:
            info = self.app.aggregates.get(aggregate)
            if info is None:
                parameter = "processes" if is_process(aggregate) else "aggregates"
                raise UsageError(
                    f"{shown_name(aggregate)} is not listed in the app {self.app.name!r}. "
                    f"List it in App({parameter}=[…])."
                )
            snapshots: Snapshots[Any] | None = None
            if info.snapshot_every is not None and self._snapshots is not None:
                snapshots = Snapshots(self._snapshots, SnapshotCodec[Any](aggregate), info.snapshot_every)
            initial = cast("Callable[[], Any]", aggregate)
            self._repositories[aggregate] = Repository(
                self.app.name, self.store, self.catalog, initial, snapshots, self.guard
            )
        return self._repositories[aggregate]

    def forget(self) -> None:
        """Drop every cached state, because the stream may have another history now."""
        for repository in self._repositories.values():
            repository.forget()


@asynccontextmanager
async def open_repositories(
    app: Application, settings: Settings, nats: NatsClient | None = None
) -> AsyncGenerator[tuple[Repositories, Client]]:
    """Connect, or use an open client; at the end wait for the saves in flight, and close what was opened.

    Raises `Unreachable` and `UsageError`.
    """
    client = await connect(settings, nats)
    aggregates = app.catalog.aggregates
    store = JetStreamStore(app.name, client, save_timeout_s=settings.save_timeout_s, aggregates=aggregates)
    snapshots = KeyValueSnapshots(snapshot_bucket(app.name), client)
    repositories = Repositories(app, store, snapshots)
    repositories.guard.check()  # from here on the connection belongs to this loop
    store.stream.on_changed.append(repositories.forget)
    async with AsyncExitStack() as stack:
        # The stack closes in reverse order, and each part even if the one before it was cancelled.
        stack.enter_context(tracing.connected())
        stack.push_async_callback(client.close)
        stack.push_async_callback(snapshots.close)
        stack.push_async_callback(store.settle)
        with suppress(StoreError, Unreachable):
            await store.stream.look()  # logs what has drifted
            if store.unknown:
                logs.AGGREGATES_UNKNOWN.log(_log, stream=app.name, names=", ".join(store.unknown))
        await store.check_server()
        yield repositories, client
