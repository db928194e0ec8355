"""PURE: what a rebuild will do, decided once at one pinned position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeAlias

from eventjet.jetstream.reader import Range, range_count, split
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved

EngineName: TypeAlias = Literal["spark", "local"]

ENGINES: tuple[EngineName, ...] = ("spark", "local")
KEYS_PER_PARTITION = 100_000
"""All rows of a partition are in the memory of one Python worker."""
EVENTS_PER_PARTITION = 1_000_000
"""What one task sorts to fold snapshots; it holds the state of one aggregate at a time."""
PARTITIONS_MAX = 10_000


class Route(Enum):
    """How events come to the fold of their row."""

    BY_AGGREGATE = "by aggregate"
    """Shuffled by the aggregate id, which the subject tells without decoding."""
    BY_KEY = "by key"
    """Decoded first, then shuffled by the keys they touch."""
    UNSHUFFLED = "as read"
    """Entries: every event makes its rows alone."""
    SEQUENTIAL = "sequential"
    """SQL by hand: one event after the other through its handler, in this process whatever the engine."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Projections that share one reading of the log and, unless unshuffled, one shuffle."""

    route: Route
    projections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """What there is to read of a log."""

    stream: str
    first: int
    last: int
    """The pinned position: events after it come by catching up."""
    archived: int = 0
    """Positions from `first` to this one are read from an archive; less than `first` when none are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Extent):
    """A rebuild as a value: the same plan reads the same events, whoever carries it out."""

    engine: EngineName
    ranges: tuple[Range, ...]
    """Of the positions that are read from the log itself."""
    partitions: int
    """How many parts the keys are spread over."""
    passes: tuple[Pass, ...]

    @property
    def events(self) -> int:
        """Events of one reading of the log."""
        return max(0, self.last - self.first + 1)

    def folded(self) -> Plan:
        """What is left for the engine: the passes that are not sequential."""
        return replace(self, passes=tuple(one for one in self.passes if one.route is not Route.SEQUENTIAL))


def make_plan(extent: Extent, resolved: Sequence[AnyResolved], *, keys: int, engine: EngineName, cores: int) -> Plan:
    """Plan the rebuild of `resolved`; `keys` is about how many rows there may be."""
    partitions = max(1, cores, -(-keys // KEYS_PER_PARTITION)) if engine == "spark" else 1
    return _plan(extent, engine, cores, partitions, tuple(_passes(resolved, engine)))


def plan_snapshots(extent: Extent, *, engine: EngineName, cores: int) -> Plan:
    """Plan the snapshots of one aggregate type: one reading of the log, one shuffle, nothing loaded."""
    events = max(0, extent.last - extent.first + 1)
    partitions = max(cores, -(-events // EVENTS_PER_PARTITION))
    return _plan(extent, engine, cores, partitions, (Pass(Route.BY_AGGREGATE, ()),))


def _plan(extent: Extent, engine: EngineName, cores: int, partitions: int, passes: tuple[Pass, ...]) -> Plan:
    archived = min(extent.archived, extent.last)
    from_log = max(extent.first, archived + 1)
    return Plan(
        stream=extent.stream,
        engine=engine,
        first=extent.first,
        last=extent.last,
        archived=archived,
        ranges=split(from_log, extent.last, range_count(extent.last - from_log + 1, at_least=cores)),
        partitions=min(partitions, PARTITIONS_MAX),
        passes=passes,
    )


def route_of(resolved: AnyResolved) -> Route:
    """How this projection's events have to travel."""
    if not isinstance(resolved, ResolvedProjection):
        return Route.SEQUENTIAL
    if not resolved.reads:
        return Route.UNSHUFFLED
    return Route.BY_AGGREGATE if resolved.keyed_by_aggregate else Route.BY_KEY


def _passes(resolved: Sequence[AnyResolved], engine: EngineName) -> Iterator[Pass]:
    """On Spark folds by aggregate share a shuffle, and entries ride along; every other key needs one of its own."""
    routes = {one.name: route_of(one) for one in resolved}
    folded = [name for name, route in routes.items() if route is not Route.SEQUENTIAL]
    shared = tuple(name for name in folded if engine == "local" or routes[name] is not Route.BY_KEY)
    if shared:
        shuffled = engine != "local" and any(routes[name] is Route.BY_AGGREGATE for name in shared)
        yield Pass(Route.BY_AGGREGATE if shuffled else Route.UNSHUFFLED, shared)
    yield from (Pass(routes[name], (name,)) for name in routes if name not in shared)
