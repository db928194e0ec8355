"""`Engine`: what carries out the bulk of a job. `rebuild` declares it; engines implement it and are found by name.

Nothing in this package imports Spark: the engine that does is looked up when a job asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol, TypeAlias

from eventjet.archive.manifest import Segment
from eventjet.archive.reading import ArchiveFiles
from eventjet.errors import UsageError
from eventjet.rebuild.load import Part, Target
from eventjet.rebuild.plan import ENGINES, EngineName, Plan
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.snapshot_folding import Tally

if TYPE_CHECKING:
    from eventjet.rebuild.job import Job

_FACTORIES: Mapping[EngineName, str] = {
    "spark": "eventjet.spark.engine:spark_engine",
    "local": "eventjet.rebuild.local:local_engine",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engine a job runs on, and where."""

    name: EngineName = "spark"
    master: str | None = None
    """Of Spark: else a session that runs already, else `SPARK_REMOTE`, else all cores of this machine."""
    ship: bool = True
    """Whether tasks on other machines are sent the application's package; otherwise it is installed there."""


class Engine(Protocol):
    """One engine for the length of one job. Every method blocks, and raises `Unreachable` when it cannot start."""

    @property
    def name(self) -> EngineName: ...

    def location(self) -> str | None:
        """Where it would run; None for this process."""
        ...

    def obstacle(self) -> str | None:
        """What it lacks on this machine, found out without starting it."""
        ...

    def archive_files(self, url: str) -> ArchiveFiles:
        """The files of an archive; raises `UsageError` for a file system that the engine does not know."""
        ...

    def load(self, job: Job, plan: Plan, targets: Sequence[Target]) -> list[Part]:
        """Fold what the plan reads and load it into the shadows; return what each part of each projection holds."""
        ...

    def fold_snapshots(self, job: Job, plan: Plan, aggregate: str, least: int) -> Tally:
        """Write the snapshots of the aggregates of one type that have `least` events."""
        ...

    def seal(self, job: Job, url: str, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
        """Archive ranges of positions (first, last), one segment each; the archive ends right before them."""
        ...


EngineFactory: TypeAlias = Callable[[EngineOptions, Watch], AbstractContextManager[Engine]]


def open_engine(engine: EngineName | EngineOptions, watch: Watch) -> AbstractContextManager[Engine]:
    """The engine of this name, until the end of a `with`; raises `UsageError` when there is none."""
    options = engine if isinstance(engine, EngineOptions) else EngineOptions(engine)
    if options.name not in _FACTORIES:
        raise UsageError(f"There is no engine {options.name!r}. Use {' or '.join(ENGINES)}.")
    factory: EngineFactory = resolve_name(_FACTORIES[options.name])
    return factory(options, watch)
