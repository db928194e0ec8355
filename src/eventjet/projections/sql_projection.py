"""`SqlProjection` declares a read model of any tables, which handlers write in the checkpoint's transaction.

A declaration only keeps its arguments. `resolve_sql` resolves and checks annotations and tables when an `App` is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, overload

from sqlalchemy import Sequence as DatabaseSequence
from sqlalchemy import Table
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from eventjet.codec.catalog import Catalog
from eventjet.domain.personal import is_private
from eventjet.domain.recorded import Recorded, own_event
from eventjet.domain.state import is_fixed
from eventjet.domain.subscription import raw_annotations, recorded_events_of, resolved_hint, shown_name, union_members
from eventjet.errors import DefinitionError
from eventjet.projections.fingerprint import fingerprint
from eventjet.projections.resolve import ResolvedProjection, name_faults
from eventjet.projections.row_table import TableSource, table_from
from eventjet.projections.row_type import declaration_faults

E = TypeVar("E")
D = TypeVar("D", AsyncConnection, AsyncSession)

Handler: TypeAlias = Callable[[Any, Any], Coroutine[Any, Any, None]]
"""A coroutine function that takes one `Recorded`, or a sequence of them, and a connection or a session."""
EventHandler: TypeAlias = Callable[[Recorded[E], D], Coroutine[Any, Any, None]]
BatchHandler: TypeAlias = Callable[[Sequence[Recorded[E]], D], Coroutine[Any, Any, None]]

_PARAMETERS = 2


class SqlProjection:
    """A read model of any tables, with a handler (a coroutine function) for each type of event that changes them.

    Handlers run in the order of the log, inside the transaction that advances the checkpoint. They read and write only
    the declared tables, through the connection they are given, and never commit or roll back. `tables` are `Table`s or
    mapped classes. Raise `revision` when the same events should give other rows.

    ```python
    ledger = SqlProjection("ledger", tables=[postings_table])

    @ledger.handler
    async def post(event: Recorded[Deposited], connection: AsyncConnection) -> None:
        row = {"position": event.position, "account_id": event.aggregate_id, "amount": event.data.amount}
        await connection.execute(postings_table.insert().values(row))

    projected(ledger, on("a-1", Deposited(amount=Decimal(9)))).rows(postings_table, {"account_id": "a-1"})
    ```

    A handler whose first parameter is a `Sequence[Recorded[…]]` is called once for all events of a batch that are its
    own and follow one another in the log, so that it may write them with one statement:

    ```python
    postings = SqlProjection("postings", tables=[postings_table])

    @postings.handler
    async def post_all(events: Sequence[Recorded[Deposited]], connection: AsyncConnection) -> None:
        rows = [{"position": e.position, "account_id": e.aggregate_id, "amount": e.data.amount} for e in events]
        await connection.execute(postings_table.insert(), rows)
    ```

    A handler whose second parameter is an `AsyncSession` gets a new session over that connection. What the handler
    leaves in it is flushed, and committed with the checkpoint: the handler neither commits, rolls back nor closes it.
    """

    __slots__ = ("_handlers", "_is_sealed", "name", "revision", "tables")

    def __init__(self, name: str, /, *, tables: Sequence[TableSource], revision: int = 1) -> None:
        self.name = name
        self.tables = tuple(tables)
        """The tables and mapped classes as they were given."""
        self.revision = revision
        """Raise it when the same events should give other rows."""
        self._handlers: list[Handler] = []
        self._is_sealed = False

    @overload
    def handler(self, function: EventHandler[E, D], /) -> EventHandler[E, D]: ...
    @overload
    def handler(self, function: BatchHandler[E, D], /) -> BatchHandler[E, D]: ...
    def handler(self, function: Handler, /) -> Handler:
        """Declare `function` as the handler of the events in its annotation, and return it unchanged.

        It takes one event (`event: Recorded[Deposited]`) or a run of them (`events: Sequence[Recorded[Deposited]]`),
        and a `connection: AsyncConnection` or a `session: AsyncSession`.

        Raises `DefinitionError` once an `App` was built with it; the `App` refuses a handler that takes anything else.
        """
        if self._is_sealed:
            reason = f"{shown_name(function)} is declared after the App was built, so it would never run"
            raise DefinitionError([f"projection {self.name!r}: {reason}"])
        self._handlers.append(function)
        return function

    def __repr__(self) -> str:
        return f"SqlProjection({self.name!r}, revision={self.revision})"

    def seal(self) -> tuple[Handler, ...]:
        """Return the handlers; none can be added afterwards."""
        self._is_sealed = True
        return tuple(self._handlers)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedHandler:
    """A checked handler."""

    name: str
    """The name of the handler in messages."""
    function: Handler = field(repr=False)
    takes_many: bool
    """Whether the handler is given a sequence of events."""
    takes_session: bool
    """Whether the handler is given a session over the connection."""


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedSql:
    """A checked `SqlProjection`, as workers and rebuilds use it. Not to be pickled."""

    name: str
    revision: int
    tables: tuple[Table, ...]
    """The tables as declared, in an order in which they can be created; `located_tables` returns a database's."""
    events: tuple[type, ...]
    """The classes of events that it subscribes to: the events of all handlers."""
    handlers: Mapping[type, ResolvedHandler] = field(repr=False)
    """The handlers by class of event. Classes that share a handler share the object."""
    app: str = ""
    """The app that declares the projection; empty where there is none."""
    code: str = ""
    """The fingerprint of the imported code; empty where its source cannot be read."""

    @property
    def quarantines(self) -> bool:
        """Always False: the rows that handlers write cannot be assigned to aggregates."""
        return False

    @property
    def is_private(self) -> bool:
        """Whether an event that it takes holds personal data."""
        return any(map(is_private, self.events))

    @property
    def durable(self) -> str:
        """The name of its consumer."""
        return f"{self.name}-r{self.revision}"


