"""`resolve` checks a declared projection and returns the form that workers and rebuilds use."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeAlias, cast

from sqlalchemy import Column, Table
from sqlalchemy import types as sa

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import is_count
from eventjet.domain.personal import is_private
from eventjet.domain.recorded import Recorded, own_event
from eventjet.domain.state import is_fixed
from eventjet.domain.subscription import is_plain, recorded_events_of, resolved_hint, shown_name
from eventjet.errors import DefinitionError, RowRefused
from eventjet.projections.by_state import Joins, joins_of
from eventjet.projections.columns import key_check, key_type, way_out_of
from eventjet.projections.fingerprint import fingerprint
from eventjet.projections.projection import Entries, OnError, Projection, plain_keys, state_keys
from eventjet.projections.row_table import row_type_of
from eventjet.projections.row_type import listed_names, row_faults, table_faults

KeyOf: TypeAlias = Callable[[Recorded[Any]], tuple[Any, ...]]
KeysOf: TypeAlias = Callable[[Recorded[Any]], tuple[tuple[Any, ...], ...]]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
_KEYS_CACHED = 65_536
"""Checked keys of aggregate ids that are kept, so that an id is not checked for every event."""


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedProjection:
    """A checked projection, not to be pickled: executors of Spark import the app by reference and resolve it again."""

    name: str
    revision: int
    table: Table
    """The table as declared; `located` returns the table of a database."""
    events: tuple[type, ...]
    """The classes of events that it subscribes to."""
    row_type: type
    key_columns: tuple[str, ...]
    declared: Projection[Any, Any] | Entries[Any, Any] = field(repr=False)
    key_of: KeyOf | None = field(repr=False)
    """Returns the one key that an event touches, checked; raises `RowRefused`. None where there may be several keys,
    and for entries, whose keys are known only from their rows."""
    keys_of: KeysOf = field(repr=False)
    """Returns all keys that an event touches, each a tuple, without duplicates; empty for entries."""
    keyed_by_aggregate: bool
    """Whether the key is the aggregate id, which is read from the subject without decoding the event."""
    reads: bool
    """Whether rows are read before they are folded; entries are only appended."""
    on_error: OnError = "stop"
    joins: Joins | None = field(default=None, repr=False)
    """The states from which the keys come; None where events have their keys."""
    app: str = ""
    """The app that declares the projection; empty where there is none."""
    code: str = ""
    """The fingerprint of the imported code; empty where its source cannot be read."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The projection's table, and the table of its states if it has one."""
        return (self.table,) if self.joins is None else (self.table, self.joins.table)

    @property
    def decoded(self) -> Collection[type]:
        """The classes of events that have to be decoded; more than `events` where states are folded."""
        return self.events if self.joins is None else self.joins.decoded

    @property
    def durable(self) -> str:
        """The name of its consumer."""
        return f"{self.name}-r{self.revision}"

    @property
    def quarantines(self) -> bool:
        """Whether an event that cannot be handled is quarantined, instead of stopping the projection."""
        return self.on_error == "quarantine"

    @property
    def is_private(self) -> bool:
        """Whether an event that it takes, or its row, or a state that it keeps, holds personal data."""
        states = () if self.joins is None else [source.aggregate for source in self.joins.sources.values()]
        return any(map(is_private, (*self.decoded, self.row_type, *states)))

    @property
    def fold_alone(self) -> Callable[[Any, Recorded[Any]], Any] | None:
        """The projection's own function where that takes (row, event), without keys and states; else None."""
        declared: Any = self.declared
        return declared.fold if self.reads and declared.keys is None and self.joins is None else None

    def apply(self, row: Any, event: Recorded[Any], key: tuple[Any, ...]) -> Any:
        """Call the function for one event (with states, a `Joined`) and one key; the row is not normalised."""
        if self.joins is not None:
            return cast("Any", event).applied(self.joins, row, key)
        fold = self.fold_alone
        if fold is not None:
            return fold(row, event)
        (only, *rest) = key
        return cast("Any", self.declared).fold(row, event, key if rest else only)

    def entries(self, event: Recorded[Any]) -> Sequence[Any]:
        """Call the projection's own function for one event; the rows it returns are not normalised."""
        rows = cast("Entries[Any, Any]", self.declared).rows(event)
        if rows is None:
            return ()
        return cast("Sequence[Any]", rows) if isinstance(rows, list | tuple) else (rows,)


