"""`by_state` declares a key that the event lacks: it comes from the folded state of an aggregate. Pure.

`Joins` is the checked form: the aggregates whose states are folded, and how the projection's function is called with
them. `eventjet.projections.state_fold` folds them.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, overload
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, Column, Integer, MetaData, String, Table, Text

from eventjet.codec.catalog import Catalog
from eventjet.codec.states import StateCodec
from eventjet.domain.aggregate import AggregateType, aggregate_info
from eventjet.domain.identity import encode_id
from eventjet.domain.recorded import Recorded, own_event
from eventjet.domain.state import is_fixed, own_copy, state_faults
from eventjet.domain.subscription import (
    folded_events,
    raw_annotations,
    recorded_events_of,
    resolved_hint,
    shown_name,
    union_members,
)
from eventjet.errors import DefinitionError, Refused

S = TypeVar("S")
E = TypeVar("E")

KeyPart: TypeAlias = str | int | UUID | date | Decimal | Enum
KeyValue: TypeAlias = KeyPart | tuple[KeyPart, ...]
"""The key of a row: one value, or a tuple with one value for each column of the primary key."""
StateKeys: TypeAlias = KeyValue | list[Any] | AbstractSet[KeyValue] | None
"""The key that a state gives, a list or a set of keys, or None for no row."""

Via: TypeAlias = Callable[[Recorded[Any]], str | None]
"""A function from an event to the id of another aggregate, annotated with the events that it takes."""

OnChange: TypeAlias = Literal["keep", "move", "both"]
"""What happens when an event changes the key that its aggregate's state gives: see `by_state`."""
_ON_CHANGE: tuple[OnChange, ...] = ("keep", "move", "both")


@dataclass(frozen=True)
class ByState(Generic[S]):
    """A key from the state of one aggregate type, as `by_state` declares it."""

    aggregate: Any
    """The class of the aggregate."""
    key: Callable[..., Any]
    """Takes `(state)` or `(state, event)`, and returns a key, a list or set of keys, or None."""
    on_change: OnChange
    via: Via | None = None
    """Returns the id of the aggregate that an event of another aggregate names, or None."""


@overload
def by_state(
    aggregate: AggregateType[S, E], key: Callable[[S], StateKeys], /, *, on_change: OnChange, via: Via | None = None
) -> ByState[S]: ...
@overload
def by_state(
    aggregate: AggregateType[S, E],
    key: Callable[[S, Recorded[Any]], StateKeys],
    /,
    *,
    on_change: Literal["keep"],
    via: Via | None = None,
) -> ByState[S]: ...
def by_state(
    aggregate: Any, key: Callable[..., StateKeys], /, *, on_change: OnChange, via: Via | None = None
) -> ByState[Any]:
    """Declare that the key of an event comes from the state of its own aggregate, as it is after the event.

    For `@projection(…, key=by_state(Order, customer_of, on_change="keep"))`. `key` is given the state, or the state and
    the event. It returns a key, or a list or a set of keys; None, or an empty list, leaves the event out. Every event
    that `aggregate` folds counts for the state, whether the projection takes it or not; events of other aggregates need
    another `by_state` or a key function beside it: `key=[by_state(…), customer_of_payment]`. The projection's function
    may take the state as a further parameter, annotated with the class of the aggregate.

    `on_change` says what happens when an event changes the key of its aggregate from one to another:

    * `"keep"`: each event counts for the key after it; what earlier events made stays with the earlier key
    * `"move"`: each aggregate has one row, which is moved to the new key before the function is called with it; two
      aggregates may not have rows of one key, and without a key the row is deleted
    * `"both"`: the function is called for the key before and for the key after the event, and is given the key

    `via` brings in events of other aggregates that name this one: `via=customer_of_order`, with
    `def customer_of_order(event: Recorded[OrderPlaced]) -> str`. Their key comes from the state of the aggregate whose
    id it returns, as of the event's position: the initial state where that aggregate has no event yet. None leaves the
    event out. It does not go with `"move"`.

    ```python
    @projection("deposited", key=by_state(Account, lambda account: account.owner, on_change="keep"))
    def deposited(row: Balance | None, event: Recorded[Deposited], account: Account) -> Balance:
        row = row or Balance(account.owner or "", account.owner or "")
        return replace(row, amount=row.amount + event.data.amount)

    history = on("a-1", Opened(owner="ada"), Deposited(amount=Decimal(10)))
    projected(deposited, history).rows(Balance("ada", "ada", Decimal(10)))
    ```
    """
    return ByState(aggregate, key, on_change, via)