AnyResolved: TypeAlias = ResolvedProjection | ResolvedSql
"""A checked projection of either kind; both have `name`, `revision`, `tables`, `events`, `durable`, `quarantines`."""


def resolve_sql(declared: SqlProjection, catalog: Catalog) -> ResolvedSql:
    """Check one SQL projection and resolve its annotations; raises `DefinitionError` with all its faults."""
    faults = name_faults(declared.name, declared.revision)
    tables = _tables(declared.tables, faults)
    handlers = _handlers(declared.seal(), catalog, faults)
    if faults:
        raise DefinitionError([f"projection {declared.name!r}: {fault}" for fault in faults])
    resolved: dict[Handler, ResolvedHandler] = {}
    for function in dict.fromkeys(handlers.values()):
        events, takes_many = _subscribed(function)
        guarded = function if all(map(is_fixed, events)) else _guarded(function, takes_many)
        takes_session = _second_hint(function) is AsyncSession
        resolved[function] = ResolvedHandler(shown_name(function), guarded, takes_many, takes_session)
    code = fingerprint(tuple(resolved))
    by_event = {event: resolved[function] for event, function in handlers.items()}
    return ResolvedSql(declared.name, declared.revision, tables, tuple(handlers), by_event, code=code)


def _guarded(handler: Handler, takes_many: bool) -> Handler:
    """Return the handler with its own copy of events for each call, so that it cannot change the events of others."""

    @wraps(handler)
    async def guarded(events: Any, connection: AsyncConnection) -> None:
        argument: Any = tuple([own_event(event) for event in events]) if takes_many else own_event(events)
        await handler(argument, connection)

    return guarded


def _second_hint(handler: Handler) -> Any:
    """Return the annotation of a handler's second parameter; `Any` without one. Raises `DefinitionError`."""
    name = list(inspect.signature(handler).parameters)[1]
    return resolved_hint(handler, name) if name in raw_annotations(handler) else Any


def _subscribed(function: Handler) -> tuple[tuple[type, ...], bool]:
    """Return (the classes of events that a handler takes, whether as a sequence); raises `DefinitionError`."""
    parameter = next(iter(inspect.signature(function).parameters), "event")
    hint = resolved_hint(function, parameter)
    kind = get_origin(hint) or hint
    if kind not in (Sequence, Iterable, list, tuple):
        return recorded_events_of(function), False
    item = next(iter(get_args(hint)), None)
    if kind is not Sequence or get_origin(item) is not Recorded:
        form = f"{parameter}: Sequence[Recorded[…]]"
        raise DefinitionError([f"{shown_name(function)} is given a sequence of `Recorded`: write `{form}`"])
    return union_members(get_args(item)[0]), True