def resolve(declared: Projection[Any, Any] | Entries[Any, Any], catalog: Catalog) -> ResolvedProjection:
    """Check one projection and resolve its annotations; raises `DefinitionError` with all its faults."""
    check = _Resolving(declared, catalog)
    resolved = check.resolved()
    if resolved is None or check.faults:
        subject = f"projection {declared.name!r}"
        raise DefinitionError([f"{subject}: {fault}" for fault in check.faults])
    return resolved


def _guarded(
    declared: Projection[Any, Any] | Entries[Any, Any], events: Sequence[type]
) -> Projection[Any, Any] | Entries[Any, Any]:
    """Return the declaration with functions that get their own copy of each event, where events can be changed."""
    if all(map(is_fixed, events)):
        return declared
    if isinstance(declared, Entries):
        return replace(declared, source=declared.table, rows=_with_own_event(declared.rows))
    fold, key, keys = declared.fold, declared.key, declared.keys

    @wraps(fold)
    def guarded(row: Any, event: Recorded[Any], *rest: Any) -> Any:
        return fold(row, own_event(event), *rest)

    return replace(
        declared,
        source=declared.table,
        fold=guarded,
        key=_with_own_event(key) if callable(key) else key,
        keys=None if keys is None else _with_own_event(keys),
    )


def _with_own_event(function: Callable[[Recorded[Any]], Any]) -> Callable[[Recorded[Any]], Any]:
    @wraps(function)
    def guarded(event: Recorded[Any]) -> Any:
        return function(own_event(event))

    return guarded


def name_faults(name: str, revision: int) -> list[str]:
    """Return what is wrong with the name and the revision of a projection."""
    faults: list[str] = []
    if not _NAME.fullmatch(name):
        faults.append("its name is not [a-z][a-z0-9_]* of at most 48 characters")
    if not is_count(revision):
        faults.append(f"its revision is {revision!r}; give a whole number, 1 or more")
    return faults


