"""`build_snapshots` reads the log once and writes a snapshot of every aggregate of one type.

Commands go on meanwhile, because a snapshot never replaces a newer one. A second run writes the missing snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eventjet.codec.headers import RawRecord
from eventjet.codec.reasons import faults_of
from eventjet.codec.records import Decoder
from eventjet.codec.subjects import entity_of, snapshot_bucket
from eventjet.commands.loading import fold_records
from eventjet.domain.aggregate import AggregateInfo
from eventjet.domain.history import FoldedState
from eventjet.errors import DefinitionError, EventjetError, StreamMissing, Unreachable, UsageError
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.log.snapshots import SNAPSHOT_MAX, WINDOW, WINDOW_BYTES, BulkSnapshots, Offer, SnapshotCodec
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import Application, AppRef, aggregate_of
from eventjet.rebuild.job import SNAPSHOT_FAULTS_MAX, EngineOptions, Job, SnapshotTally, in_job
from eventjet.rebuild.plan import EngineChoice, EngineName
from eventjet.rebuild.progress import Report
from eventjet.settings import Settings


class SnapshotFold:
    """A fold of the histories of one aggregate type, which writes snapshots of those that are long enough."""

    def __init__(
        self,
        app: Application,
        aggregate: str,
        min_events: int,
        endpoint: Endpoint,
        last: int,
        skipped: Mapping[int, str],
    ) -> None:
        self.tally = SnapshotTally()
        self._initial, _ = snapshotted(app, aggregate)
        self._codec: SnapshotCodec[Any] = SnapshotCodec(self._initial)
        self._decoder = Decoder(app.catalog.of_log(skipped))
        self._min_events = min_events
        self._bucket = BulkSnapshots(endpoint, app.name, snapshot_bucket(app.name), last, self._codec.decode)
        self._prefix = len(app.name) + 1
        self._states: dict[bytes, FoldedState[Any] | None] = {}
        self._offers: list[Offer] = []
        self._bytes = 0

    def __enter__(self) -> SnapshotFold:
        return self

    def __exit__(self, *_: object) -> None:
        self._bucket.__exit__()

    def take(self, subject: bytes, records: Sequence[RawRecord]) -> None:
        """Fold the next events of one aggregate; after a broken event, the rest of its history is ignored."""
        self.tally.events += len(records)
        state = self._states[subject] if subject in self._states else FoldedState(self._initial(), 0, 0)
        if state is None:
            return
        try:
            entity_of(subject)  # raises for a subject that names no entity
            self._states[subject] = fold_records(state, records, self._decoder)
        except DefinitionError as error:  # raised by one aggregate's `evolve`; the others go on
            self._mark_broken(subject, f"Folding {_subject_text(subject)}: {faults_of(error)}. Fix that first.")
        except EventjetError as error:
            self._mark_broken(subject, str(error))
        except Exception as error:  # noqa: BLE001 - the subject may be any
            reason = f"{type(error).__name__}: {faults_of(error)}"
            self._mark_broken(subject, f"Folding {_subject_text(subject)} raised {reason}. Fix that first.")

    def finish(self, subject: bytes) -> None:
        """Take the folded state of an aggregate as final; its snapshot is written with the next batch of snapshots."""
        state = self._states.pop(subject)
        self.tally.aggregates += 1
        if state is None:
            return
        if state.version < self._min_events:
            self.tally.few += 1
            return
        value = self._codec.encode(state)
        if value is None:
            self.tally.unkept += 1
        elif len(value) > SNAPSHOT_MAX:
            self.tally.too_large += 1
        else:
            self._offer(Offer(subject[self._prefix :].decode(), state.position, state.event_id, value))

    def __len__(self) -> int:
        return len(self._states)

    def done(self, progress: Callable[[int, int], None] | None = None) -> SnapshotTally:
        """Finish all aggregates and write the remaining snapshots; `progress` gets (aggregates done, aggregates)."""
        for number, subject in enumerate(subjects := list(self._states)):
            if progress is not None and number % WINDOW == 0:
                progress(number, len(subjects))
            self.finish(subject)
        self._write()
        self.tally.written, self.tally.newer = self._bucket.written, self._bucket.newer
        return self.tally

    def _offer(self, offer: Offer) -> None:
        if len(self._offers) == WINDOW or self._bytes + len(offer.value) > WINDOW_BYTES:
            self._write()
        self._offers.append(offer)
        self._bytes += len(offer.value)

    def _write(self) -> None:
        self._bucket.put(self._offers)
        self._offers, self._bytes = [], 0

    def _mark_broken(self, subject: bytes, reason: str) -> None:
        self._states[subject] = None
        self.tally.broken += 1
        if len(self.tally.faults) < SNAPSHOT_FAULTS_MAX:
            self.tally.faults.append(reason)


def by_subject(records: Iterable[RawRecord]) -> dict[bytes, list[RawRecord]]:
    """Group records by subject, in their order."""
    histories: dict[bytes, list[RawRecord]] = {}
    for record in records:
        histories.setdefault(record[2], []).append(record)
    return histories


def snapshotted(app: Application, name: str) -> tuple[Any, AggregateInfo]:
    """Return the class of an aggregate that keeps snapshots, and its declaration; raises `UsageError`."""
    cls, info = aggregate_of(app, name)
    if info.snapshot_every is None:
        raise UsageError(
            f"The aggregate {name!r} keeps no snapshots, so no load would look for one. "
            "Declare how often it should, as in `snapshot_every=100`."
        )
    return cls, info


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The outcome of `build_snapshots`."""

    aggregate: str
    engine: EngineName
    position: int
    """The last position that was read."""
    min_events: int
    """The least number of events of an aggregate that gets a snapshot."""
    tally: SnapshotTally
    """The number of aggregates for each outcome."""
    seconds: Mapping[str, float]
    """Wall time by phase."""


async def build_snapshots(
    app: Application | AppRef,
    aggregate: str,
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    min_events: int | None = None,
    progress: Report | None = None,
) -> SnapshotReport:
    """Write a snapshot of every aggregate of one type that has at least `min_events` events.

    `aggregate` is the name of the type, and `min_events` defaults to its `snapshot_every`. The local engine keeps the
    states of all aggregates in memory; Spark keeps one state per task. `progress` is called from another thread. The
    report names the broken histories.

    Raises `UsageError` for an aggregate type that keeps no snapshots; `Unreachable` and `RebuildError`.
    """
    return await in_job(
        app,
        settings.for_log(),
        engine,
        lambda job: _build(job, aggregate, min_events),
        check=lambda app: snapshotted(app, aggregate),
        progress=progress,
    )


def _subject_text(subject: bytes) -> str:
    return subject.decode("utf-8", "replace")


def _build(job: Job, aggregate: str, min_events: int | None) -> SnapshotReport:
    _, info = snapshotted(job.app, aggregate)
    least = info.snapshot_every if min_events is None else min_events
    assert least is not None
    if least < 1:
        raise UsageError(f"min_events is {least}. Give 1 or more.")
    bucket = snapshot_bucket(job.app.name)
    with job.watch.phase("start"):
        try:
            ask_once(job.log.endpoint, stream_info(f"KV_{bucket}"))
        except StreamMissing:
            raise Unreachable(f"The bucket {bucket!r}", "it does not exist", "Run `eventjet init` once.") from None
    plan = job.plan((), job.log.state.last)
    tally = job.engine.fold_snapshots(job, plan, aggregate, least) if plan.events else SnapshotTally()
    return SnapshotReport(aggregate, plan.engine, plan.last, least, tally, job.watch.seconds)
