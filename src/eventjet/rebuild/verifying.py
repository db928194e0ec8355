"""`verify`: prove that a live read model is what the log says, row by row, with nothing paused."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from eventjet import failpoints
from eventjet.codec.headers import RawRecord
from eventjet.domain.identity import encode_id
from eventjet.errors import RebuildError, RowUnreadable
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.ranges import read_range
from eventjet.log.stream_check import check_same_log
from eventjet.projections.app_ref import Application, AppRef, projections_of
from eventjet.projections.fold import RowKey, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.rebuild.catchup import check_loaded, replaying
from eventjet.rebuild.choice import EngineChoice
from eventjet.rebuild.compare import Difference, are_equal, compare_rows, compare_tables, differing, key_of
from eventjet.rebuild.job import EngineOptions, Job, in_job
from eventjet.rebuild.plan import EngineName, Plan
from eventjet.rebuild.progress import Report
from eventjet.rebuild.runner import load
from eventjet.rebuild.shadow import R_co, Shadow, shadow_of
from eventjet.rebuild.spaces import remove_orphaned
from eventjet.rebuild.witness import Witness
from eventjet.settings import Settings
from eventjet.sql.checkpoint import RETIRED, Checkpoint

NEVER = "never equal"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found."""

    projection: str
    revision: int
    engine: EngineName
    position: int
    """Where the live read model stood when its rows were copied."""
    events: int
    rows: int
    """Live rows compared."""
    differences: int
    examples: tuple[Difference, ...]
    """The first differences, by key."""
    seconds: Mapping[str, float]


async def verify(
    app: Application | AppRef,
    name: str,
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    from_archive: str | None = None,
    progress: Report | None = None,
) -> VerifyReport:
    """Rebuild a read model to a shadow at the live one's position and compare them; the live one is only read.

    Where nothing differs, its checkpoint says from then on that this code made its rows.

    `from_archive` is as `rebuild` has it. Raises as that does, and `LogRolledBack` when the live read model was made
    from another past.
    """
    return await in_job(
        app,
        settings,
        engine,
        lambda job: _verify(job, name),
        check=lambda app: projections_of(app, [name]),
        from_archive=from_archive,
        progress=progress,
    )


def _verify(job: Job, name: str) -> VerifyReport:
    (resolved,) = projections_of(job.app, [name])
    with job.watch.phase("start"):
        job.database.check_sessions()
        remove_orphaned(job.database)
    outcome = _verify_tables(job, resolved) if isinstance(resolved, ResolvedSql) else _verify_rows(job, resolved)
    plan, rows, differences, examples = outcome
    return VerifyReport(
        projection=resolved.name,
        revision=resolved.revision,
        engine=plan.engine,
        position=plan.last,
        events=plan.events,
        rows=rows,
        differences=differences,
        examples=tuple(examples),
        seconds=job.watch.seconds,
    )


def _verify_rows(job: Job, resolved: ResolvedProjection) -> tuple[Plan, int, int, list[Difference]]:
    """By the fold, on the job's engine."""
    with _copied(job, resolved) as (shadow, plan, at):
        check_loaded(shadow, plan, load(job, plan, [shadow]))
        failpoints.reach("verify.loaded")
        with job.watch.phase("compare"):
            rows, differences, pairs = compare_rows(shadow, job.watch)
            codec = RowCodec(resolved.table, resolved.row_type, job.database.dialect)
            keyed = [(key_of(other if one is None else one, codec), one, other) for one, other in pairs]
            live = {key: one for key, one, _ in keyed if not isinstance(one, RowUnreadable) or one.has_key}
            since = _since_when(job, plan, resolved, live, shadow.target.known) if live else {}
            examples = [
                Difference(
                    key,
                    one.values if isinstance(one, RowUnreadable) else one,
                    other,
                    differing(one, other, codec),
                    NEVER if since.get(key) is None else f"missed since {since[key]}",
                    since.get(key),
                )
                for key, one, other in keyed
            ]
        failpoints.reach("verify.compared")
        if not differences:
            shadow.note_proof(at)
        return plan, rows, differences, examples


def _verify_tables(job: Job, resolved: ResolvedSql) -> tuple[Plan, int, int, list[Difference]]:
    """By its handlers, sequentially, whatever the engine."""
    with _copied(job, resolved) as (shadow, plan, at):
        job.source.check(plan, job.watch)
        with replaying(shadow, job) as follower:
            follower.replay(plan)
        failpoints.reach("verify.loaded")
        with job.watch.phase("compare"):
            rows, differences, examples = compare_tables(shadow, job.watch)
        failpoints.reach("verify.compared")
        if not differences:
            shadow.note_proof(at)
        return plan, rows, differences, examples


@contextmanager
def _copied(job: Job, resolved: R_co) -> Generator[tuple[Shadow[R_co], Plan, Checkpoint]]:
    """A shadow with a copy of the live rows, the plan to make them again, and the checkpoint of the copy."""
    with shadow_of(job.database, resolved, job.log.identity, job.watch, to_swap=False) as shadow:
        with job.watch.phase("copy"):
            at = shadow.copy_live()
            if at is None or at.state == RETIRED:
                raise RebuildError(
                    f"{resolved.name!r} has no live read model yet, so there is nothing to verify. "
                    "Start a worker, or run `eventjet rebuild`."
                )
            with NatsConnection.open(job.log.endpoint) as connection:
                check_same_log(connection, job.log.stream, at)
        failpoints.reach("verify.copied")
        yield shadow, job.plan([resolved], at.position), at


def _since_when(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any], known: Mapping[int, str]
) -> dict[RowKey, int | None]:
    """For each key the position of the first event that the live row does not show; None where it was never equal.

    `known` is what was decided about events in the quarantine.
    """
    codec = RowCodec(resolved.table, resolved.row_type, job.database.dialect)
    witness = Witness(resolved, live, known, partial(are_equal, codec=codec))
    for event in _events(job, plan, resolved, live, known):
        witness.see(event)
    return {key: witness.missed_since(key) for key in live}


def _events(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any], known: Mapping[int, str]
) -> Iterator[Any]:
    with job.earlier() as earlier:
        decode = reader(job.catalog, resolved, known, earlier)
        for records in _records(job, plan, resolved, live):
            decode.expect(records)
            yield from filter(None, map(decode, records))


def _records(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any]
) -> Iterator[list[RawRecord]]:
    """What could have touched the keys, in order: their own aggregates' records, or everything."""
    end = plan.last + 1
    if job.source.archive is not None or not resolved.keyed_by_aggregate:
        yield from job.source.records(plan.first, end)
        return
    for (aggregate_id,) in live:
        subject = f"{plan.stream}.*.{encode_id(aggregate_id)}"
        yield from read_range(job.log.endpoint, plan.stream, plan.first, end, filter_subject=subject)
