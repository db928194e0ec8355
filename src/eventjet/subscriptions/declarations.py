"""The processes, reactors, inboxes and publications of an app: checks of their definitions, and their `Declaration`s.

Each cursor that they need has one `Declaration`. Served commands are checked here too.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.codec.commands import arguments_of
from eventjet.codec.subjects import cursor_name, declared_name, is_name, probes
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.decision import Served
from eventjet.domain.parked import AggregateKey
from eventjet.domain.process import (
    LISTENS,
    Deadline,
    Listener,
    ProcessInfo,
    Step,
    is_process,
    listeners_of,
    same_id,
)
from eventjet.domain.reactor import Inbox, Publication, Reactor, Start, partition_of
from eventjet.domain.subscription import events_of, folded_events, resolved_hint, shown_name, union_members
from eventjet.domain.unique import CLAIMS
from eventjet.errors import DefinitionError, DepsUnusable, LogUnusable
from eventjet.projections.app_ref import Application
from eventjet.runtime import exceptions_only
from eventjet.subscriptions.cursor import PROCESS

REACTOR, PUBLICATION, INBOX = "reactor", "publication", "inbox"


@dataclass(frozen=True, slots=True)
class Declaration:
    """A subscription with one cursor, as far as it is known without a connection."""

    name: str
    """Name of the cursor: the declared name, or `receipts-1-of-4` for one of several partitions."""
    kind: str
    revision: int
    start: Start
    events: tuple[type, ...]
    """Event types that it handles; empty for an inbox, which takes no events of this log."""
    stream: str = ""
    """The stream that an inbox follows; empty for the log."""
    subject: str = ""
    """The subject that an inbox takes from its stream."""
    partitions: int = 1
    partition: int = 0

    @property
    def declared_as(self) -> str:
        """The name in the app's definition, without a partition."""
        return declared_name(self.name)

    def has(self, key: AggregateKey) -> bool:
        """Return whether an aggregate belongs to this partition."""
        return self.partitions == 1 or partition_of(key, self.partitions) == self.partition


def declarations_of(app: Application) -> dict[str, Declaration]:
    """Return all declarations of an app, by name of the cursor."""
    found = [
        *(part for one in app.reactors.values() for part in _partitions(one)),
        *(Declaration(one.name, PROCESS, one.revision, "new", heard_by(one)) for one in app.processes.values()),
        *(Declaration(one.name, PUBLICATION, 1, one.start, one.events) for one in app.publications.values()),
        *(
            Declaration(one.name, INBOX, one.revision, one.start, (), one.stream, one.subject)
            for one in app.inboxes.values()
        ),
    ]
    return {one.name: one for one in found}


def has_timers(app: Application) -> bool:
    """Return whether a process of the app has deadlines."""
    return any(info.has_deadlines for info in app.processes.values())


def probes_of(app: Application) -> list[tuple[str, str]]:
    """Return a (stream, subject) pair for each kind of message that the app stores.

    They are used to check which other streams or responders answer on these subjects.
    """
    types = [info.name for info in (*app.aggregates.values(), *app.processes.values())]
    published = [(one.stream, one.name) for one in app.publications.values()]
    needs = {"cursors": bool(declarations_of(app)), "timers": has_timers(app)}
    return probes(app.name, dict.fromkeys([*types, CLAIMS]), published, **needs)


def _partitions(one: Reactor[Any, Any]) -> list[Declaration]:
    return [
        Declaration(
            cursor_name(one.name, number, one.partitions),
            REACTOR,
            one.revision,
            one.start,
            one.events,
            partitions=one.partitions,
            partition=number,
        )
        for number in range(one.partitions)
    ]


@asynccontextmanager
async def opened_deps(app: Application) -> AsyncGenerator[Any]:
    """Open `App(deps=…)` for the block and yield its value; None when the app has no deps.

    Raises `DepsUnusable` when `deps` returns something other than an async context manager.
    """
    made: Any = nullcontext() if app.deps is None else app.deps()
    if not isinstance(made, AbstractAsyncContextManager):
        raise DepsUnusable(app.name, type(made).__name__)
    with exceptions_only(f"The deps of the app {app.name!r}"):
        async with cast("AbstractAsyncContextManager[Any]", made) as opened:
            yield opened


