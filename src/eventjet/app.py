"""`App`: the explicit lists of all that an application declares, checked together; nothing is registered elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import MISSING, fields, replace
from itertools import combinations
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar, Unpack, overload

from sqlalchemy import Table

from eventjet.blocking import BlockingJet
from eventjet.codec.catalog import Catalog, Upcaster
from eventjet.codec.subjects import is_name
from eventjet.domain.aggregate import AggregateInfo, AggregateType, aggregate_info, event_info, field_faults, is_count
from eventjet.domain.claim import CLAIM_EVENTS
from eventjet.domain.decision import Served
from eventjet.domain.personal import decisions_are_private, is_private, takes_personal
from eventjet.domain.process import ProcessInfo, ProcessType, is_process
from eventjet.domain.reactor import Inbox, Publication, Reactor
from eventjet.domain.state import state_faults
from eventjet.domain.subscription import folded_events, is_plain, shown_name
from eventjet.domain.unique import CLAIMS, unique_faults
from eventjet.errors import DefinitionError, UsageError
from eventjet.jet import Jet, open_jet
from eventjet.log.snapshots import SnapshotCodec
from eventjet.nats.client import NatsClient
from eventjet.projections.app_ref import AppRef, Declared
from eventjet.projections.projection import Entries, Projection
from eventjet.projections.resolve import resolve
from eventjet.projections.sql_projection import AnyResolved, SqlProjection, resolve_sql
from eventjet.runtime import GuardedBlock, LoopGuard
from eventjet.serving.remote import RemoteApp, open_remote
from eventjet.settings import Settings, SettingsOverrides
from eventjet.sql.sqlite import make_readable
from eventjet.subscriptions.declarations import (
    checked_inboxes,
    checked_publications,
    checked_reactors,
    checked_served,
    deps_faults,
    resolved_processes,
    shared_names,
)

D = TypeVar("D")
T = TypeVar("T")

NAME_RULE = "[a-z][a-z0-9_]*"


class App:
    """Everything that an application declares. Raises `DefinitionError` with all faults at once.

    * `name`: also the name of the app's stream and the first token of its subjects
    * `deps`: a function that returns an async context manager of what reactors and inboxes need, which is the type in
      their `Reaction[…]`
    * `served`: decisions that `eventjet serve` and `Jet.service` answer over NATS
    * `retired_events`, `retired_aggregates`: names that are in the log and no longer declared; their events are passed
      over

    ```python
    bank = App("bank", aggregates=[Account], projections=[balances], upcasters=[withdrawn_has_a_reason])
    assert bank.name == "bank"
    ```
    """

    @overload
    def __init__(
        self,
        name: str,
        *,
        aggregates: Sequence[AggregateType[Any, Any]],
        processes: Sequence[ProcessType[Any, Any]] = (),
        reactors: Sequence[Reactor[Any, object] | Inbox[Any, object]] = (),
        publications: Sequence[Publication[Any]] = (),
        served: Sequence[Served] = (),
        projections: Sequence[Declared] = (),
        upcasters: Sequence[Upcaster] = (),
        retired_events: Sequence[str] = (),
        retired_aggregates: Sequence[str] = (),
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        *,
        aggregates: Sequence[AggregateType[Any, Any]],
        deps: Callable[[], AbstractAsyncContextManager[D]],
        processes: Sequence[ProcessType[Any, Any]] = (),
        reactors: Sequence[Reactor[Any, D] | Inbox[Any, D]] = (),
        publications: Sequence[Publication[Any]] = (),
        served: Sequence[Served] = (),
        projections: Sequence[Declared] = (),
        upcasters: Sequence[Upcaster] = (),
        retired_events: Sequence[str] = (),
        retired_aggregates: Sequence[str] = (),
    ) -> None: ...
    def __init__(
        self,
        name: str,
        *,
        aggregates: Sequence[AggregateType[Any, Any]] | None = None,
        deps: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        processes: Sequence[ProcessType[Any, Any]] = (),
        reactors: Sequence[Reactor[Any, Any] | Inbox[Any, Any]] = (),
        publications: Sequence[Publication[Any]] = (),
        served: Sequence[Served] = (),
        projections: Sequence[Declared] = (),
        upcasters: Sequence[Upcaster] = (),
        retired_events: Sequence[str] = (),
        retired_aggregates: Sequence[str] = (),
    ) -> None:
        faults: list[str] = [] if is_name(name) else [f"the app's name {name!r} is not {NAME_RULE}"]
        if aggregates is None:
            aggregates = ()
            faults.append("App(aggregates=[…]) is missing: list the aggregates whose events are in its log, if only []")
        not_lists = _list_faults(
            aggregates=aggregates,
            processes=processes,
            reactors=reactors,
            publications=publications,
            served=served,
            projections=projections,
            upcasters=upcasters,
            retired_events=retired_events,
            retired_aggregates=retired_aggregates,
        )
        if not_lists:
            raise DefinitionError([*faults, *not_lists])
        faults += [
            f"the retired aggregate {retired!r} is not {NAME_RULE}"
            for retired in retired_aggregates
            if not is_name(retired)
        ]
        if deps is not None and not callable(deps):
            faults.append(
                f"App(deps=…) is given a {type(deps).__name__}; give a function that returns an async context manager"
            )
        self.name = name
        """Name of the app, of its stream, and the first token of its subjects."""
        self.deps = deps
        """Function that returns an async context manager of what reactors and inboxes need; None for nothing."""
        faults += [
            f"{shown_name(aggregate)} is a process: list it in App(processes=[…]), and not among the aggregates"
            for aggregate in aggregates
            if is_process(aggregate)
        ]
        self.aggregates: Mapping[Any, AggregateInfo] = _aggregates([*aggregates, *processes], faults)
        self.catalog = _catalog(self.aggregates, upcasters, (retired_events, retired_aggregates), faults)
        if not faults:
            _check_snapshots(self.aggregates, faults)
        self.projections: Mapping[str, AnyResolved] = _projections(name, projections, self.catalog, faults)
        if not faults:
            faults += _quarantine_faults(self.aggregates, self.projections)
        self.processes: Mapping[Any, ProcessInfo] = resolved_processes(processes, self.catalog, faults)
        inboxes = [reactor for reactor in reactors if isinstance(reactor, Inbox)]
        log_reactors = [reactor for reactor in reactors if not isinstance(reactor, Inbox)]
        self.reactors: Mapping[str, Reactor[Any, Any]] = checked_reactors(log_reactors, self.catalog, faults)
        self.inboxes: Mapping[str, Inbox[Any, Any]] = checked_inboxes(name, inboxes, faults)
        if not faults:
            faults += deps_faults(deps, [*self.reactors.values(), *self.inboxes.values()])
        self.publications: Mapping[str, Publication[Any]] = checked_publications(
            name, publications, self.catalog, faults
        )
        self.served: Sequence[Served] = checked_served(served, self.aggregates, faults)
        subscription_names = {
            "process": [info.name for info in self.processes.values()],
            "reactor": list(self.reactors),
            "publication": list(self.publications),
            "inbox": list(self.inboxes),
        }
        faults += shared_names({"projection": list(self.projections), **subscription_names})
        if faults:
            raise DefinitionError(faults)
        types = [*self.aggregates, *(inbox.type for inbox in self.inboxes.values())]
        self.catalog.is_private |= any(map(is_private, types)) or any(map(decisions_are_private, self.aggregates))
        self.catalog.is_private |= any(takes_personal(command.decide) for command in self.served)

    def connect(
        self,
        settings: Settings | None = None,
        /,
        *,
        client: NatsClient | None = None,
        **overrides: Unpack[SettingsOverrides],
    ) -> AbstractAsyncContextManager[Jet]:
        """Return a context manager that connects to the log and the read models, and closes the connection at the end.

        The keywords replace values of `settings`, or of `EVENTJET_*` if no settings are given. With `client`, an open
        `nats.aio.client.Client`, everything goes over that client, which is not closed at the end. Raises
        `Unreachable` and `UsageError`.

        ```python
        async def greet(nc: nats.aio.client.Client) -> None:
            async with bank.connect(client=nc) as jet:
                await jet.repository(Account).execute("a-1", Account.open, "ada")
            await nc.publish("greetings", b"still open")
        ```
        """
        opened = open_jet(self, _settings(settings, overrides, client), client)
        call = f"{self.name}.connect"
        return GuardedBlock(opened, LoopGuard(), f"{call}() as jet", f"{call}_blocking() as jet")

    def connect_blocking(
        self, settings: Settings | None = None, /, **overrides: Unpack[SettingsOverrides]
    ) -> BlockingJet:
        """Return a `BlockingJet`: a `Jet` for code without `await`, such as threads, Django, Flask, Celery and scripts.

        The arguments are those of `connect`. At its first use, or at the start of its `with` block, it reads
        `EVENTJET_*` and connects; `close`, or the end of the block, closes it. One serves all threads of a process.

        ```python
        def greet(name: str) -> None:
            with bank.connect_blocking() as jet:
                jet.repository(Account).execute("a-1", Account.open, name)
        ```
        """
        return BlockingJet(lambda: self.connect(settings, **overrides))

    def in_memory(self) -> AbstractAsyncContextManager[Jet]:
        """Return a context manager like `connect`, over a new log in memory, for an application's own tests.

        The log is gone after the block. Repositories, transactions, imports and `tail` work as on a server, conflicts
        included. Read models are in a SQLite file at `jet.settings.database`; `caught_up` folds the log into them at
        once, and raises `HandlerFailed` where a worker would stop. Processes and reactors do not run here: use
        `eventjet.testing.world` for them.

        ```python
        async with bank.in_memory() as jet:
            done = await jet.repository(Account).execute("a-1", Account.open, "ada")
            await jet.caught_up("balances", position=done.position)
        ```
        """
        open_in_memory: Any = resolve_name("eventjet.testing.memory:open_in_memory")
        call = f"{self.name}.in_memory"
        return GuardedBlock(open_in_memory(self), LoopGuard(), f"{call}() as jet", f"{call}_blocking() as jet")

    def in_memory_blocking(self) -> BlockingJet:
        """Return a `BlockingJet` like `connect_blocking`, over a new log in memory as that of `in_memory`.

        ```python
        with bank.in_memory_blocking() as jet:
            done = jet.repository(Account).execute("a-1", Account.open, "ada")
            jet.caught_up("balances", position=done.position)
        ```
        """
        return BlockingJet(self.in_memory)

    def client(
        self,
        settings: Settings | None = None,
        /,
        *,
        client: NatsClient | None = None,
        **overrides: Unpack[SettingsOverrides],
    ) -> AbstractAsyncContextManager[RemoteApp]:
        """Return a context manager with a caller of the decisions that this app serves; it needs no stream or database.

        The arguments are those of `connect`. Raises `Unreachable` and `UsageError`.
        """
        opened = open_remote(self.name, self.served, _settings(settings, overrides, client), client)
        return GuardedBlock(opened, LoopGuard(), f"{self.name}.client() as remote")


_CLIENT_SETTINGS = frozenset(
    {"servers", "user", "password", "token", "credentials", "nkey", "user_jwt_cb", "signature_cb"}
    | {"tls", "tls_ca", "tls_cert", "tls_key", "name", "inbox_prefix"}
)
"""Settings that an open client has already."""


def _settings(settings: Settings | None, overrides: SettingsOverrides, client: NatsClient | None) -> Settings:
    """Return the settings of a connection; raises `UsageError` for a keyword that an open client has already."""
    if client is not None and (duplicates := sorted(name for name in overrides if name in _CLIENT_SETTINGS)):
        raise UsageError(f"client= has its own {duplicates[0]}. Leave {duplicates[0]}= out, or client=.")
    return Settings.load(overrides) if settings is None else settings.with_overrides(overrides)


def load_app(reference: str, folder: Path | None = None) -> App:
    """Import the app at `module:name`; raises `UsageError`.

    `folder`, by default the current folder, is put on the import path.

    ```python
    app = load_app("eventjet.examples.bank.app:bank")
    assert app.name == "bank"
    ```
    """
    app = AppRef.parse(reference, folder).load()
    if not isinstance(app, App):
        raise UsageError(f"{reference!r} is not an App. Name one made by `eventjet.App(…)`.")
    return app


def _list_faults(**lists: object) -> list[str]:
    """Return a fault for each parameter that is no list. An iterator is none either: it can be read only once."""
    faults: list[str] = []
    for parameter, value in lists.items():
        if not isinstance(value, Collection) or isinstance(value, str):
            kind = "class" if isinstance(value, type) else type(value).__name__
            name = getattr(value, "__name__", "")
            shown = name if name.isidentifier() else "…"
            faults.append(f"`{parameter}` is given as {kind} and not as a list; give a list: {parameter}=[{shown}]")
    return faults


def _aggregates(classes: Sequence[Any], faults: list[str]) -> dict[Any, AggregateInfo]:
    infos: dict[Any, AggregateInfo] = {}
    names: dict[str, Any] = {}
    for cls in classes:
        try:
            info = aggregate_info(cls)
        except DefinitionError as error:
            faults.extend(error.faults)
            continue
        if not is_name(info.name):
            faults.append(f"the aggregate's name {info.name!r} is not {NAME_RULE}")
        if info.name == CLAIMS:
            faults.append(f"the aggregate's name {CLAIMS!r} is eventjet's own; give it another")
        if names.setdefault(info.name, cls) is not cls:
            faults.append(f"two aggregates are called {info.name!r}; give one another name")
        if not is_count(info.revision):
            faults.append(f"the revision of {info.name!r} is {info.revision!r}; give a whole number, 1 or more")
        faults += [
            f"{cls.__qualname__}.{field.name} has no default, so there is no initial state; give it one"
            for field in fields(cls)
            if field.default is MISSING and field.default_factory is MISSING
        ]
        if not callable(getattr(cls, "evolve", None)):
            faults.append(f"{cls.__qualname__} has no `evolve(self, event)`")
        elif not is_plain(cls.evolve):
            faults.append(f"{shown_name(cls.evolve)} is async or a generator; write a plain `def`")
        faults += [*field_faults(cls), *state_faults(cls)]
        faults += unique_faults(info.name, info.unique, is_name)
        if info.unique and is_process(cls):
            faults.append(f"the process {info.name!r} has unique values; give them to an aggregate that it asks")
        infos[cls] = info
    return infos


def _catalog(
    aggregates: Mapping[Any, AggregateInfo],
    upcasters: Sequence[Upcaster],
    retired: tuple[Sequence[str], Sequence[str]],
    faults: list[str],
) -> Catalog:
    """Build the catalog of the app's events and add its faults; `retired` are names of events, and of aggregates."""
    owners: dict[type, Any] = {}
    for cls in aggregates:
        if not callable(getattr(cls, "evolve", None)):
            continue
        try:
            for event in folded_events(cls):
                event_info(event)
                if owners.setdefault(event, cls) is not cls:
                    faults.append(
                        f"{event.__qualname__} is folded by {owners[event].__qualname__} and by {cls.__qualname__}; "
                        "an event belongs to one aggregate"
                    )
        except DefinitionError as error:
            faults.extend(error.faults)
    # A log may have claims of a constraint that the app no longer declares.
    owned = {event: aggregates[cls].name for event, cls in owners.items()} | dict.fromkeys(CLAIM_EVENTS, CLAIMS)
    faults += [
        f'{shown_name(step)} is not an upcaster: decorate it with `@upcaster("name", schema=…)`'
        for step in upcasters
        if not isinstance(step, Upcaster)  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
    ]
    catalog = Catalog(owned, [step for step in upcasters if isinstance(step, Upcaster)], *retired)  # pyright: ignore[reportUnnecessaryIsInstance]
    faults.extend(catalog.faults())
    faults += [
        f"the aggregate {name!r} is both declared and retired; take it out of one list"
        for name in dict.fromkeys(retired[1])
        if name in owned.values()
    ]
    return catalog