STATE_TABLE = "ej_state_"
"""Stands before the name of a projection in the name of its table of states."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row of the table in which a projection keeps the states of aggregates."""

    aggregate: str
    aggregate_id: str
    """The id as it is in the subject."""
    version: int
    """The version of the last event that counts for the state."""
    position: int
    """The position of that event; 0 while only events without effect came."""
    has_row: bool
    """Whether the aggregate has a row, with `on_change="move"`; False with the others."""
    shape: str
    """The fingerprint of the aggregate's name, revision and fields."""
    state: str
    """The state as JSON."""


def state_table(projection: str, rows: Table) -> Table:
    """Return the table of the states of one projection, as it is declared, in the schema of its rows."""
    return Table(
        f"{STATE_TABLE}{projection}",
        MetaData(),
        Column("aggregate", String(100), primary_key=True),
        Column("aggregate_id", String(200), primary_key=True),
        Column("version", Integer, nullable=False),
        Column("position", BigInteger, nullable=False),
        Column("has_row", Boolean, nullable=False),
        Column("shape", String(32), nullable=False),
        Column("state", Text, nullable=False),
        schema=rows.schema,
    )


@dataclass(frozen=True, slots=True, eq=False)
class StateSource:
    """One aggregate type whose states give keys."""

    name: str
    aggregate: Any
    codec: StateCodec[Any] = field(repr=False)
    keys: Callable[[Any, Recorded[Any]], tuple[tuple[Any, ...], ...]] = field(repr=False)
    """Returns the checked keys for a state and the event before it; raises `ValueError`."""
    on_change: OnChange
    named: Callable[[Recorded[Any]], str | None] = field(repr=False)
    """Returns the id, as it is in a subject, that an event of another aggregate names; raises `ValueError`."""


@dataclass(frozen=True, slots=True, eq=False)
class Joins:
    """The checked `by_state`s of a projection."""

    sources: Mapping[str, StateSource]
    """By the name of the aggregate."""
    owners: Mapping[type, str]
    """The aggregate of each class of event that a source folds; for events that do not name theirs."""
    lookups: Mapping[type, StateSource]
    """The source of each class of event of other aggregates that `via` takes."""
    table: Table
    """The table of the states, as declared."""
    call: Callable[[Any, Any, tuple[Any, ...], str, Any], Any] = field(repr=False)
    """The projection's function, called with (row, event, key, name of the aggregate, state)."""
    takes_state: bool
    """Whether the projection's function is given a state."""
    decoded: frozenset[type]
    """The classes of events that have to be decoded: those of the projection, and those that the sources fold."""

    @property
    def moves(self) -> bool:
        """Whether each row belongs to one aggregate, and moves with its key."""
        return any(source.on_change == "move" for source in self.sources.values())


KeyCheck: TypeAlias = Callable[[Any], tuple[Any, ...]]
"""Returns a key as a tuple of values in their normal form; raises `ValueError`, and `RowRefused`."""


