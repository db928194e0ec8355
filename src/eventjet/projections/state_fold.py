"""`StateFold` folds the states of aggregates beside the events of a projection with `by_state`, the same everywhere.

It stands before `Fold`: from events in the order of the log, and the states before them, it makes `Joined`s, each with
its key, which `Fold` takes in the place of the events. Workers, rebuilds, `verify` and tests all use it. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, cast

from eventjet.codec.headers import VERSION, RawRecord, number_of
from eventjet.codec.subjects import entity_of
from eventjet.domain.history import evolved
from eventjet.domain.identity import encode_id
from eventjet.domain.recorded import Recorded
from eventjet.domain.state import own_copy
from eventjet.errors import ProjectionStopped
from eventjet.projections.by_state import Joins, StateRow, with_key
from eventjet.projections.resolve import ResolvedProjection

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

RowKey: TypeAlias = tuple[Any, ...]
StateId: TypeAlias = tuple[str, str]
"""The key of a state: (name of the aggregate, id as it is in the subject)."""


class Owner:
    """What is known of the row of one aggregate, with `on_change="move"`; the fold of rows changes it."""

    __slots__ = ("has_row", "moving")

    def __init__(self, has_row: bool = False) -> None:
        self.has_row = has_row
        """Whether the aggregate has a row under its key; one that is there without this is another aggregate's."""
        self.moving: Any = None
        """The row, between the key that it has left and the next one."""


class Cell(NamedTuple):
    """The state of one aggregate, and the version and position of its last event: see `StateRow`."""

    state: Any
    version: int
    position: int
    owner: Owner | None = None
    """None unless the row of the aggregate moves."""


class Joined:
    """An event with the state of its aggregate after it, or of the aggregate that it names, for one row."""

    __slots__ = ("aggregate", "event", "state")

    def __init__(self, event: Recorded[Any], aggregate: str, state: Any) -> None:
        self.event = event
        self.aggregate = aggregate
        """The name of the aggregate; empty where no state is folded for it."""
        self.state = state

    @property
    def position(self) -> int:
        return self.event.position

    @property
    def aggregate_id(self) -> str:
        return self.event.aggregate_id

    def applied(self, joins: Joins, row: Any, key: RowKey) -> Any:
        """Return the row after the event."""
        return joins.call(row, self.event, key, self.aggregate, self.state)


class Leaving(Joined):
    """The row of an aggregate leaves this key, and is deleted unless it `arrives` at another one."""

    __slots__ = ("arrives", "owner")

    def __init__(self, event: Recorded[Any], aggregate: str, owner: Owner, *, arrives: bool) -> None:
        super().__init__(event, aggregate, None)
        self.owner = owner
        self.arrives = arrives

    def applied(self, joins: Joins, row: Any, key: RowKey) -> Any:  # noqa: ARG002 - as of an event
        owner = self.owner
        if not owner.has_row:
            return row
        owner.has_row, owner.moving = False, row if self.arrives else None
        return None


class Owned(Joined):
    """An event of an aggregate that has one row alone, under the key at which that row stays or arrives."""

    __slots__ = ("columns", "is_taken", "owner")

    def __init__(
        self, event: Recorded[Any], aggregate: str, state: Any, owner: Owner, columns: Sequence[str], *, is_taken: bool
    ) -> None:
        super().__init__(event, aggregate, state)
        self.owner = owner
        self.columns = columns
        self.is_taken = is_taken
        """Whether the projection takes the event; the row may arrive with one that it does not take."""

    def applied(self, joins: Joins, row: Any, key: RowKey) -> Any:
        owner = self.owner
        own, owner.moving = row if owner.has_row else owner.moving, None
        is_of_another = row is not None and not owner.has_row
        if own is not None and not owner.has_row:
            own = with_key(own, self.columns, key)
        after = super().applied(joins, own, key) if self.is_taken else own
        if is_of_another:
            if after is None:
                return row
            raise ValueError(
                'another aggregate has the row of its key, and with on_change="move" a row belongs to one aggregate'
            )
        owner.has_row = after is not None
        return after


@dataclass(frozen=True, slots=True)
class Joining:
    """The result of `StateFold.join`."""

    events: Sequence[Joined]
    keys: Sequence[RowKey]
    """The key of each; an event with several keys, or whose row moves, is there several times."""
    cells: Mapping[StateId, Cell]
    """The states that changed."""


