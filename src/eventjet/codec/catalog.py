"""Look up event classes by wire name and schema, and declare upcasters from an old schema to the next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from eventjet.codec.aliases import alias_faults
from eventjet.codec.bodies import BodyCodec
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.unions import union_faults
from eventjet.domain.aggregate import EventInfo, event_info, field_faults, is_count
from eventjet.domain.blob import holds_blobs
from eventjet.domain.personal import is_private, masked, masked_undeclared, masked_whole

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}")

Step = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Upcaster:
    """A pure function from the JSON object of `schema` to that of `schema + 1`, declared by `@upcaster`."""

    name: str
    schema: int
    step: Step

    def __call__(self, body: dict[str, Any], /) -> dict[str, Any]:
        return self.step(body)


def upcaster(name: str, /, *, schema: int) -> Callable[[Step], Upcaster]:
    """Declare how a body of the event `name` at schema `schema` becomes the next; list it in `App(upcasters=[…])`.

    ```python
    @upcaster("account.withdrawn", schema=1)
    def withdrawn_has_a_reason(body: dict[str, object]) -> dict[str, object]:
        return {**body, "reason": "cash"}

    assert withdrawn_has_a_reason({"amount": "3"}) == {"amount": "3", "reason": "cash"}
    ```
    """
    return lambda step: Upcaster(name, schema, step)


class EncodedEvent(NamedTuple):
    """The stored form of an event, without its subject and position."""

    type_name: str
    schema: int
    body: bytes
    event: Any = None
    """The event as it will be read back: equal to the given event, with the profile's time zones and containers."""


@dataclass(frozen=True, slots=True)
class EventType:
    """A declared event: its class and its wire form."""

    event_type: type
    info: EventInfo
    codec: BodyCodec
    aggregate: str | None = None
    """The aggregate that folds the event; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The decoder of one (wire name, schema)."""

    event: EventType
    decode: Callable[[bytes], Any]
    """Returns the event of a body, upcast if its schema is older; raises `ValueError`, or what an upcaster raises."""
    aggregate: str | None
    """The aggregate that folds the event; None if that is not known."""


def _upcasting(event: EventType, steps: Sequence[Upcaster]) -> Callable[[bytes], Any]:
    def decode(body: bytes) -> Any:
        value = read_json(body)
        for step in steps:
            value = step(value)
        return event.codec.decode(dump_json(value))

    return decode