def missing_stream(inbox: str, stream: str) -> LogUnusable:
    """Return the error for an inbox whose stream does not exist."""
    return LogUnusable(
        f"The stream {stream!r} of the inbox {inbox!r}", "it does not exist", "Create it first, or name another."
    )


def heard_by(info: ProcessInfo) -> tuple[type, ...]:
    """Return a process's own events and those it listens to."""
    return tuple(dict.fromkeys([*info.events, *(event for one in info.listeners for event in one.events)]))


def filters_of(app: Application, events: Sequence[type]) -> list[str]:
    """Return the subjects of all aggregates that fold at least one of the events."""
    wanted = set(events)
    return [f"{app.name}.{info.name}.*" for cls, info in app.aggregates.items() if wanted & set(folded_events(cls))]


_LISTENER_PARAMETERS = 2
_ARGUMENTS = 2


def resolved_processes(declared: Sequence[Any], catalog: Catalog, faults: list[str]) -> dict[Any, ProcessInfo]:
    """Return the processes by class; mistakes in their definitions are appended to `faults`."""
    found: dict[Any, ProcessInfo] = {}
    for cls in declared:
        if not is_process(cls):
            faults.append(f"{shown_name(cls)} is not a process: decorate it with @process(…)")
            continue
        try:
            info = aggregate_info(cls)
            own = folded_events(cls)
        except (DefinitionError, AttributeError, TypeError):
            continue  # reported as a fault of an aggregate
        faults += [f"process {info.name!r}: {fault}" for fault in _function_faults(cls, own)]
        listeners = tuple(_listeners(cls, info.name, own, catalog, faults))
        has_deadlines = callable(getattr(cls, "deadline", None))
        found[cls] = ProcessInfo(info.name, info.revision, own, listeners, has_deadlines)
    return found


def checked_reactors(
    declared: Sequence[Reactor[Any, Any]], catalog: Catalog, faults: list[str]
) -> dict[str, Reactor[Any, Any]]:
    """Return the reactors by name; mistakes in their definitions are appended to `faults`."""
    found: dict[str, Reactor[Any, Any]] = {}
    for one in declared:
        if not isinstance(one, Reactor):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f'{shown_name(one)} is not a reactor: decorate it with `@reactor("name")`')
            continue
        if not is_name(one.name):
            faults.append(f"the reactor's name {one.name!r} is not [a-z][a-z0-9_]*")
        if one.name in found:
            faults.append(f"two reactors are called {one.name!r}")
        faults += [f"reactor {one.name!r}: {fault}" for fault in one.faults(catalog.__contains__)]
        found[one.name] = one
    return found


def checked_inboxes(declared: Sequence[Inbox[Any, Any]], faults: list[str]) -> dict[str, Inbox[Any, Any]]:
    """Return the inboxes by name; mistakes in their definitions are appended to `faults`."""
    found: dict[str, Inbox[Any, Any]] = {}
    for one in declared:
        if not is_name(one.name):
            faults.append(f"the inbox's name {one.name!r} is not [a-z][a-z0-9_]*")
        if one.name in found:
            faults.append(f"two inboxes are called {one.name!r}")
        wrong = one.faults()
        if not wrong:
            try:
                IncomingDecoder(one.type, "")
            except DefinitionError as error:
                wrong = list(error.faults)
        faults += [f"inbox {one.name!r}: {fault}" for fault in wrong]
        found[one.name] = one
    return found


def checked_publications(
    declared: Sequence[Publication[Any]], catalog: Catalog, faults: list[str]
) -> dict[str, Publication[Any]]:
    """Return the publications by name; mistakes in their definitions are appended to `faults`."""
    found: dict[str, Publication[Any]] = {}
    for one in declared:
        if not isinstance(one, Publication):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f"{shown_name(one)} is not a publication: decorate it with `@publication(…)`")
            continue
        if not is_name(one.name):
            faults.append(f"the publication's name {one.name!r} is not [a-z][a-z0-9_]*")
        if one.name in found:
            faults.append(f"two publications are called {one.name!r}")
        wrong = one.faults(catalog.__contains__)
        wrong = wrong or Catalog(one.public).faults()
        faults += [f"publication {one.name!r}: {fault}" for fault in wrong]
        found[one.name] = one
    return found