def joins_of(
    name: str,
    table: Table,
    function: Callable[..., Any],
    sources: Sequence[ByState[Any]],
    plain: Sequence[Callable[[Recorded[Any]], Any]],
    events: Sequence[type],
    catalog: Catalog,
    key_checker: Callable[[str], KeyCheck],
    faults: list[str],
) -> Joins | None:
    """Check the `by_state`s of a projection and return them; adds what is wrong to `faults` and returns None then."""
    before = len(faults)
    resolved: dict[str, StateSource] = {}
    owners: dict[type, str] = {}
    lookups: dict[type, StateSource] = {}
    for source in sources:
        try:
            info, folded = aggregate_info(source.aggregate), folded_events(source.aggregate)
            codec = StateCodec[Any](source.aggregate, "kept beside rows", "take another key")
        except DefinitionError as error:
            faults.extend(error.faults)
            continue
        faults += [*state_faults(source.aggregate), *codec.faults()]
        label = f"by_state({shown_name(source.aggregate)})"
        if info.name in resolved:
            faults.append(f"two by_state name {shown_name(source.aggregate)}; give one that returns all keys")
        owners_of_events = {kind.aggregate for kind in catalog.kinds() if kind.event_type in folded}
        if not owners_of_events <= {None, info.name}:
            names = ", ".join(sorted(filter(None, owners_of_events)))
            faults.append(f"{label} folds events of {names}, and is not the aggregate of that name; name that one")
        if source.via is None and not set(folded) & set(events):
            faults.append(f"it takes no event of {shown_name(source.aggregate)}, which its key names")
        owners |= dict.fromkeys(folded, info.name)
        parameters = _required_parameters(source.key)
        if fault := _key_fault(source, parameters, is_alone=len(sources) == 1 and not plain):
            faults.append(f"{label}: {fault}")
        keys = _keys_of(source, parameters, key_checker(f"{label} gives"))
        named = StateSource(info.name, source.aggregate, codec, keys, source.on_change, _named_of(source))
        resolved[info.name] = named
        for event in _lookups_of(source, label, events, faults):
            if event in lookups:
                faults.append(f"{shown_name(event)} has two `via`; give one")
            lookups[event] = named
    if folded_too := sorted(shown_name(event) for event in lookups if event in owners):
        faults.append(
            f"`via` takes {', '.join(folded_too)}, whose key comes from the state of its own aggregate; leave that out"
        )
    _check_plain(plain, events, {*owners, *lookups}, faults)
    others = any(event not in owners and event not in lookups for event in events) or len(resolved) > 1
    call, takes_state = _call_of(function, resolved, faults, others=others)
    if len(faults) > before:
        return None
    return Joins(resolved, owners, lookups, state_table(name, table), call, takes_state, frozenset([*events, *owners]))


def _key_fault(source: ByState[Any], parameters: int, *, is_alone: bool) -> str:
    """Return what is wrong with `on_change`, or with what stands beside it; empty if nothing is."""
    if source.on_change not in _ON_CHANGE:
        return f'on_change is {source.on_change!r}; give "keep", "move" or "both"'
    if parameters not in (1, 2):
        return f"its function takes {parameters} parameters instead of (state) or (state, event)"
    if parameters > 1 and source.on_change != "keep":
        return (
            f'with on_change="{source.on_change}" the key is that of a state, before and after an event, so its '
            "function takes the state alone"
        )
    moves = 'with on_change="move" each row belongs to one aggregate alone, so'
    if source.on_change == "move" and not is_alone:
        return f"{moves} nothing stands beside it"
    if source.on_change == "move" and source.via is not None:
        return f'{moves} no event of another comes to it, and `via` does not go with it; give "keep" or "both"'
    return ""


def _lookups_of(source: ByState[Any], label: str, events: Sequence[type], faults: list[str]) -> list[type]:
    """Return the events of the projection that `via` takes; adds what is wrong to `faults`."""
    if source.via is None:
        return []
    try:
        accepted = recorded_events_of(source.via)
    except DefinitionError as error:
        faults.extend(error.faults)
        return []
    if unused := sorted(shown_name(event) for event in accepted if event not in events):
        faults.append(f"{label}: `via` takes {', '.join(unused)}, which the projection does not take")
    return [event for event in events if event in accepted]


def _named_of(source: ByState[Any]) -> Callable[[Recorded[Any]], str | None]:
    via = source.via

    def named(event: Recorded[Any]) -> str | None:
        aggregate_id = None if via is None else via(own_event(event))
        try:
            return None if aggregate_id is None else encode_id(aggregate_id)
        except Refused as error:
            raise ValueError(f"`via` gives no id of an aggregate: {error}") from None

    return named