class _Resolving:
    """The check of one declaration; collects its `faults`."""

    def __init__(self, declared: Projection[Any, Any] | Entries[Any, Any], catalog: Catalog) -> None:
        self.declared = declared
        self.catalog = catalog
        self.function = declared.fold if isinstance(declared, Projection) else declared.rows
        self.faults: list[str] = []
        self.sources, self.plain_keys = state_keys(declared), plain_keys(declared)

    def resolved(self) -> ResolvedProjection | None:
        declared = self.declared
        self.faults += name_faults(declared.name, declared.revision)
        keys = declared.keys if isinstance(declared, Projection) else None
        self.faults += [
            f"{shown_name(function)} is async or a generator; write a plain `def`"
            for function in (self.function, *self.plain_keys, keys)
            if not is_plain(function)
        ]
        events = self._events()
        row_type = None
        try:
            self.table = declared.table
            row_type = row_type_of(self.function, is_list=isinstance(declared, Entries))
        except DefinitionError as error:
            self.faults.extend(error.faults)
        if row_type is not None:
            self.faults += [*table_faults(self.table), *row_faults(row_type, self.table)]
            self.key_columns = list(self.table.primary_key.columns)
            self._check_keys(events)
        self._check_on_error()
        if row_type is None or self.faults:
            return None
        functions = [self.function, *self.plain_keys]
        functions += [declared.keys] if isinstance(declared, Projection) and declared.keys is not None else []
        for source in self.sources:
            # A lambda is part of the definition that it is written in.
            named = [each for each in (source.key, source.via) if getattr(each, "__name__", "<lambda>") != "<lambda>"]
            functions += [source.aggregate, *named]
        code = fingerprint((*functions, row_type))
        self.declared = declared = _guarded(declared, events)
        joins = None
        if self.sources:
            assert isinstance(declared, Projection)
            columns = self.key_columns
            joins = joins_of(
                declared.name,
                self.table,
                declared.fold,
                self.sources,
                self.plain_keys,
                events,
                self.catalog,
                lambda source: _key_checker(source, columns),
                self.faults,
            )
            if joins is None:
                return None
        key_of, keys_of = self._keys()
        return ResolvedProjection(
            name=declared.name,
            revision=declared.revision,
            table=self.table,
            events=events,
            row_type=row_type,
            key_columns=tuple(column.key for column in self.key_columns),
            declared=declared,
            key_of=key_of,
            keys_of=keys_of,
            keyed_by_aggregate=isinstance(declared, Projection) and declared.key is None and declared.keys is None,
            reads=isinstance(declared, Projection),
            on_error=declared.on_error,
            joins=joins,
            code=code,
        )

    def _events(self) -> tuple[type, ...]:
        names = list(inspect.signature(self.function).parameters)
        index = 1 if isinstance(self.declared, Projection) else 0
        if len(names) <= index:
            self.faults.append(f"{shown_name(self.function)} takes ({', '.join(names)}), and no event")
            return ()
        try:
            event_types = recorded_events_of(self.function, names[index])
        except DefinitionError as error:
            self.faults.extend(error.faults)
            return ()
        if unknown := ", ".join(shown_name(event_type) for event_type in event_types if event_type not in self.catalog):
            self.faults.append(f"it takes {unknown}, which no aggregate of the app folds")
        return event_types

    def _check_keys(self, events: Sequence[type]) -> None:
        subject = f"the primary key of {self.table.name!r}"
        if not self.key_columns:
            self.faults.append(f"{subject} is missing; it is the projection's key")
            return
        types = [key_type(column.type) for column in self.key_columns]
        for column, kind in zip(self.key_columns, types, strict=True):
            if kind is None:
                self.faults.append(f"{subject} has {column.name!r}, {_why_no_key(column)}")
            if isinstance(column.type, sa.String) and column.type.collation:
                self.faults.append(f"{subject} has {column.name!r} with a collation, which may take two keys for one")
        if isinstance(self.declared, Entries):
            if types not in ([int], [int, int]) or not isinstance(self.key_columns[0].type, sa.BigInteger):
                self.faults.append(f"{subject} must be the position, a BigInteger, alone or with an integer index")
            return
        expected = self._declared_key(events)
        if expected is not None and expected != types:
            self.faults.append(
                f"{subject} is ({_type_names(types)}), and the projection's key is ({_type_names(expected)})"
            )

    def _check_on_error(self) -> None:
        declared = self.declared
        if declared.on_error not in ("stop", "quarantine"):
            self.faults.append(f'on_error is {declared.on_error!r}; give "stop" or "quarantine"')
        elif declared.on_error == "quarantine" and (
            isinstance(declared, Entries) or declared.key is not None or declared.keys is not None
        ):
            kind = "entries" if isinstance(declared, Entries) else "by_state" if self.sources else "a key of its own"
            why = (
                "the order after a quarantined event can only be kept by aggregate, so the key must be the aggregate id"
            )
            if any(source.on_change != "move" for source in self.sources):
                why = (
                    "a row has events of several aggregates, so those behind a quarantined event would come to it too "
                    "late, and a rebuild would make another row"
                )
            elif self.sources:
                why = (
                    "a row that moves would have to wait under its earlier key, and another aggregate may have that "
                    "key by then"
                )
            self.faults.append(f'on_error="quarantine" does not go with {kind}: {why}')

    def _declared_key(self, events: Sequence[type]) -> list[Any] | None:
        """Return the types of the key's parts; None when they are not annotated."""
        declared = cast("Projection[Any, Any]", self.declared)
        if declared.key is not None and declared.keys is not None:
            self.faults.append("it has both `key` and `keys`; give one")
        function = next(iter(self.plain_keys), declared.keys)
        if self.sources and declared.keys is None:
            return None  # `joins_of` checks them
        if len(self.plain_keys) > 1 or (declared.key is not None and not (self.plain_keys or self.sources)):
            self.faults.append("its `key` is a list without a by_state; give one key function")
            return None
        if function is None:
            return [str]
        try:
            accepted = recorded_events_of(function)
            hint = resolved_hint(function, "return")
        except DefinitionError as error:
            self.faults.extend(error.faults)
            return None
        missing = {shown_name(event_type) for event_type in events if event_type not in accepted}
        if missing:
            self.faults.append(f"{shown_name(function)} gives no key for {listed_names(missing)}")
        if declared.key is None:
            members = {member for member in typing.get_args(hint) if member is not ...}
            if len(members) != 1:
                self.faults.append(f"{shown_name(function)} must be annotated to return a sequence of one type of key")
                return None
            (hint,) = members
        return list(typing.get_args(hint)) if typing.get_origin(hint) is tuple else [hint]

    def _keys(self) -> tuple[KeyOf | None, KeysOf]:
        declared = self.declared
        if isinstance(declared, Entries):
            return None, lambda _: ()
        if declared.keys is not None:
            return None, _several_keys(declared.keys, self.key_columns)
        plain = declared.key if callable(declared.key) else next(iter(self.plain_keys), None)
        if self.sources and plain is None:
            return None, lambda _: ()
        key_of = _by_aggregate(self.key_columns) if plain is None else _single_key(plain, self.key_columns)
        return None if self.sources else key_of, lambda event: (key_of(event),)