def _check_snapshots(aggregates: Mapping[Any, AggregateInfo], faults: list[str]) -> None:
    for cls, info in aggregates.items():
        if info.snapshot_every is None:
            continue
        if not is_count(info.snapshot_every):
            faults.append(
                f"snapshot_every of {info.name!r} is {info.snapshot_every!r}; give a whole number, 1 or more, or leave "
                "it out"
            )
        try:
            faults.extend(SnapshotCodec[Any](cls).faults())
        except DefinitionError as error:
            faults.extend(error.faults)


def _projections(
    app: str, declarations: Sequence[Declared], catalog: Catalog, faults: list[str]
) -> dict[str, AnyResolved]:
    resolved: dict[str, AnyResolved] = {}
    names: set[str] = set()
    for projection in declarations:
        if not isinstance(projection, (Projection, Entries, SqlProjection)):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f'{shown_name(projection)} is not a projection: decorate it with `@projection("name", …)`')
            continue
        name = projection.name
        if name in names:
            faults.append(f"two projections are called {name!r}; give one another name")
        names.add(name)
        try:
            is_sql = isinstance(projection, SqlProjection)
            resolved_projection = resolve_sql(projection, catalog) if is_sql else resolve(projection, catalog)
            resolved[name] = replace(resolved_projection, app=app)
            for table in resolved[name].tables:
                make_readable(table)
        except DefinitionError as error:
            faults.extend(error.faults)
    faults.extend(_shared_tables(resolved))
    return resolved