def _required_parameters(key: Any) -> int:
    """Return how many arguments a function needs; 1 for a callable that does not tell, such as `attrgetter`."""
    try:
        parameters = inspect.signature(key).parameters.values()
    except (TypeError, ValueError):
        return int(callable(key))
    return sum(parameter.default is parameter.empty for parameter in parameters)


def _keys_of(
    source: ByState[Any], parameters: int, check: KeyCheck
) -> Callable[[Any, Recorded[Any]], tuple[tuple[Any, ...], ...]]:
    key = source.key
    is_open = not is_fixed(source.aggregate)

    def keys(state: Any, event: Recorded[Any]) -> tuple[tuple[Any, ...], ...]:
        state = own_copy(state) if is_open else state
        result = key(state) if parameters == 1 else key(state, own_event(event))
        if result is None:
            return ()
        if isinstance(result, list | set | frozenset):
            return tuple(dict.fromkeys(map(check, cast("Sequence[Any]", result))))
        return (check(result),)

    return keys


def _check_plain(
    plain: Sequence[Callable[[Recorded[Any]], Any]], events: Sequence[type], joined: Collection[type], faults: list[str]
) -> None:
    """Add faults for events without a key (`joined` have one by state), and for more than one key function."""
    if len(plain) > 1:
        faults.append("`key` has several key functions; give one for all events that no by_state covers")
        return
    try:
        accepted = recorded_events_of(plain[0]) if plain else ()
    except DefinitionError as error:
        faults.extend(error.faults)
        return
    missing = sorted(shown_name(event) for event in events if event not in joined and event not in accepted)
    if missing:
        faults.append(
            f"its `key` gives no key for {', '.join(missing)}, which the aggregates of by_state do not fold; add "
            "another by_state, `via` for an event that names its aggregate, or a key function: "
            "`key=[by_state(…), key_of_event]`"
        )


def _call_of(
    function: Callable[..., Any], sources: Mapping[str, StateSource], faults: list[str], *, others: bool
) -> tuple[Callable[[Any, Any, tuple[Any, ...], str, Any], Any], bool]:
    """Return (the projection's function as `Joins.call`, whether it takes a state)."""
    by_class = {source.aggregate: name for name, source in sources.items()}
    slots: list[str | None] = []
    for parameter in list(inspect.signature(function).parameters)[2:]:
        hint = resolved_hint(function, parameter) if parameter in raw_annotations(function) else None
        members: list[Any] = [] if hint is None else list(union_members(hint))
        state = next((member for member in members if hasattr(member, "evolve")), None)
        if state is None:
            slots.append(None)
            continue
        if state not in by_class or len(members) > 1:
            names = ", ".join(shown_name(cls) for cls in by_class)
            faults.append(f"the parameter `{parameter}` is {shown_name(hint)}; a state is one of {names}")
            continue
        if others and type(None) not in typing.get_args(hint):
            faults.append(
                f"the parameter `{parameter}` gets no state with events of other aggregates; annotate it "
                f"`{shown_name(state)} | None`"
            )
        slots.append(by_class[state])
    if slots.count(None) > 1:
        faults.append(f"{shown_name(function)} takes more than (row, event, key, state)")
    if None not in slots and any(source.on_change == "both" for source in sources.values()):
        faults.append(
            f'with on_change="both" {shown_name(function)} is called for two keys, so it takes the key: '
            "(row, event, key)"
        )

    def call(row: Any, event: Any, key: tuple[Any, ...], aggregate: str, state: Any) -> Any:
        arguments: list[Any] = []
        for slot in slots:
            if slot is None:
                arguments.append(key[0] if len(key) == 1 else key)
            else:
                arguments.append(state if slot == aggregate else None)
        return function(row, event, *arguments)

    return call, any(slot is not None for slot in slots)


def with_key(row: Any, columns: Sequence[str], key: tuple[Any, ...]) -> Any:
    """Return the row under another key."""
    values = dict(zip(columns, key, strict=True))
    if hasattr(row, "model_fields"):
        return row.model_copy(update=values)
    assert fields(row)
    return replace(row, **values)