class Catalog:
    """All declared events of an app, by class and by wire name."""

    def __init__(
        self,
        event_types: Sequence[type] | Mapping[type, str],
        upcasters: Sequence[Upcaster] = (),
        retired: Sequence[str] = (),
        retired_aggregates: Sequence[str] = (),
    ) -> None:
        """A mapping of event types gives the aggregate of each event; only its subjects may carry the event."""
        self.skipped: dict[int, str] = {}
        """Position → reason of the skipped records of one log, known from their skip markers: see `of_log`."""
        owners = event_types if isinstance(event_types, Mapping) else dict[type, str]()
        self._types = {
            event_type: EventType(event_type, event_info(event_type), BodyCodec(event_type), owners.get(event_type))
            for event_type in dict.fromkeys(event_types)
        }
        self.is_private = any(map(is_private, self._types))
        """Whether an event of the app contains personal data; the app sets it, too, for its other private classes."""
        self.with_blobs = frozenset(cls for cls, kind in self._types.items() if holds_blobs(kind.codec.schema))
        """The events that have a `Blob` at any depth."""
        self._upcasters = tuple(upcasters)
        self._steps = {(step.name, step.schema): step for step in upcasters}
        self.retired = frozenset(retired)
        """Names of events that are no longer recorded, so that readers pass over them."""
        self.retired_aggregates = frozenset(retired_aggregates)
        """Names of aggregates whose events readers pass over."""
        self.aggregates = frozenset(owners.values()) | self.retired_aggregates
        """Names of the aggregates that the app knows, retired aggregates included."""
        self._names: dict[str, EventType] = {}
        for kind in self._types.values():
            for name in (kind.info.name, *kind.info.formerly):
                self._names.setdefault(name, kind)

    def encode(self, event: Any) -> EncodedEvent:
        """Encode an event and check it by reading it back.

        Raises `UnencodableEvent`, and `KeyError` for a class that no aggregate folds.
        """
        kind = self._types[type(event)]
        return EncodedEvent(kind.info.name, kind.info.schema, *kind.codec.read_back(event))

    def encode_unchecked(self, event: Any) -> EncodedEvent:
        """Encode an event that is compared and not stored: its `event` is None. Raises as `encode`."""
        kind = self._types[type(event)]
        return EncodedEvent(kind.info.name, kind.info.schema, kind.codec.written(event))

    def __contains__(self, event_type: type) -> bool:
        return event_type in self._types

    def of_log(self, skipped: Mapping[int, str] = MappingProxyType({})) -> Catalog:
        """Return a copy for the readers of one log, which share what they learn of its skip markers."""
        catalog = copy(self)
        catalog.skipped = dict(skipped)
        return catalog

    def named(self, type_name: str) -> EventType | None:
        """Return the declared event with a current or former wire name, at any schema; None if there is none."""
        return self._names.get(type_name)

    def aggregates_of(self, event_types: Collection[type]) -> frozenset[str] | None:
        """Return the aggregates whose subjects may carry these events; None if the aggregate of one is not known."""
        aggregates = {kind.aggregate if (kind := self._types.get(event_type)) else None for event_type in event_types}
        return None if None in aggregates else frozenset(filter(None, aggregates))

    def kinds(self) -> Sequence[EventType]:
        """Return every declared event."""
        return tuple(self._types.values())

    def masked(self, type_name: str, schema: int | None, body: Any) -> Any:
        """Return the JSON of a body with its personal values hidden, and with those hidden that nobody knows.

        These are the values of an unknown event, of an event with personal data at another schema, and of fields that
        no class declares, at any depth. An app without personal data hides nothing.
        """
        if not self.is_private:
            return body
        kind = self._names.get(type_name)
        if kind is None or not isinstance(body, dict):
            return masked_whole(body)
        cls, value = kind.event_type, cast("dict[str, Any]", body)
        is_same_schema = kind.info.schema == (1 if schema is None else schema)
        if is_private(cls) and not is_same_schema:
            return masked_whole(value)
        return masked(masked_undeclared(value, cls, is_same_schema=is_same_schema), cls)

    def masked_body(self, type_name: str | None, schema: int | None, body: bytes) -> bytes | None:
        """Return a stored body with the values hidden that `masked` hides; None if it has no value to show.

        Bodies of unknown events and of events with personal fields have none.
        """
        if not self.is_private:
            return body
        kind = self._names.get(type_name or "")
        if kind is None or is_private(kind.event_type):
            return None
        try:
            value = read_json(body)
            shown = self.masked(kind.info.name, schema, value)
            return body if shown == value else dump_json(shown)
        except (ValueError, RecursionError):
            return None

    def resolve(self, type_name: str, schema: int) -> Resolved | None:
        """Return the decoder of a stored event; None if it is unknown, newer than this app, or lacks an upcaster."""
        kind = self._names.get(type_name)
        if kind is None or not 1 <= schema <= kind.info.schema:
            return None
        try:
            steps = [self._steps[kind.info.name, number] for number in range(schema, kind.info.schema)]
        except KeyError:
            return None
        return Resolved(kind, _upcasting(kind, steps) if steps else kind.codec.decode, kind.aggregate)

    def faults(self) -> list[str]:
        """Return the faults of names, schemas and chains of upcasters, each as a sentence."""
        faults: list[str] = []
        owners: dict[str, type] = {}
        for cls, kind in self._types.items():
            schema = kind.codec.schema
            faults += [*field_faults(cls), *union_faults(schema, cls.__qualname__), *alias_faults(schema)]
            if not _NAME.fullmatch(kind.info.name):
                faults.append(f"the wire name {kind.info.name!r} of {cls.__qualname__} is not {_NAME.pattern}")
            if not is_count(kind.info.schema):
                faults.append(
                    f"the event {kind.info.name!r} has schema {kind.info.schema!r}; give a whole number, 1 or more"
                )
            faults += [
                f"the former name {name!r} of {cls.__qualname__} is not {_NAME.pattern}"
                for name in kind.info.formerly
                if not _NAME.fullmatch(name)
            ]
            for name in (kind.info.name, *kind.info.formerly):
                if owners.setdefault(name, cls) is not cls:
                    faults.append(
                        f"{owners[name].__qualname__} and {cls.__qualname__} both have the wire name {name!r}; a "
                        "reader would not know which is stored: rename one, or drop the name from the `formerly` of one"
                    )
                if name in self.retired:
                    faults.append(
                        f"the event {name!r} is both declared and retired; take it out of `retired_events`, or out of "
                        "its aggregate's `evolve`"
                    )
        faults += [
            f"the retired event {name!r} is not {_NAME.pattern}, so no event was ever called so"
            for name in sorted(self.retired)
            if not _NAME.fullmatch(name)
        ]
        return faults + self._upcasting_faults()

    def _upcasting_faults(self) -> list[str]:
        current = {kind.info.name: kind.info.schema for kind in self._types.values()}
        faults = [
            f"the event {name!r} is at schema {schema} and no @upcaster({name!r}, schema={number}) leads on from "
            f"schema {number}"
            for name, schema in current.items()
            for number in range(1, schema if is_count(schema) else 1)
            if (name, number) not in self._steps
        ]
        for (name, schema), count in Counter((step.name, step.schema) for step in self._upcasters).items():
            if count > 1:
                faults.append(f"two upcasters are declared for {name!r} schema {schema}; leave one out")
            if name not in current:
                faults.append(
                    f"an upcaster is declared for {name!r}, which no aggregate folds; give the event's present name, "
                    "or leave the upcaster out"
                )
            elif is_count(current[name]) and not (is_count(schema) and schema < current[name]):
                faults.append(
                    f"the upcaster for {name!r} schema {schema!r} leads beyond schema {current[name]}; raise the "
                    "event's `schema`, or leave the upcaster out"
                )
        return faults