class StateFold:
    """Folds the states of one projection with `by_state`. Holds no states."""

    __slots__ = ("_columns", "_events", "_joins", "_keys_of", "_name", "_starts")

    def __init__(self, resolved: ResolvedProjection) -> None:
        assert resolved.joins is not None
        self._name = resolved.name
        self._joins = resolved.joins
        self._events = frozenset(resolved.events)
        self._keys_of = resolved.keys_of
        self._columns = resolved.key_columns
        self._starts = {
            name: Cell(source.aggregate(), 0, 0, Owner() if source.on_change == "move" else None)
            for name, source in resolved.joins.sources.items()
        }

    def ids(self, events: Iterable[Recorded[Any]]) -> list[StateId]:
        """Return the key of each state that these events change or name, once."""
        ids: dict[StateId, None] = {}
        for event in events:
            name = self._aggregate_of(event)
            if name in self._starts:
                ids[name, encode_id(event.aggregate_id)] = None
            elif type(event.data) in self._joins.lookups:
                with suppress(Exception):  # `join` calls the function again, and names the event
                    named = self.named(event)
                    ids |= {} if named is None else {named: None}
        return list(ids)

    def named(self, event: Recorded[Any]) -> StateId | None:
        """Return the key of the state that an event of another aggregate names, if any; raises what `via` raises."""
        source = self._joins.lookups.get(cast("Any", type(event.data)))
        token = None if source is None else source.named(event)
        return None if source is None or token is None else (source.name, token)

    def join(
        self,
        events: Iterable[Recorded[Any]],
        cells: Mapping[StateId, Cell],
        fail: Callable[[Recorded[Any] | None, BaseException], None],
    ) -> Joining:
        """Fold the states that are in `cells`, and return the events with their states and keys.

        Events must be in the order of the log; one without data only counts for the version. `fail` raises the error
        for an event that raised. Raises `ProjectionStopped` for an event whose state is missing.
        """
        joined: list[Joined] = []
        keys: list[RowKey] = []
        changed: dict[StateId, Cell] = {}
        sources, takes_state = self._joins.sources, self._joins.takes_state
        event: Recorded[Any] | None = None
        try:
            for event in events:
                name = self._aggregate_of(event)
                source = sources.get(name)
                if source is None and type(event.data) in self._joins.lookups:
                    self._look_up(event, changed, cells, joined, keys)
                    continue
                if source is None:
                    for key in self._keys_of(event) if type(event.data) in self._events else ():
                        joined.append(Joined(event, "", None))
                        keys.append(key)
                    continue
                state_id = (name, encode_id(event.aggregate_id))
                before = changed.get(state_id)
                if before is None:
                    start = cells.get(state_id) or self._starts[name]
                    # Both are changed here, and the cell stays as it is: a batch may be folded again.
                    owner = None if start.owner is None else Owner(start.owner.has_row)
                    before = start._replace(state=own_copy(start.state), owner=owner)
                if event.data is None:
                    if event.version == before.version + 1:
                        changed[state_id] = before._replace(version=event.version)
                    continue
                if event.version != before.version + 1:
                    raise self._missing(event, before)
                owner, is_taken = before.owner, type(event.data) in self._events
                has_keys = is_taken or owner is not None
                is_known = has_keys and before.position > 0 and source.on_change != "keep"
                keys_before = source.keys(before.state, event) if is_known else ()
                state = evolved(before.state, event.data)
                changed[state_id] = Cell(state, event.version, event.position, owner)
                keys_after = source.keys(state, event) if has_keys else ()
                # A copy, since rows are folded after all states, and `evolve` may have changed this one by then.
                if owner is None:
                    for key in dict.fromkeys((*keys_before, *keys_after)):
                        joined.append(Joined(event, name, own_copy(state) if takes_state else None))
                        keys.append(key)
                    continue
                if len(keys_after) > 1:
                    raise ValueError(
                        f'its state gives {len(keys_after)} keys, and with on_change="move" it has one row'
                    )
                if keys_before and keys_before != keys_after:
                    joined.append(Leaving(event, name, owner, arrives=bool(keys_after)))
                    keys += keys_before
                if keys_after and (is_taken or keys_before != keys_after):
                    state_copy = own_copy(state) if takes_state else None
                    joined.append(Owned(event, name, state_copy, owner, self._columns, is_taken=is_taken))
                    keys += keys_after
        except ProjectionStopped:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a function of the application raises names its event
            fail(event, error)
        return Joining(joined, keys, changed)

    def _look_up(
        self,
        event: Recorded[Any],
        changed: Mapping[StateId, Cell],
        cells: Mapping[StateId, Cell],
        joined: list[Joined],
        keys: list[RowKey],
    ) -> None:
        """Join an event with the state that it names, as of its position."""
        named = self.named(event)
        if named is None:
            return
        state = (changed.get(named) or cells.get(named) or self._starts[named[0]]).state
        for key in self._joins.lookups[type(event.data)].keys(state, event):
            joined.append(Joined(event, named[0], own_copy(state) if self._joins.takes_state else None))
            keys.append(key)

    def row(self, state_id: StateId, cell: Cell) -> StateRow:
        """Return a state as a row of the projection's table of states; raises `UnencodableEvent`."""
        codec, has_row = self._joins.sources[state_id[0]].codec, cell.owner is not None and cell.owner.has_row
        state = codec.encode(cell.state).decode()
        return StateRow(*state_id, cell.version, cell.position, has_row, codec.fingerprint, state)

    def cells(self, rows: Iterable[StateRow]) -> dict[StateId, Cell]:
        """Return the states in these rows; raises `ProjectionStopped` for states of other code."""
        cells: dict[StateId, Cell] = {}
        for row in rows:
            source = self._joins.sources[row.aggregate]
            if row.shape != source.codec.fingerprint:
                raise ProjectionStopped(
                    self._name,
                    f"its states of {row.aggregate!r} were folded by other code: the aggregate has another revision or "
                    "other fields now",
                    f"Run `eventjet rebuild {self._name}`, or raise the projection's revision.",
                )
            try:
                state = source.codec.decode(row.state.encode())
            except ValueError:
                raise ProjectionStopped(
                    self._name,
                    f"the state of {row.aggregate} {row.aggregate_id!r} in {self._joins.table.name} cannot be read",
                    f"Run `eventjet rebuild {self._name}`.",
                ) from None
            owner = Owner(row.has_row) if source.on_change == "move" else None
            cells[row.aggregate, row.aggregate_id] = Cell(state, row.version, row.position, owner)
        return cells

    def numbered(self, events: Sequence[Recorded[Any]]) -> list[Recorded[Any]]:
        """Return the events of a test with the versions that they have in a log, from 1 in each aggregate."""
        versions = Counter[StateId]()
        numbered: list[Recorded[Any]] = []
        for event in events:
            key = (self._aggregate_of(event), event.aggregate_id)
            versions[key] += 1
            numbered.append(replace(event, version=versions[key]))
        return numbered

    def _aggregate_of(self, event: Recorded[Any]) -> str:
        return event.aggregate or self._joins.owners.get(cast("Any", type(event.data)), "")

    def _missing(self, event: Recorded[Any], before: Cell) -> ProjectionStopped:
        aggregate, table = self._aggregate_of(event), self._joins.table.name
        return ProjectionStopped(
            self._name,
            f"the state of {aggregate} {event.aggregate_id!r} is of version {before.version}, and its event at "
            f"position {event.position} has version {event.version}",
            f"Either something other than eventjet changed {table}: then run `eventjet rebuild {self._name}`. Or the "
            "log lacks events of it, which `eventjet audit` names: then an archive may have them (`--from-archive`).",
        )


class StateReader:
    """Decodes the records of a projection with `by_state`.

    A record of an aggregate whose states are folded, and that has no effect (it is skipped, or its event is retired),
    becomes a `Recorded` without data: it counts for the version.
    """

    __slots__ = ("_aggregates", "_decode")

    def __init__(self, decode: Any, joins: Joins) -> None:
        """`decode` is the reader of the events in `joins.decoded`."""
        self._decode = decode
        self._aggregates = frozenset(joins.sources)

    def expect(self, records: Sequence[RawRecord]) -> None:
        self._decode.expect(records)

    def __call__(self, record: RawRecord) -> Recorded[Any] | None:
        event = self._decode(record)
        if event is not None:
            return event
        position, _, subject, block, _ = record
        try:
            aggregate, aggregate_id = entity_of(subject)
        except ValueError:
            return None
        version = number_of(block, VERSION) if aggregate in self._aggregates else None
        return None if version is None else Recorded(None, aggregate_id, version, position, _EPOCH, "", aggregate)