def _by_aggregate(columns: Sequence[Column[Any]]) -> KeyOf:
    check = _key_checker("is the aggregate's id", columns)
    cache: dict[str, tuple[Any, ...]] = {}

    def checked(aggregate_id: str) -> tuple[Any, ...]:
        key = check(aggregate_id)
        if len(cache) >= _KEYS_CACHED:
            cache.clear()
        cache[aggregate_id] = key
        return key

    def key_of(event: Recorded[Any]) -> tuple[Any, ...]:
        return cache.get(event.aggregate_id) or checked(event.aggregate_id)

    return key_of


def _single_key(key: Callable[[Recorded[Any]], Any], columns: Sequence[Column[Any]]) -> KeyOf:
    check = _key_checker(f"{shown_name(key)} returned", columns)
    return lambda event: check(key(event))


def _several_keys(keys: Callable[[Recorded[Any]], Sequence[Any]], columns: Sequence[Column[Any]]) -> KeysOf:
    check = _key_checker(f"{shown_name(keys)} returned", columns)

    def keys_of(event: Recorded[Any]) -> tuple[tuple[Any, ...], ...]:
        result: Any = keys(event)
        if isinstance(result, str | bytes) or not isinstance(result, Iterable):
            raise ValueError(f"{shown_name(keys)} returned {type(result).__name__} instead of a sequence of keys")
        return tuple(dict.fromkeys(map(check, cast("Iterable[Any]", result))))

    return keys_of


def _key_checker(source: str, columns: Sequence[Column[Any]]) -> Callable[[Any], tuple[Any, ...]]:
    """Return the check of a key that `source`; its refusal names that and the column, and never the value."""
    checks = [key_check(column, len(columns)) for column in columns]

    def refusal(parts: tuple[Any, ...]) -> Exception:
        if len(parts) != len(columns):
            names = ", ".join(column.name for column in columns)
            return ValueError(f"the key that {source} has {len(parts)} parts, and the key of the table is ({names})")
        for check, column, part in zip(checks, columns, parts, strict=True):
            try:
                check(part)
            except ValueError as error:
                given = f"the {type(part).__name__} that {source}"
                return RowRefused(column.table.name, column.name, given, str(error), way_out_of(error), given=given)
        raise AssertionError(parts)

    def checked(key: Any) -> tuple[Any, ...]:
        parts = cast("tuple[Any, ...]", key) if isinstance(key, tuple) else (key,)
        try:
            return tuple([check(part) for check, part in zip(checks, parts, strict=True)])
        except ValueError:
            raise refusal(parts) from None

    return checked


def _why_no_key(column: Column[Any]) -> str:
    if isinstance(column.type, sa.Numeric) and not isinstance(column.type, sa.Float):
        return (
            "a Numeric without a precision, in which 1.0 and 1.00 may be one key or two; name it, as in "
            f"`{column.name}: Annotated[Key[Decimal], Numeric(12, 2)]`"
        )
    return "which is not text, integer, UUID, date, datetime, Decimal or enum"


def _type_names(types: Sequence[Any]) -> str:
    return ", ".join(shown_name(kind) for kind in types)