def _quarantine_faults(
    aggregates: Mapping[Any, AggregateInfo], projections: Mapping[str, AnyResolved]
) -> Iterator[str]:
    """Yield faults of projections that quarantine events although a row may be of several aggregates."""
    for name, resolved in projections.items():
        aggregate_names = sorted(
            {info.name for cls, info in aggregates.items() if set(folded_events(cls)) & set(resolved.events)}
        )
        if resolved.quarantines and len(aggregate_names) > 1:
            yield (
                f'projection {name!r}: on_error="quarantine" takes events of one aggregate, and it takes those of '
                f"{', '.join(aggregate_names)}: order behind a quarantined event can only be kept by aggregate"
            )


def _shared_tables(projections: Mapping[str, AnyResolved]) -> Iterator[str]:
    """Yield faults for tables that two projections share; names are compared in lower case, as SQLite does."""
    for first, second in combinations(projections.values(), 2):
        second_names = {_table_name(table) for table in second.tables}
        for table in first.tables:
            if _table_name(table) in second_names:
                projection_names = f"the projections {first.name!r} and {second.name!r}"
                yield f"the table {table.fullname!r} belongs to {projection_names}; give each its own"


def _table_name(table: Table) -> tuple[str, str]:
    return (table.schema or "").lower(), table.name.lower()