def checked_served(declared: Sequence[Served], aggregates: Mapping[Any, Any], faults: list[str]) -> tuple[Served, ...]:
    """Return the served commands; mistakes in their definitions are appended to `faults`."""
    known: set[tuple[Any, str]] = set()
    for one in declared:
        if not isinstance(one, Served):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f"{shown_name(one)} is not `served(…)`")
            continue
        where = f"served {shown_name(one.decide)}"
        if one.aggregate not in aggregates:
            faults.append(f"{where}: {shown_name(one.aggregate)} is not an aggregate of the app")
        elif not is_name(one.name):
            faults.append(f"{where}: its name {one.name!r} is not [a-z][a-z0-9_]*")
        elif (one.aggregate, one.name) in known:
            faults.append(f"{where}: {aggregates[one.aggregate].name} serves two commands called {one.name!r}")
        known.add((one.aggregate, one.name))
        try:
            arguments_of(one.decide)
        except DefinitionError as error:
            faults += error.faults
    return tuple(declared)


def shared_names(names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a fault for each name that two kinds share, since the CLI's commands take a name of any kind."""
    owners: dict[str, str] = {}
    for kind, each in names.items():
        for name in each:
            if owners.setdefault(name, kind) != kind:
                yield f"a {owners[name]} and a {kind} are both called {name!r}; commands would not know which is meant"


def _function_faults(cls: Any, own: tuple[type, ...]) -> Iterator[str]:
    """Yield the mistakes in `step` and `deadline`, which must be plain functions annotated with what they return."""
    for name, kind in (("step", Step), ("deadline", Deadline)):
        function = getattr(cls, name, None)
        if function is None and name == "deadline":
            continue
        if not inspect.isfunction(function) or len(inspect.signature(function).parameters) != 1:
            yield f"`{name}` takes something else than `self`"
            continue
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            yield f"`{name}` is async or a generator; it only says what follows, so let it return that"
            continue
        try:
            hint = resolved_hint(function, "return")
        except DefinitionError as error:
            yield from error.faults
            continue
        for member in union_members(hint):
            yield from _return_faults(cls, name, member, kind, own)


def _return_faults(cls: Any, name: str, hint: Any, kind: type, own: tuple[type, ...]) -> Iterator[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Deadline and origin in (list, tuple, Sequence):
        hint = arguments[0]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is not kind or len(arguments) != _ARGUMENTS:
        yield f"`{name}` is annotated to return {shown_name(hint)}; write {kind.__name__}[{cls.__name__}, …] or None"
        return
    state, events = arguments
    if shown_name(state) != cls.__qualname__:
        yield f"`{name}` returns what is of {shown_name(state)}; write {kind.__name__}[{cls.__name__}, …]"
    strange = [shown_name(one) for one in union_members(events) if one not in own]
    if strange:
        yield f"`{name}` may record {', '.join(strange)}, which its `evolve` does not take"


def _listeners(cls: Any, name: str, own: tuple[type, ...], catalog: Catalog, faults: list[str]) -> Iterator[Listener]:
    heard: dict[type, str] = {}
    for method, handler in listeners_of(cls):
        where = f"process {name!r}: {cls.__name__}.{method}"
        parameters = list(inspect.signature(handler).parameters)
        if len(parameters) != _LISTENER_PARAMETERS or inspect.iscoroutinefunction(handler):
            faults.append(f"{where} is not a plain method that takes (self, event)")
            continue
        by = getattr(handler, LISTENS)
        try:
            events = events_of(handler, parameters[1])
            named = events if by is same_id else events_of(by, next(iter(inspect.signature(by).parameters), "event"))
        except DefinitionError as error:
            faults += error.faults
            continue
        if set(named) != set(events):
            faults.append(f"{where} and {shown_name(by)}, which names its process, take different events")
        for event in events:
            hears = f"{where} hears {shown_name(event)}"
            if event not in catalog:
                faults.append(f"{hears}, which no aggregate of the app folds")
            elif event in own:
                faults.append(f"{hears}, which is its own; let `step` follow from it")
            if (other := heard.setdefault(event, method)) != method:
                faults.append(f"{hears}, and so does {other}; one listener hears an event")
        yield Listener(handler, by, events)
