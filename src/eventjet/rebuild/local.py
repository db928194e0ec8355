"""The local engine reads, decodes, folds and loads in this process, without a JVM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Literal

from eventjet import failpoints
from eventjet.archive.reading import FolderFiles, Segment
from eventjet.domain.quarantined import Quarantined
from eventjet.errors import UsageError
from eventjet.jetstream.reader import read_range
from eventjet.rebuild.folding import Foldings, foldings_of
from eventjet.rebuild.job import EngineOptions, Job
from eventjet.rebuild.plan import Plan
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import Part, Target
from eventjet.rebuild.snapshots import SnapshotFold, SnapshotTally, by_subject
from eventjet.rebuild.workspace import load_part
from eventjet.runtime import read_ahead, uncollected

_REPORT_EVERY = 2_000


def local_engine(options: EngineOptions, watch: Watch) -> AbstractContextManager[LocalEngine]:
    del options, watch
    return nullcontext(LocalEngine())


class LocalEngine:
    """The engine that runs in this process; see `eventjet.rebuild.job.Engine`."""

    name: Literal["local"] = "local"

    def location(self) -> None:
        return None

    def obstacle(self) -> None:
        return None

    def archive_files(self, url: str) -> FolderFiles:
        return FolderFiles(url)

    def load(self, job: Job, plan: Plan, targets: Sequence[Target]) -> list[Part]:
        watch = job.watch
        parts: list[Part] = []

        def load_rows(
            target: Target, rows: Iterable[Sequence[Any]], events: int, quarantined: Sequence[Quarantined]
        ) -> None:
            count = load_part(target, len(parts), rows)
            parts.append(Part(target.projection, events, count, quarantined, of_states=target.of_states))

        with job.earlier() as earlier, watch.phase("read", plan.events), uncollected():
            foldings = Foldings(foldings_of(job.app, targets), job.catalog, earlier)
            pairs = list(zip(targets, foldings.each, strict=True))
            failpoints.reach("rebuild.engine_started")
            done = 0
            batches = job.source.records(plan.first, plan.last + 1)
            with closing(read_ahead(batches, watch.check)) as ahead:
                for records in ahead:
                    foldings.take(records)
                    for target, folding in pairs:
                        if folding.is_due():
                            load_rows(target, folding.drain(), 0, ())
                    failpoints.reach("rebuild.batch_read")
                    done += len(records)
                    watch.report("read", done, plan.events)
        total, loaded = sum(map(len, foldings.each)), 0
        with watch.phase("load"):
            for target, folding in pairs:
                load_rows(target, _with_progress(folding.rows(), watch, loaded, total), done, folding.quarantined)
                loaded += len(folding)
                if target.states is not None:
                    load_rows(target.states, folding.state_rows(), 0, ())
        return parts

    def fold_snapshots(self, job: Job, plan: Plan, aggregate: str, min_events: int) -> SnapshotTally:
        watch, endpoint = job.watch, job.log.endpoint
        subjects = f"{plan.stream}.{aggregate}.*"
        with (
            SnapshotFold(job.app, aggregate, min_events, endpoint, plan.last, job.catalog.skipped) as fold,
            uncollected(),
        ):
            with watch.phase("read", plan.events):
                batches = read_range(endpoint, plan.stream, plan.first, plan.last + 1, filter_subject=subjects)
                with closing(batches):
                    for records in batches:
                        for subject, subject_records in by_subject(records).items():
                            fold.take(subject, subject_records)
                        watch.report("read", records[-1][0] - plan.first + 1, plan.events)
            with watch.phase("load", len(fold)):
                return fold.done(lambda done, total: watch.report("load", done, total))

    def seal(self, job: Job, url: str, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
        del job, ranges
        raise UsageError(f"Only Spark writes archives. Seal {url} with the engine spark.")


def _with_progress(rows: Iterator[Sequence[Any]], watch: Watch, done: int, total: int) -> Iterator[Sequence[Any]]:
    """Yield the rows and report progress from `done` of `total` on."""
    for number, row in enumerate(rows, start=done):
        if number % _REPORT_EVERY == 0:
            watch.report("load", number, total)
        yield row
