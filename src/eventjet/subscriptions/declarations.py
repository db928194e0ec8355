"""The processes, reactors, inboxes and publications of an app: checks of their definitions, and their `Declaration`s.

Each cursor that they need has one `Declaration`. Served commands are checked here too.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Container, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.codec.commands import arguments_of, checked_names
from eventjet.codec.subjects import cursor_name, declared_name, is_name, probes
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.decision import Served
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
from eventjet.domain.quarantined import AggregateKey
from eventjet.domain.reactor import Inbox, Publication, Reaction, Reactor, Start, partition_of
from eventjet.domain.subscription import (
    events_of,
    folded_events,
    is_called_with,
    is_plain,
    resolved_hint,
    shown_name,
    union_members,
)
from eventjet.domain.unique import CLAIMS
from eventjet.errors import DefinitionError, DepsUnusable, LogUnusable, UsageError
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
    declarations = [
        *(part for reactor in app.reactors.values() for part in _partitions(reactor)),
        *(Declaration(info.name, PROCESS, info.revision, "new", heard_by(info)) for info in app.processes.values()),
        *(
            Declaration(publication.name, PUBLICATION, 1, publication.start, publication.events)
            for publication in app.publications.values()
        ),
        *(
            Declaration(inbox.name, INBOX, inbox.revision, inbox.start, (), inbox.stream, inbox.subject)
            for inbox in app.inboxes.values()
        ),
    ]
    return {declaration.name: declaration for declaration in declarations}


def has_timers(app: Application) -> bool:
    """Return whether a process of the app has deadlines."""
    return any(info.has_deadlines for info in app.processes.values())


def probes_of(app: Application) -> list[tuple[str, str]]:
    """Return a (stream, subject) for each kind of message of the app, to ask who else answers there."""
    aggregates = [info.name for info in (*app.aggregates.values(), *app.processes.values())]
    published = [(publication.stream, publication.name) for publication in app.publications.values()]
    needs = {"cursors": bool(declarations_of(app)), "timers": has_timers(app)}
    return probes(app.name, dict.fromkeys([*aggregates, CLAIMS]), published, **needs)


def _partitions(reactor: Reactor[Any, Any]) -> list[Declaration]:
    return [
        Declaration(
            cursor_name(reactor.name, number, reactor.partitions),
            REACTOR,
            reactor.revision,
            reactor.start,
            reactor.events,
            partitions=reactor.partitions,
            partition=number,
        )
        for number in range(reactor.partitions)
    ]


@asynccontextmanager
async def opened_deps(app: Application) -> AsyncGenerator[Any]:
    """Open `App(deps=…)` for the block and yield its value, None without deps; raises `DepsUnusable`."""
    deps: Any = nullcontext() if app.deps is None else app.deps()
    if not isinstance(deps, AbstractAsyncContextManager):
        raise DepsUnusable(app.name, type(deps).__name__)
    with exceptions_only(f"The deps of the app {app.name!r}"):
        async with cast("AbstractAsyncContextManager[Any]", deps) as value:
            yield value


def missing_stream(inbox: str, stream: str) -> LogUnusable:
    """Return the error for an inbox whose stream does not exist."""
    return LogUnusable(
        f"The stream {stream!r} of the inbox {inbox!r}", "it does not exist", "Create it first, or name another."
    )


def heard_by(info: ProcessInfo) -> tuple[type, ...]:
    """Return a process's own events and those it listens to."""
    return tuple(dict.fromkeys([*info.events, *(event for listener in info.listeners for event in listener.events)]))


def filters_of(app: Application, events: Sequence[type]) -> list[str]:
    """Return the subjects of all aggregates that fold at least one of the events."""
    return [f"{app.name}.{info.name}.*" for cls, info in app.aggregates.items() if {*events} & {*folded_events(cls)}]


_TYPE_ARGUMENTS = 2


def resolved_processes(declared: Sequence[Any], catalog: Catalog, faults: list[str]) -> dict[Any, ProcessInfo]:
    """Return the processes by class; mistakes in their definitions are appended to `faults`."""
    processes: dict[Any, ProcessInfo] = {}
    for cls in declared:
        if not is_process(cls):
            faults.append(f"{shown_name(cls)} is not a process: decorate it with @process(…)")
            continue
        try:
            info = aggregate_info(cls)
            own_events = folded_events(cls)
        except (DefinitionError, AttributeError, TypeError):
            continue  # reported as a fault of an aggregate
        faults += [f"process {info.name!r}: {fault}" for fault in _function_faults(cls, own_events)]
        listeners = tuple(_listeners(cls, info.name, own_events, catalog, faults))
        has_deadlines = callable(getattr(cls, "deadline", None))
        processes[cls] = ProcessInfo(info.name, info.revision, own_events, listeners, has_deadlines)
    return processes