def subscription(declared: SqlProjection) -> list[type]:
    """Return all classes of events in the annotations of its handlers, unchecked; raises `DefinitionError`."""
    return [event for function in declared.seal() for event in _subscribed(function)[0]]


def _handlers(functions: Sequence[Handler], catalog: Catalog, faults: list[str]) -> dict[type, Handler]:
    handlers: dict[type, Handler] = {}
    if not functions:
        faults.append("it has no handler; declare one with `@….handler`")
    for function in functions:
        if not inspect.iscoroutinefunction(function):
            faults.append(f"{shown_name(function)} is not an `async def`")
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) != _PARAMETERS:
            faults.append(f"{shown_name(function)} takes ({', '.join(parameters)}) instead of (event, connection)")
            continue
        try:
            events, _ = _subscribed(function)
            hint = _second_hint(function)
        except DefinitionError as error:
            faults.extend(error.faults)
            continue
        if hint not in (AsyncConnection, AsyncSession, Any):
            expected = "AsyncSession" if "Session" in shown_name(hint) else "AsyncConnection"
            faults.append(
                f"{shown_name(function)} takes `{parameters[1]}: {shown_name(hint)}`, which no worker gives it; "
                f"take {expected} of sqlalchemy.ext.asyncio, and await its methods"
            )
        for event_type in events:
            if event_type not in catalog:
                faults.append(
                    f"{shown_name(function)} takes {shown_name(event_type)}, which no aggregate of the app folds"
                )
            previous = handlers.setdefault(event_type, function)
            if previous is not function:
                takers = f"{shown_name(previous)} and by {shown_name(function)}"
                faults.append(f"{shown_name(event_type)} is taken by {takers}; give it one handler")
    return handlers


def _tables(sources: Sequence[TableSource], faults: list[str]) -> tuple[Table, ...]:
    """Return the tables in an order in which they can be created, and add what is wrong with them to `faults`."""
    if not sources:
        faults.append("it has no tables")
        return ()
    try:
        declared = [table_from(source) for source in sources]
    except DefinitionError as error:
        faults.extend(error.faults)
        return ()
    names = [table.name for table in declared]
    faults.extend(f"it lists the table {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1)
    for table in declared:
        faults.extend(_table_faults(table, declared))
    if faults:
        return tuple(declared)
    order = TopologicalSorter[Table](dict.fromkeys(declared, ()))
    for table in declared:
        targets = (key.referred_table for key in table.foreign_key_constraints)
        order.add(table, *(target for target in targets if target is not table))
    try:
        return tuple(order.static_order())
    except CycleError as error:
        circle = ", ".join(sorted({table.name for table in error.args[1]}))
        faults.append(f"the foreign keys of {circle} form a circle, so none of them could be made first")
        return tuple(declared)


def _table_faults(table: Table, declared: Sequence[Table]) -> list[str]:
    """Return what a rebuild could not create again in its own schema or file, or could not compare."""
    faults = list(declaration_faults(table))
    if table.schema is not None:
        faults.append(
            f"the table {table.fullname!r} names its schema, so a rebuild could not make it anywhere else; "
            "leave the schema out and set search_path"
        )
    if not table.primary_key.columns:
        faults.append(f"the table {table.name!r} has no primary key, by which its rows are compared")
    for key in table.foreign_key_constraints:
        try:
            target = key.referred_table
        except SQLAlchemyError:
            faults.append(f"the table {table.name!r} has a foreign key to a table that cannot be found")
            continue
        if target not in declared:
            faults.append(
                f"the table {table.name!r} has a foreign key to {target.name!r}, which the projection does not declare"
            )
    faults.extend(
        f"column {table.name}.{column.name} takes its values from a sequence that is not its own; use Identity()"
        for column in table.columns
        if isinstance(column.default, DatabaseSequence) or isinstance(column.server_default, DatabaseSequence)
    )
    return faults
