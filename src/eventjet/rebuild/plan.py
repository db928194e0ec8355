"""The plan of a job, made once at one pinned position: its engine, its ranges and its passes over the log. Pure."""

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
"""`auto` chooses Spark when a cluster is configured or the log is large, and this process otherwise."""

ENGINES: tuple[EngineName, ...] = ("spark", "local")
CHOICES: tuple[EngineChoice, ...] = ("auto", *ENGINES)
SPARK_EVENTS = 5_000_000
"""From this number of events on, `auto` chooses Spark: its start takes a small part of the time, and the rows, of some
hundred bytes each, may be too many for one process."""
KEYS_PER_PARTITION = 100_000
"""The number of keys is limited because all rows of a partition are in the memory of one Python worker."""
EVENTS_PER_PARTITION = 1_000_000
"""The number of events that one snapshot task sorts; it keeps the state of one aggregate at a time."""
PARTITIONS_MAX = 10_000


class Route(Enum):
    """How events are brought to the fold of their row."""

    BY_AGGREGATE = "by aggregate"
    """Events are shuffled by the aggregate id, which is in the subject and needs no decoding."""
    BY_KEY = "by key"
    """Events are decoded first, then shuffled by the keys of the rows they change."""
    BY_STATE = "by state, then by key"
    """Events are shuffled by the aggregate id and its states folded, then shuffled by the keys that these give."""
    UNSHUFFLED = "as read"
    """Events of an `entries` projection are not shuffled, because each event makes its rows alone."""
    SEQUENTIAL = "sequential"
    """Events of an SQL projection go through its handlers one by one, in this process whatever the engine."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Projections that share one pass over the log and, unless the route is unshuffled, one shuffle."""

    route: Route
    projections: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a job: the same plan reads the same events, whatever the engine."""

    stream: str
    first: int
    last: int
    """The pinned position; a rebuild writes the events after it when it catches up."""
    archived: int
    """The last position that is read from an archive; less than `first` when none is."""
    engine: EngineName
    ranges: tuple[Range, ...]
    """The ranges of positions that are read from the log itself."""
    partitions: int
    """The number of partitions over which the keys are spread."""
    passes: tuple[Pass, ...]

    @property
    def events(self) -> int:
        """The number of events in one pass over the log."""
        return max(0, self.last - self.first + 1)

    def folded(self) -> Plan:
        """Return the plan with only the passes that the engine runs: those that are not sequential."""
        return replace(
            self, passes=tuple(log_pass for log_pass in self.passes if log_pass.route is not Route.SEQUENTIAL)
        )


def choose_engine(
    events: int, *, cluster: str | None = None, installed: bool = True, remote_archive: bool = False
) -> tuple[EngineName, str]:
    """Return the engine for a log of `events` events, and one line that gives the reason.

    `cluster` is the configured Spark, if any; `installed` says whether pyspark is installed, and `remote_archive`
    whether the past is read from an archive that only Spark can read.
    """
    size = f"{events:,} event{'' if events == 1 else 's'}"
    if cluster is not None:
        return "spark", f"Engine: Spark on {cluster}, which is configured; {size}. `--engine local` is this process."
    if remote_archive:
        return "spark", f"Engine: Spark, since the archive is no folder of this machine; {size}."
    if events < SPARK_EVENTS:
        return "local", f"Engine: local, for {size}; from {SPARK_EVENTS:,} on it is Spark, or as `--engine` says."
    if installed:
        return (
            "spark",
            f"Engine: Spark on this machine, for {size}; below {SPARK_EVENTS:,} it is local, or as `--engine` says.",
        )
    return "local", f"Engine: local, since pyspark is not installed, though {size} are many for one process."


def make_plan(
    stream: str,
    first: int,
    last: int,
    resolved: Sequence[AnyResolved] = (),
    *,
    engine: EngineName,
    cores: int,
    keys: int = 0,
    archived: int = 0,
) -> Plan:
    """Plan the rebuild of `resolved` from the events up to `last`; without projections, plan snapshots.

    `keys` is an estimate of the number of rows, and `archived` the last position that an archive has.
    """
    archived = min(archived, last)
    from_log = max(first, archived + 1)
    size, per_partition = (keys, KEYS_PER_PARTITION) if resolved else (last - first + 1, EVENTS_PER_PARTITION)
    return Plan(
        stream=stream,
        first=first,
        last=last,
        archived=archived,
        engine=engine,
        ranges=split(from_log, last, range_count(last - from_log + 1, at_least=cores)),
        partitions=min(max(1, cores, -(-size // per_partition)), PARTITIONS_MAX) if engine == "spark" else 1,
        passes=tuple(_passes(resolved, engine)),
    )


def route_of(resolved: AnyResolved) -> Route:
    """Return how the events of a projection are brought to their rows."""
    if not isinstance(resolved, ResolvedProjection):
        return Route.SEQUENTIAL
    if not resolved.reads:
        return Route.UNSHUFFLED
    if resolved.joins is not None:
        # A row that moves belongs to one aggregate alone, and so does all that is needed for it.
        return Route.BY_AGGREGATE if resolved.joins.moves else Route.BY_STATE
    return Route.BY_AGGREGATE if resolved.keyed_by_aggregate else Route.BY_KEY


def _passes(resolved: Sequence[AnyResolved], engine: EngineName) -> Iterator[Pass]:
    """Yield the passes of these projections.

    Folds by aggregate and entries share one pass; on Spark each fold by another key or by state needs its own pass,
    because it needs its own shuffle. The local engine shuffles nothing, so all its folds share one pass.
    """
    routes = {projection.name: route_of(projection) for projection in resolved}
    folded = [name for name, route in routes.items() if route is not Route.SEQUENTIAL]
    own = (Route.BY_KEY, Route.BY_STATE)
    shared = tuple(name for name in folded if engine == "local" or routes[name] not in own)
    if shared:
        shuffled = engine != "local" and any(routes[name] is Route.BY_AGGREGATE for name in shared)
        yield Pass(Route.BY_AGGREGATE if shuffled else Route.UNSHUFFLED, shared)
    yield from (Pass(routes[name], (name,)) for name in routes if name not in shared)