def checked_reactors(
    declared: Sequence[Reactor[Any, Any]], catalog: Catalog, faults: list[str]
) -> dict[str, Reactor[Any, Any]]:
    """Return the reactors by name; mistakes in their definitions are appended to `faults`."""
    reactors: dict[str, Reactor[Any, Any]] = {}
    for reactor in declared:
        if not isinstance(reactor, Reactor):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f'{shown_name(reactor)} is not a reactor: decorate it with `@reactor("name")`')
            continue
        faults += _name_faults("reactor", reactor.name, reactors)
        faults += [f"reactor {reactor.name!r}: {fault}" for fault in reactor.faults(catalog.__contains__)]
        reactors[reactor.name] = reactor
    return reactors


def checked_inboxes(app: str, declared: Sequence[Inbox[Any, Any]], faults: list[str]) -> dict[str, Inbox[Any, Any]]:
    """Return the inboxes by name; mistakes in their definitions are appended to `faults`."""
    inboxes: dict[str, Inbox[Any, Any]] = {}
    for inbox in declared:
        faults += _name_faults("inbox", inbox.name, inboxes)
        inbox_faults = inbox.faults(app)
        if not inbox_faults:
            try:
                IncomingDecoder(inbox.type, "")
            except DefinitionError as error:
                inbox_faults = list(error.faults)
        faults += [f"inbox {inbox.name!r}: {fault}" for fault in inbox_faults]
        inboxes[inbox.name] = inbox
    return inboxes


def _name_faults(kind: str, name: str, others: Container[str]) -> Iterator[str]:
    """Yield what is wrong with the name of a declaration; `others` are the names of those of its kind before it."""
    if not is_name(name):
        yield f"the {kind}'s name {name!r} is not [a-z][a-z0-9_]*"
    if name in others:
        yield f"two {kind}{'es' if kind == INBOX else 's'} are called {name!r}; give one another name"


def deps_faults(deps: Any, handlers: Sequence[Reactor[Any, Any] | Inbox[Any, Any]]) -> Iterator[str]:
    """Yield a fault for each handler that wants other deps than `App(deps=…)` opens, as far as annotations tell."""
    opened = type(None) if deps is None else _opened_type(deps)
    for handler in handlers:
        try:
            hint = resolved_hint(handler.handle, list(inspect.signature(handler.handle).parameters)[1])
        except DefinitionError:
            continue  # without an annotation it takes anything
        (expected,) = typing.get_args(hint) if typing.get_origin(hint) is Reaction else (Any,)
        if _is_instance(opened, expected):
            continue
        where = f"{shown_name(handler.handle)} wants deps of the type {shown_name(expected)}"
        if deps is None:
            yield f"{where}, and the app has none; give App(deps=…), a function that opens them"
        else:
            yield f"{where}, and {shown_name(deps)}, which App(deps=…) names, opens {shown_name(opened)}"


def _opened_type(deps: Any) -> Any:
    """Return the type of what a function of an async context manager opens; Any where its annotations do not say."""
    function: Any = getattr(deps, "__aenter__", deps)  # of a class that is its own context manager
    try:
        hint = resolved_hint(inspect.unwrap(function), "return")
    except (DefinitionError, TypeError, ValueError):
        return Any
    if function is not deps:
        # An inherited `__aenter__` says its own class, and returns the object.
        is_own = isinstance(deps, type) and isinstance(hint, type) and issubclass(deps, hint)
        return deps if is_own else hint
    arguments = typing.get_args(hint)
    return arguments[0] if typing.get_origin(hint) in _OPENING and arguments else Any


_OPENING = (AbstractAsyncContextManager, AsyncGenerator, AsyncIterator, AsyncIterable)
"""Annotations of a function that opens deps, `@asynccontextmanager` or not; their first argument is what it opens."""


def _is_instance(actual: Any, expected: Any) -> bool:
    """Return whether an object of the type `actual` may be one of the type `expected`; true where that is not known."""
    if actual is Any or expected in (Any, None, type(None)):
        return True  # a handler that wants None uses no deps
    if typing.get_origin(actual) in (typing.Union, types.UnionType):
        return all(_is_instance(member, expected) for member in typing.get_args(actual))
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return any(_is_instance(actual, member) for member in typing.get_args(expected))
    actual, expected = (
        typing.get_origin(hint) or (type(None) if hint is None else hint) for hint in (actual, expected)
    )
    if not (isinstance(actual, type) and isinstance(expected, type)):
        return True  # a type variable, a Literal
    if getattr(expected, "_is_protocol", False):
        return actual is not type(None)  # structure is compared by type checkers
    try:
        return issubclass(actual, expected) or (actual, expected) == (int, float)
    except TypeError:
        return True


def checked_publications(
    app: str, declared: Sequence[Publication[Any]], catalog: Catalog, faults: list[str]
) -> dict[str, Publication[Any]]:
    """Return the publications by name; mistakes in their definitions are appended to `faults`."""
    publications: dict[str, Publication[Any]] = {}
    for publication in declared:
        if not isinstance(publication, Publication):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f"{shown_name(publication)} is not a publication: decorate it with `@publication(…)`")
            continue
        faults += _name_faults("publication", publication.name, publications)
        publication_faults = publication.faults(app, catalog.__contains__)
        publication_faults = publication_faults or Catalog(publication.public).faults()
        faults += [f"publication {publication.name!r}: {fault}" for fault in publication_faults]
        publications[publication.name] = publication
    return publications


