"""What a job will do, decided once at one pinned position: its engine, its ranges and its passes over the log. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeAlias

from eventjet.jetstream.reader import Range, range_count, split
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved

EngineName: TypeAlias = Literal["spark", "local"]
EngineChoice: TypeAlias = EngineName | Literal["auto"]
"""`auto`: Spark where one is configured or the log is large, otherwise this process."""

ENGINES: tuple[EngineName, ...] = ("spark", "local")
CHOICES: tuple[EngineChoice, ...] = ("auto", *ENGINES)
SPARK_EVENTS = 5_000_000
"""Events from which `auto` is Spark: its start no longer counts, and the rows, of some hundred bytes each, may be too
many for one process."""
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
    """A rebuild as a value: the same plan reads the same events, on whichever engine."""

    engine: EngineName
    ranges: tuple[Range, ...]
    """Of the positions that are read from the log itself."""
    partitions: int
    """How many parts the keys are spread over."""
    passes: tuple[Pass, ...]

    @property
    def events(self) -> int:
        """How many events one reading of the log has."""
        return max(0, self.last - self.first + 1)

    def folded(self) -> Plan:
        """Return what is left for the engine: the passes that are not sequential."""
        return replace(self, passes=tuple(each for each in self.passes if each.route is not Route.SEQUENTIAL))


def choose_engine(
    events: int, *, cluster: str | None = None, installed: bool = True, remote_archive: bool = False
) -> tuple[EngineName, str]:
    """Return the engine for a log of so many events, and in a line why.

    `cluster` is a Spark that is configured, `installed` tells whether pyspark is, and `remote_archive` whether the past
    is read from an archive that only Spark reaches.
    """
    size = f"{events:,} event{'' if events == 1 else 's'}"
    if cluster is not None:
        return "spark", f"Engine: Spark on {cluster}, which is configured; {size}. `--engine local` is this process."
    if remote_archive:
        return "spark", f"Engine: Spark, since the archive is no folder of this machine; {size}."
    if events < SPARK_EVENTS:
        return "local", f"Engine: local: {size}; from {SPARK_EVENTS:,} on it is Spark, or as `--engine` says."
    if installed:
        return (
            "spark",
            f"Engine: Spark on this machine: {size}, from {SPARK_EVENTS:,} on. `--engine local` is quicker to start.",
        )
    return "local", f"Engine: local, since pyspark is not installed, though {size} are many for one process."


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
    """Return how this projection's events have to travel."""
    if not isinstance(resolved, ResolvedProjection):
        return Route.SEQUENTIAL
    if not resolved.reads:
        return Route.UNSHUFFLED
    return Route.BY_AGGREGATE if resolved.keyed_by_aggregate else Route.BY_KEY


def _passes(resolved: Sequence[AnyResolved], engine: EngineName) -> Iterator[Pass]:
    """Yield the passes: folds by aggregate and entries share one; on Spark every other key needs one of its own."""
    routes = {projection.name: route_of(projection) for projection in resolved}
    folded = [name for name, route in routes.items() if route is not Route.SEQUENTIAL]
    shared = tuple(name for name in folded if engine == "local" or routes[name] is not Route.BY_KEY)
    if shared:
        shuffled = engine != "local" and any(routes[name] is Route.BY_AGGREGATE for name in shared)
        yield Pass(Route.BY_AGGREGATE if shuffled else Route.UNSHUFFLED, shared)
    yield from (Pass(routes[name], (name,)) for name in routes if name not in shared)