def checked_served(declared: Sequence[Served], aggregates: Mapping[Any, Any], faults: list[str]) -> tuple[Served, ...]:
    """Return the served commands; mistakes in their definitions are appended to `faults`."""
    served_names: set[tuple[Any, str]] = set()
    for command in declared:
        if not isinstance(command, Served):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
            faults.append(f"{shown_name(command)} is not `served(…)`")
            continue
        where = f"served {shown_name(command.decide)}"
        if command.aggregate not in aggregates:
            faults.append(
                f"{where}: {shown_name(command.aggregate)} is not an aggregate of the app; list it in `aggregates`"
            )
        elif not is_name(command.name):
            faults.append(f"{where}: its name {command.name!r} is not [a-z][a-z0-9_]*")
        elif (command.aggregate, command.name) in served_names:
            faults.append(
                f"{where}: {aggregates[command.aggregate].name} serves two commands called {command.name!r}; give one "
                "another `name`"
            )
        served_names.add((command.aggregate, command.name))
        faults += [
            f"{where}: its error {error!r} is not a class of exceptions"
            for error in command.errors
            if not (isinstance(error, type) and issubclass(error, Exception))  # pyright: ignore[reportUnnecessaryIsInstance]
        ]
        try:
            arguments_of(command.decide)
            checked_names(command.decide, command.ignoring)
        except DefinitionError as error:
            faults += error.faults
        except UsageError as error:
            faults.append(str(error))
    return tuple(declared)


def shared_names(names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a fault for each name that two kinds share, since the CLI's commands take a name of any kind."""
    owners: dict[str, str] = {}
    for kind, kind_names in names.items():
        for name in kind_names:
            if owners.setdefault(name, kind) != kind:
                yield f"a {owners[name]} and a {kind} are both called {name!r}; commands would not know which is meant"


def _function_faults(cls: Any, own_events: tuple[type, ...]) -> Iterator[str]:
    """Yield the mistakes in `step` and `deadline`, which must be plain functions annotated with what they return."""
    for name, kind in (("step", Step), ("deadline", Deadline)):
        function = getattr(cls, name, None)
        if function is None and name == "deadline":
            continue
        if not inspect.isfunction(function) or not is_called_with(function, 1):
            yield f"`{name}` takes something else than `self`; write `def {name}(self)`"
            continue
        if not is_plain(function):
            yield f"`{name}` is async or a generator; it only says what follows, so let it return that"
            continue
        try:
            hint = resolved_hint(function, "return")
        except DefinitionError as error:
            yield from error.faults
            continue
        for member in union_members(hint):
            yield from _return_faults(cls, name, member, kind, own_events)


def _return_faults(cls: Any, name: str, hint: Any, kind: type, own_events: tuple[type, ...]) -> Iterator[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Deadline and origin in (list, tuple, Sequence):
        hint = arguments[0]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is not kind or len(arguments) != _TYPE_ARGUMENTS:
        yield f"`{name}` is annotated to return {shown_name(hint)}; write {kind.__name__}[{cls.__name__}, …] or None"
        return
    state, events = arguments
    if shown_name(state) != cls.__qualname__:
        yield f"`{name}` returns what is of {shown_name(state)}; write {kind.__name__}[{cls.__name__}, …]"
    unknown = [shown_name(event) for event in union_members(events) if event not in own_events]
    if unknown:
        yield f"`{name}` may record {', '.join(unknown)}, which its `evolve` does not take"


def _listeners(
    cls: Any, name: str, own_events: tuple[type, ...], catalog: Catalog, faults: list[str]
) -> Iterator[Listener]:
    method_by_event: dict[type, str] = {}
    for method, handler in listeners_of(cls):
        where = f"process {name!r}: {cls.__name__}.{method}"
        if not is_called_with(handler, 2) or not is_plain(handler):
            faults.append(f"{where} is not a plain method that takes (self, event)")
            continue
        by = getattr(handler, LISTENS)
        if not is_called_with(by, 1) or not is_plain(by):
            faults.append(f"{where}: {shown_name(by)} names the process, so it has to be a plain function of one event")
            continue
        try:
            events = events_of(handler, list(inspect.signature(handler).parameters)[1])
            named = events if by is same_id else events_of(by, next(iter(inspect.signature(by).parameters), "event"))
        except DefinitionError as error:
            faults += error.faults
            continue
        if set(named) != set(events):
            faults.append(f"{where} and {shown_name(by)}, which names its process, take different events")
        for event in events:
            hears = f"{where} hears {shown_name(event)}"
            if event not in catalog:
                faults.append(f"{hears}, which no aggregate of the app folds; list its aggregate in `aggregates`")
            elif event in own_events:
                faults.append(f"{hears}, which is its own; let `step` follow from it")
            if (other_method := method_by_event.setdefault(event, method)) != method:
                faults.append(f"{hears}, and so does {other_method}; one listener hears an event")
        yield Listener(handler, by, events)
